# SPDX-License-Identifier: Apache-2.0
"""What depends on the API server's release and gates, and on what a claim asks for, with all stand-ins."""

from tests.stage.pods import StagePod, claim_pod, cpu_set, cpus, opaque
from tests.stage.process import wait_for
from tests.stage.stage import OpenStage, Stage
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


def test_the_shared_pool_beside_exclusive_cpus(stage: Stage) -> None:
    """A container has its own CPUs, which nobody else ever has, and what is left of the pool on their NUMA node."""
    everything, near = set(range(32)), {*range(8), *range(16, 24)}
    beside = [opaque("dra.cpu", "cpuConfig", {"shared": "numa"})]
    with StagePod(stage, "web") as web, claim_pod(stage, "vpp", cpus(4), config=beside) as vpp:
        plain = web.run()
        vpp.prepare()
        own = stage.held(vpp.claim_uid)
        box = vpp.run()
        assert cpu_set(box.env[f"DRA_CPUSET_{vpp.claim_uid}"]) == own
        assert cpu_set(box.env[f"DRA_SHARED_CPUSET_{vpp.claim_uid}"]) & everything == everything - own
        assert (box.cpus(), plain.cpus()) == (near, everything - own)
        with claim_pod(stage, "db", cpus(6, numa_node=0)) as db:
            db.prepare()
            other = db.run().cpus()
            assert len(other) == 6
            box.comes_to(near - other)
            assert plain.cpus() == everything - own - other
        box.comes_to(near)
