# SPDX-License-Identifier: Apache-2.0
"""Every process is killed at critical moments: nothing is lost, and changes made while it is down are repaired."""

import signal
import time
from collections.abc import Sequence

import pytest
from numa_contract.names import CPU_DRIVER, cdi_file_name

from tests.node.rig import figures, kernel
from tests.node.rig.claims import ClaimPod
from tests.node.rig.cluster import RESERVED, Cluster
from tests.node.rig.kernel import Cgroup
from tests.node.rig.marks import in_pool_mode
from tests.node.rig.node import CDI_DIRECTORY, Node
from tests.node.rig.pods import Container
from tests.node.rig.wait import until
from tests.stage.pods import cpus, hugepages
from tests.stage.wires import AnsweredError

MIB = 1 << 20
ALL = kernel.online_cpus()
SYNCHRONISED = "synchronized with"
"""Part of the message that the backend logs once for each connection."""


def has_pages(groups: Sequence[Cgroup], size: int) -> bool:
    """Returns True if each cgroup's limits on 2 MiB pages equal this number of bytes."""
    return all(group.hugetlb("2MB")[what] == str(size) for group in groups for what in ("max", "rsvd.max"))


def is_true(box: Container, pod: ClaimPod, size: int) -> bool:
    """Returns True if the kernel's files match the claim of a container with 2 MiB pages."""
    return box.cpus_allowed == pod.cpus and has_pages((box.cgroup, pod.sandbox.cgroup), size)


@pytest.mark.core
@in_pool_mode
def test_a_killed_backend_repairs_everything_after_its_restart(cluster: Cluster) -> None:
    """The backend is killed after Prepare, after CreateContainer and while containers are running. After its restart,
    containers that were started while it was down are pinned or moved.
    """
    running = cluster.pod(cpus(2, numa_node=0))
    prepared, created, started = [cluster.pod(cpus(1, numa_node=1), hugepages(4 * MIB)) for _ in range(3)]
    claimed = frozenset().union(*(pod.cpus for pod in (running, prepared, created, started)))
    boxes = running.run(), created.create(), started.create()
    web = cluster.node.pod("web")

    cluster.instance.kill_backend()
    boxes[2].start()
    plain = web.run()
    assert plain.cpus_allowed == ALL, "without a backend, the runtime gives the container all CPUs"
    assert boxes[0].cpus_allowed == running.cpus
    assert boxes[2].cpus_allowed == started.cpus, "the runtime keeps the response to CreateContainer"

    began = time.monotonic()
    cluster.instance.backend.start()
    until(
        lambda: plain.cpus_allowed == ALL - RESERVED - claimed,
        "the plain container has left the claimed CPUs",
        every=0.02,
    )
    figures.note("restart of a killed backend until other containers are moved", f"{time.monotonic() - began:.2f} s")
    until(lambda: is_true(boxes[2], started, 4 * MIB), "the container's limit contains its pages", every=0.02)
    figures.note("restart of a killed backend until all limits are applied", f"{time.monotonic() - began:.2f} s")

    cluster.wait_ready()
    assert is_true(boxes[1].start(), created, 4 * MIB)
    assert is_true(prepared.run(), prepared, 4 * MIB)
    boxes[0].stop()
    assert running.run().cpus_allowed == running.cpus
    assert plain.cpus_allowed == ALL - RESERVED - claimed


@pytest.mark.core
def test_a_killed_frontend_loses_no_claim(cluster: Cluster) -> None:
    """The backend works without a frontend. If the frontend is killed during Prepare, the restarted frontend creates a
    single record for that claim, and existing claims keep their CPUs.
    """
    first, second = cluster.pod(cpus(2)), cluster.pod(cpus(2), prepare=False)
    given = first.cpus
    frontend = cluster.instance.frontend
    frontend.send(signal.SIGSTOP)
    preparing = cluster.in_background(second.prepare)
    box = first.run()
    assert box.cpus_allowed == given, "no frontend is running, and none is required"
    frontend.kill()
    with pytest.raises(AnsweredError):
        preparing.result(60)
    box.stop()
    assert first.run().cpus_allowed == given
    began = time.monotonic()
    cluster.wait_ready()
    figures.note("restart of a killed frontend until claims are prepared", f"{time.monotonic() - began:.2f} s")
    assert cluster.instance.held() == {first.claim_uid: given}
    cluster.kubelet("restart")
    cluster.wait_ready()
    second.prepare()
    ids = list(first.cdi)
    first.prepare()
    assert (first.cpus, first.cdi) == (given, ids)
    assert cluster.instance.held() == {first.claim_uid: given, second.claim_uid: second.cpus}
    assert second.run().cpus_allowed == second.cpus
    assert not second.cpus & given


@pytest.mark.core
@in_pool_mode
def test_the_plugin_reconnects_after_the_runtime_restarts(cluster: Cluster) -> None:
    """containerd is restarted or killed while containers are running and claims are prepared. In both cases the backend
    reconnects, and all claims are enforced.
    """
    plain = cluster.node.pod("web").run()
    running, prepared = cluster.pod(cpus(2)), [cluster.pod(cpus(1), hugepages(2 * MIB)) for _ in range(2)]
    box = running.run()
    pool = ALL - RESERVED - running.cpus - prepared[0].cpus - prepared[1].cpus
    for pod, restart in zip(prepared, (Node.restart_containerd, Node.kill_containerd), strict=True):
        backend = cluster.instance.backend
        known = backend.log().count(SYNCHRONISED)
        restart(cluster.idle_node())
        began = time.monotonic()
        until(lambda: backend.log().count(SYNCHRONISED) > known, "the backend has reconnected", every=0.02)  # noqa: B023
        cluster.wait_ready()
        figures.note("from containerd's first response until the backend enforces", f"{time.monotonic() - began:.2f} s")
        cluster.instance.wait_audited()
        assert box.cpus_allowed == running.cpus
        assert plain.cpus_allowed == pool
        assert is_true(pod.run(), pod, 2 * MIB)
    box.stop()
    assert running.run().cpus_allowed == running.cpus


@pytest.mark.core
def test_lost_claim_files_are_restored(cluster: Cluster) -> None:
    """Files that are removed while the driver is running are written again. If they are removed while it is down, the
    CPUs of running containers stay allocated and the records are rebuilt.
    """
    db, spare = cluster.pod(cpus(2, numa_node=1)), cluster.pod(cpus(1, numa_node=1))
    box, given = db.run(), db.cpus
    files = {path: path.read_bytes() for path in CDI_DIRECTORY.glob("*.json")}
    assert len(files) == 2
    for path in files:
        path.unlink()
    until(
        lambda: {p: p.read_bytes() for p in CDI_DIRECTORY.glob("*.json")}.keys() == files.keys(),
        "the claim files exist again",
    )
    assert box.cpus_allowed == given == db.cpus
    spare.end()

    cluster.instance.frontend.kill()
    for path in CDI_DIRECTORY.glob("*.json"):
        path.unlink()
    plain = cluster.node.pod("web").run()
    assert plain.cpus_allowed == ALL - RESERVED - given, "the running container keeps its CPUs"
    cluster.wait_ready()
    other = cluster.pod(cpus(2, numa_node=1))
    assert not other.cpus & given
    until((CDI_DIRECTORY / cdi_file_name(CPU_DRIVER, db.claim_uid)).exists, "the record has been rebuilt")
    assert db.cpus == given == box.cpus_allowed
    box.stop()
    assert db.run().cpus_allowed == given
