# SPDX-License-Identifier: Apache-2.0
"""Protobuf of the kubelet's services to values and back; the only module that knows the generated messages.

v1beta1 of the DRA service is v1 without ``share_id``, and the health services v1 and v1beta1 are v1alpha1 under other
names, so one set of messages serves all of them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from numa_contract.errors import cut_answer

from dra_frontend._pb import dra_health_v1alpha1_pb2 as health_pb
from dra_frontend._pb import dra_v1_pb2 as dra_pb
from dra_frontend._pb import pluginregistration_pb2 as registration_pb
from dra_frontend.kubelet.values import ClaimName, Failure, HealthReport, Prepared, PreparedDevice

_log = logging.getLogger(__name__)

PrepareAnswers = Mapping[str, Prepared | Failure]
UnprepareAnswers = Mapping[str, Failure | None]


def read_claims(data: bytes) -> tuple[ClaimName, ...]:
    """Reads a prepare or an unprepare request: both are a list of claims."""
    request = dra_pb.NodePrepareResourcesRequest.FromString(data)
    return tuple(ClaimName(claim.namespace, claim.name, claim.uid) for claim in request.claims)


def prepare_writer(*, share_ids: bool) -> Callable[[PrepareAnswers], bytes]:
    """Returns the writer of prepare answers; v1beta1 has no share ids."""

    def write(answers: PrepareAnswers) -> bytes:
        response = dra_pb.NodePrepareResourcesResponse()
        for uid, answer in answers.items():
            response.claims[uid].CopyFrom(_prepared(uid, answer, share_ids=share_ids))
        return response.SerializeToString()

    return write


def write_unprepared(answers: UnprepareAnswers) -> bytes:
    """Writes the answer to unprepare; None is success."""
    response = dra_pb.NodeUnprepareResourcesResponse()
    for uid, failure in answers.items():
        response.claims[uid].error = "" if failure is None else _error_text(failure.text)
    return response.SerializeToString()


def _prepared(uid: str, answer: Prepared | Failure, *, share_ids: bool) -> dra_pb.NodePrepareResourceResponse:
    if isinstance(answer, Failure):
        return dra_pb.NodePrepareResourceResponse(error=_error_text(answer.text))
    if not answer.devices:
        # The kubelet takes it for success and starts the container with nothing injected.
        return dra_pb.NodePrepareResourceResponse(error=f"claim {uid}: prepared without any device; report this bug")
    try:
        devices = [_device(device, share_ids=share_ids) for device in answer.devices]
    except (TypeError, ValueError):  # protobuf refuses what is no text; one claim must not fail the others
        _log.exception("answer cannot be written", extra={"claim": uid})
        return dra_pb.NodePrepareResourceResponse(error=f"claim {uid}: its answer cannot be written; see the log")
    return dra_pb.NodePrepareResourceResponse(devices=devices)


def _device(device: PreparedDevice, *, share_ids: bool) -> dra_pb.Device:
    # A subrequest left in the name makes the kubelet inject nothing, silently.
    requests = dict.fromkeys(request.partition("/")[0] for request in device.requests)
    return dra_pb.Device(
        request_names=list(requests),
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_ids,
        share_id=device.share_id if share_ids else None,
    )


def _error_text(text: str) -> str:
    """An empty error would read as success; and the text goes into logs and Events, whoever wrote parts of it."""
    return cut_answer(text if text.isprintable() else repr(text)[1:-1]) or "unknown error"


def write_health(report: HealthReport, *, now: int, timeout: int) -> bytes:
    """Writes the complete list; ``now`` in seconds since the epoch, ``timeout`` in seconds."""
    return health_pb.NodeWatchResourcesResponse(
        devices=[
            health_pb.DeviceHealth(
                device=health_pb.DeviceIdentifier(pool_name=device.pool, device_name=device.device),
                health=health_pb.HealthStatus.Name(device.health.value),
                last_updated_time=now,
                health_check_timeout_seconds=timeout,
                message=device.message,
            )
            for device in report.devices
        ]
    ).SerializeToString()


def write_plugin_info(driver: str, endpoint: str, versions: Sequence[str]) -> bytes:
    """Writes what the kubelet asks at registration."""
    info = registration_pb.PluginInfo(type="DRAPlugin", name=driver, endpoint=endpoint, supported_versions=versions)
    return info.SerializeToString()


def read_status(data: bytes) -> tuple[bool, str]:
    """Reads the outcome of a registration: whether it worked, and the error."""
    status = registration_pb.RegistrationStatus.FromString(data)
    return status.plugin_registered, status.error
