# SPDX-License-Identifier: Apache-2.0
"""Values to the kubelet's messages and back, read with an independent copy of the messages."""

import pytest
from dra_frontend.kubelet.messages import (
    PrepareAnswers,
    prepare_writer,
    read_claims,
    read_status,
    write_plugin_info,
    write_unprepared,
)
from dra_frontend.kubelet.values import ClaimName, Failure, Prepared, PreparedDevice

from tests.fakes._pb import dra_v1_pb2, dra_v1beta1_pb2, pluginregistration_pb2

DEVICE = PreparedDevice(("cpus",), "node", "cpudevnuma000", ("dra.k8s.io/cpu=claim-u",), "share")


def written(answers: PrepareAnswers) -> dra_v1_pb2.NodePrepareResourcesResponse:
    return dra_v1_pb2.NodePrepareResourcesResponse.FromString(prepare_writer(share_ids=True)(answers))


def test_claims_are_read_from_both_versions_and_both_calls() -> None:
    """UID has number 2 and name 3; prepare and unprepare of v1 and v1beta1 have the same form."""
    for messages in (dra_v1_pb2, dra_v1beta1_pb2):
        for message in (messages.NodePrepareResourcesRequest, messages.NodeUnprepareResourcesRequest):
            request = message(claims=[messages.Claim(namespace="ns", name="n", uid="u")])
            assert read_claims(request.SerializeToString()) == (ClaimName("ns", "n", "u"),)
    assert str(ClaimName("ns", "n", "u")) == "claim ns/n (u)"


@pytest.mark.fault("protocol trap 4.8")
def test_subrequests_are_stripped() -> None:
    """A name like ``req/sub`` would make the kubelet inject nothing, silently."""
    device = PreparedDevice(("cpus/big", "cpus/small"), "p", "d", ("i",))
    (sent,) = written({"u": Prepared((device,))}).claims["u"].devices
    assert list(sent.request_names) == ["cpus"]


@pytest.mark.fault("protocol trap 4.9")
def test_no_device_is_an_error() -> None:
    """An empty answer would read as success and start the container with nothing injected."""
    assert "without any device" in written({"u": Prepared(())}).claims["u"].error


@pytest.mark.fault("protocol trap 4.1")
def test_share_id_is_sent_in_v1_and_unknown_to_v1beta1() -> None:
    """Shares of one device differ by share id only; v1beta1 has no such field."""
    answers: PrepareAnswers = {"u": Prepared((DEVICE,))}
    (device,) = written(answers).claims["u"].devices
    assert device.share_id == "share"
    assert list(device.cdi_device_ids) == ["dra.k8s.io/cpu=claim-u"]
    data = prepare_writer(share_ids=False)(answers)
    (old,) = dra_v1beta1_pb2.NodePrepareResourcesResponse.FromString(data).claims["u"].devices
    assert (old.pool_name, old.device_name, list(old.request_names)) == ("node", "cpudevnuma000", ["cpus"])
    assert not dra_v1_pb2.NodePrepareResourcesResponse.FromString(data).claims["u"].devices[0].HasField("share_id")


@pytest.mark.parametrize("text", ["", "file \udcff.json"])
def test_a_failure_always_arrives_as_a_failure(text: str) -> None:
    """An empty text would read as success, and one with a broken file name could not be sent at all."""
    assert written({"u": Failure(text)}).claims["u"].error
    response = dra_v1_pb2.NodeUnprepareResourcesResponse.FromString(write_unprepared({"u": Failure(text), "v": None}))
    assert response.claims["u"].error
    assert response.claims["v"].error == ""


def test_an_answer_that_cannot_be_written_fails_alone() -> None:
    """One claim's bad value leaves the other claims of the batch as they are."""
    bad = PreparedDevice(("r",), "pool \udcff", "d", ("i",))
    claims = written({"bad": Prepared((bad,)), "good": Prepared((DEVICE,))}).claims
    assert "cannot be written" in claims["bad"].error
    assert claims["good"].devices[0].device_name == "cpudevnuma000"


def test_registration_messages() -> None:
    """The kubelet reads type, name, endpoint and services; we read its verdict."""
    info = pluginregistration_pb2.PluginInfo.FromString(write_plugin_info("dra.cpu", "/x.sock", ["v1.DRAPlugin"]))
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", "dra.cpu", "/x.sock")
    assert list(info.supported_versions) == ["v1.DRAPlugin"]
    status = pluginregistration_pb2.RegistrationStatus(plugin_registered=False, error="no")
    assert read_status(status.SerializeToString()) == (False, "no")
