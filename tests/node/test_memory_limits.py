# SPDX-License-Identifier: Apache-2.0
"""Claims for plain memory: which container is killed at the limit, and which working set is kept when memory is
short.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.rig import figures
from tests.node.rig.claims import ClaimPod, memory_config
from tests.node.rig.cluster import Cluster
from tests.node.rig.kernel import Cgroup
from tests.node.rig.marks import both_drivers
from tests.node.rig.wait import until
from tests.stage.pods import memory

MIB = 1 << 20
FILES = Path("/var/tmp/node-test")
WORKING_SET = 64 * MIB
ROUNDS = 9
TOUCH = ["python3", "-IS", "/programs/touch_memory.py", "--hold"]


@pytest.fixture
def files() -> Iterator[Path]:
    """Creates a file `mine` of the working set's size and a larger one, `theirs`."""
    FILES.mkdir(exist_ok=True)
    for name, size in (("mine", WORKING_SET), ("theirs", 2 * WORKING_SET)):
        command = ["dd", "if=/dev/zero", f"of={FILES / name}", "bs=1M", f"count={size // MIB}"]
        subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["sync"], check=True)
    yield FILES
    for file in FILES.iterdir():
        file.unlink()


def cached(group: Cgroup) -> int:
    """Returns the bytes of file data that the cgroup has in memory."""
    return next(int(line.split()[1]) for line in group.read("memory.stat").splitlines() if line.startswith("file "))


def kept(cluster: Cluster, files: Path, **parameters: str) -> int:
    """Returns the bytes of a claim's working set that remain in memory after a neighbour has read twice as much in each
    of ROUNDS rounds.

    Returns earlier if less than half of the working set remains, because the speed at which the kernel reclaims
    unprotected memory varies between runs.
    """
    # A page belongs to the cgroup that reads it first.
    Path("/proc/sys/vm/drop_caches").write_text("1")
    places = {str(files): "/data"}
    db = cluster.pod(memory(96 * MIB, numa_node=0), config=[memory_config(**parameters)] if parameters else ())
    box, neighbour = db.run(mounts=places), cluster.node.pod("greedy").run(mounts=places)
    assert box.exec("sh", "-c", "cat /data/mine >/dev/null").code == 0
    assert cached(box.cgroup) >= WORKING_SET
    everybody = Cgroup(cluster.node.cgroups.path("guaranteed"))
    everybody.write("memory.max", int(everybody.read("memory.current")) + WORKING_SET // 2)
    try:
        for _ in range(ROUNDS):
            assert neighbour.exec("sh", "-c", "cat /data/theirs >/dev/null").code == 0
            if cached(box.cgroup) < WORKING_SET // 2:
                break
        return cached(box.cgroup)
    finally:
        everybody.write("memory.max", "max")
        db.end()


def told(cluster: Cluster, pod: ClaimPod) -> list[str]:
    """Returns the notes in the pod's Events about OOM kills."""
    events = cluster.api("/apis/events.k8s.io/v1/namespaces/default/events")["items"]
    mine = [event for event in events if event["regarding"].get("uid") == pod.uid]
    return [event["note"] for event in mine if event["reason"] == "OutOfClaimedMemory"]


def test_a_protected_working_set_survives_a_neighbour(cluster: Cluster, files: Path) -> None:
    """With ``protect: min``, the whole working set stays in memory under pressure; without it, the neighbour displaces
    it.
    """
    left = {name: kept(cluster, files, **what) for name, what in (("min", {"protect": "min"}), ("none", {}))}
    shown = ", ".join(f"{name} {size // MIB} MiB" for name, size in left.items())
    figures.note(f"part of {WORKING_SET // MIB} MiB that remains under pressure, by protect", shown)
    assert left["min"] >= WORKING_SET
    assert left["none"] < WORKING_SET // 2


@both_drivers
def test_protection_is_set_in_every_ancestor_and_removed_again(cluster: Cluster) -> None:
    """While the container is running, memory.min is set to the claim's bytes on each cgroup from the container up to
    kubepods. When the container has stopped, the ancestors have their previous values again.
    """
    db = cluster.pod(memory(96 * MIB, numa_node=0), config=[memory_config(protect="min")])
    box = db.run()
    levels = [box.cgroup]
    while levels[-1].parent.path != "/":
        levels.append(levels[-1].parent)
    assert len(levels) == 4
    assert [level.read("memory.min") for level in levels] == [str(96 * MIB)] * 4
    box.stop()
    until(lambda: {level.read("memory.min") for level in levels[1:]} == {"0"}, "no memory is protected")


@pytest.mark.core
def test_only_the_container_that_exceeds_its_claim_is_killed(cluster: Cluster) -> None:
    """memory.max and memory.high are set in the cgroup; the container that exceeds its claim is killed, and the other
    container is not.
    """
    config = [memory_config("tight", limit="claim"), memory_config("wide", limit="claim", high=0.5, sharing="pod")]
    requests = [memory(48 * MIB, "tight", numa_node=1), memory(64 * MIB, "wide", numa_node=1)]
    db = cluster.pod(*requests, config=config)
    tight, wide = sorted(db.cdi)
    neighbour = db.run("neighbour", cdi=[wide])
    assert neighbour.cgroup.read("memory.max") == str(64 * MIB)
    assert neighbour.cgroup.read("memory.high") == str(32 * MIB)
    box = db.run("main", [*TOUCH, "4K:15000"], image="python", cdi=[tight])
    assert box.wait_exited(60) == 137
    # The runtime's report is not sufficient: its shim may read the cgroup's events after the cgroup is gone.
    assert "oom_kill 1" in db.sandbox.cgroup.read("memory.events").splitlines()
    (note,) = until(lambda: told(cluster, db), "the Event exists")
    assert "Container main was OOM-killed" in note
    assert "48Mi on NUMA node 1" in note
    assert neighbour.state == "running"
    fits = db.run("main", [*TOUCH, "4K:6000"], image="python", cdi=[tight])
    until(fits.log, "the program has touched its memory", within=60)
    assert fits.cgroup.read("memory.max") == str(48 * MIB)
    assert fits.state == "running"
