# SPDX-License-Identifier: Apache-2.0
"""What depends on the API server's release and gates, with all stand-ins."""

from tests.stage.process import wait_for
from tests.stage.stage import OpenStage
from tests.stage.wires import ask_unix


def test_what_a_gate_allows_is_published_and_what_it_does_not_is_told(open_stage: OpenStage) -> None:
    """The mapping is there; without DRAListTypeAttributes devices are as ever, and the lack is told."""
    both = {"publishNodeAllocatableResourceMapping": True, "exposePCIeRoots": True}
    field, root = "nodeAllocatableResources", "resource.kubernetes.io/pcieRoot"
    stage = open_stage(kubernetes="1.37", gates_on=("DRANodeAllocatableResources",), config=both)
    instance = stage.add_ready_instance()
    devices = {device["name"]: device for one in stage.slices() for device in one["spec"]["devices"]}
    assert set(devices["cpudevnuma000"][field]) == {"cpu"}
    assert set(devices["memory-numa000"][field]) == {"memory"}
    assert set(devices["hugepages-2m-numa000"][field]) == {"hugepages-2Mi"}
    assert root not in devices["cpudevnuma000"]["attributes"]
    wait_for("an event", lambda: {event["reason"] for event in stage.events()} == {"ResourceSliceListsRefused"}, 5)
    answer = ask_unix(instance.state_socket, "/readyz")
    assert answer.startswith("ok")
    assert "DRAListTypeAttributes" in answer
