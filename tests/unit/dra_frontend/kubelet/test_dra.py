# SPDX-License-Identifier: Apache-2.0
"""The DRA service's requests are parsed, and its responses are built. The results are checked against an independent
copy of the protobuf definitions.
"""

import pytest
from dra_frontend._pb import dra_v1beta1_pb2 as our_v1beta1
from dra_frontend.kubelet.dra import (
    ClaimName,
    ClaimResult,
    PreparedDevice,
    claim_names,
    prepare_response,
    unprepare_response,
)

from tests.fakes._pb import dra_v1_pb2, dra_v1beta1_pb2

DEVICE = PreparedDevice("cpus", "node", "cpudevnuma000", ("dra.k8s.io/cpu=claim-u",), "share")


def written(**answers: ClaimResult) -> dra_v1_pb2.NodePrepareResourcesResponse:
    return dra_v1_pb2.NodePrepareResourcesResponse.FromString(prepare_response(answers).SerializeToString())


def test_claims_are_parsed_from_both_versions_and_both_calls() -> None:
    """The UID is field number 2, and the name is field number 3. Prepare and Unprepare have the same format in v1 and
    v1beta1.
    """
    for messages in (dra_v1_pb2, dra_v1beta1_pb2):
        for message in (messages.NodePrepareResourcesRequest, messages.NodeUnprepareResourcesRequest):
            request = message(claims=[messages.Claim(namespace="ns", name="n", uid="u")])
            assert claim_names(request) == (ClaimName("ns", "n", "u"),)


def test_subrequests_are_stripped() -> None:
    """If a response contained a name like ``req/sub``, the kubelet would inject no device and report no error."""
    device = PreparedDevice("cpus/big", "p", "d", ("i",))
    (sent,) = written(u=ClaimResult((device,))).claims["u"].devices
    assert list(sent.request_names) == ["cpus"]


def test_share_id_is_sent_in_v1_and_unknown_to_v1beta1() -> None:
    """Shares of one device differ only in their share ID, and v1beta1 has no field for it."""
    (device,) = written(u=ClaimResult((DEVICE,))).claims["u"].devices
    assert device.share_id == "share"
    assert list(device.cdi_device_ids) == ["dra.k8s.io/cpu=claim-u"]
    data = prepare_response({"u": ClaimResult((DEVICE,))}, our_v1beta1).SerializeToString()
    (old,) = dra_v1beta1_pb2.NodePrepareResourcesResponse.FromString(data).claims["u"].devices
    assert (old.pool_name, old.device_name, list(old.request_names)) == ("node", "cpudevnuma000", ["cpus"])
    assert not dra_v1_pb2.NodePrepareResourcesResponse.FromString(data).claims["u"].devices[0].HasField("share_id")


BAD = PreparedDevice("r", "pool \udcff", "d", ("i",))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ClaimResult(()), "without any device"),
        (ClaimResult(error=""), "unknown error"),
        (ClaimResult(error="file \udcff.json"), "file "),
        (ClaimResult(error="x\n2026 ERROR forged\r\x1b[2J" + "é" * 9000), r"x\n2026 ERROR forged\r\x1b[2J"),
        (ClaimResult((BAD,)), "cannot be encoded"),
    ],
    ids=["no devices", "empty error", "unencodable error", "long error", "unencodable device"],
)
def test_a_failure_is_sent_as_a_failure_and_affects_only_its_own_claim(answer: ClaimResult, error: str) -> None:
    """An empty response or an empty error message would count as success. Every error message is cut to one short line,
    since it appears in logs and Events.
    """
    claims = written(bad=answer, good=ClaimResult((DEVICE,))).claims
    assert error in claims["bad"].error
    assert len(claims["bad"].error.encode()) <= 1024
    assert claims["bad"].error.isprintable()
    assert claims["good"].devices[0].device_name == "cpudevnuma000"
    data = unprepare_response({"bad": answer, "good": ClaimResult()}).SerializeToString()
    response = dra_v1_pb2.NodeUnprepareResourcesResponse.FromString(data)
    assert bool(response.claims["bad"].error) == (answer.error is not None)
    assert response.claims["good"].error == ""
