# SPDX-License-Identifier: Apache-2.0
"""What depends on the API server's release and gates, with all stand-ins."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.stage.process import wait_for
from tests.stage.stage import OpenStage, Stage
from tests.stage.wires import ask_unix

# Each test starts everything.
pytestmark = pytest.mark.timeout(60)

BOTH = {"publishNodeAllocatableResourceMapping": True, "exposePCIeRoots": True}
ROOTS = {"strings": ["pci0000:17", "pci0000:3a", "pci0000:5d"]}


def published(stage: Stage) -> Mapping[str, Any]:
    """The devices by name, once both drivers have published."""
    stage.add_ready_instance()
    return {device["name"]: device for one in stage.slices() for device in one["spec"]["devices"]}


def reasons(stage: Stage) -> set[str]:
    """Of the Events so far."""
    return {event["reason"] for event in stage.events()}


def test_with_the_gates_on_devices_say_it(open_stage: OpenStage) -> None:
    """The mapping, and the PCIe roots near the CPUs of this machine's first socket."""
    gates, field = ("DRANodeAllocatableResources", "DRAListTypeAttributes"), "nodeAllocatableResources"
    stage = open_stage(kubernetes="1.37", gates_on=gates, config=BOTH)
    devices = published(stage)
    assert set(devices["cpudevnuma000"][field]) == {"cpu"}
    assert set(devices["memory-numa000"][field]) == {"memory"}
    assert set(devices["hugepages-2m-numa000"][field]) == {"hugepages-2Mi"}
    assert devices["cpudevnuma000"]["attributes"]["resource.kubernetes.io/pcieRoot"] == ROOTS
    assert "resource.kubernetes.io/pcieRoot" not in devices["cpudevnuma001"]["attributes"]
    assert reasons(stage) == set()


def test_without_the_gates_the_node_works_and_says_so(open_stage: OpenStage) -> None:
    """An older server with everything switched on in the configuration: devices as ever, and each lack is told."""
    stage = open_stage(kubernetes="1.35", config=BOTH)
    devices = published(stage)
    assert "resource.kubernetes.io/pcieRoot" not in devices["cpudevnuma000"]["attributes"]
    assert not [name for device in devices.values() for name in device if name.startswith("nodeAllocatable")]
    wait_for("events", lambda: reasons(stage) == {"ResourceSliceFieldsDropped", "ResourceSliceListsRefused"}, 5)
    answer = ask_unix(stage.instances[0].state_socket, "/readyz")
    assert answer.startswith("ok")
    for gate in ("DRANodeAllocatableResources", "DRAListTypeAttributes"):
        assert gate in answer
