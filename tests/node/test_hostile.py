# SPDX-License-Identifier: Apache-2.0
"""Malicious pods, a frozen active instance, and a full disk: other containers are not affected."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_ENV_PREFIX, cpu_env_key

from tests.fakes.waiting import PATIENCE
from tests.node.rig import kernel
from tests.node.rig.claims import ClaimPod
from tests.node.rig.cluster import RESERVED, Cluster
from tests.node.rig.cri import CriError
from tests.node.rig.driver_pod import DriverContainer
from tests.node.rig.instance import RUN_DIRECTORY
from tests.node.rig.node import CDI_DIRECTORY
from tests.node.rig.pods import Container
from tests.node.rig.wait import until
from tests.stage.pods import cpus

ALL = kernel.online_cpus()
NOBODY = "00000000-0000-4000-8000-000000000000"
SMALL = Path("/run/node-test/small")
BOMBS = {
    "one-long-value": {f"{CPU_ENV_PREFIX}x": ",".join(["0-65535"] * 6144)},  # 48 KiB
    "many-variables": {f"{CPU_ENV_PREFIX}{number}": "2-3" for number in range(4000)},
    "many-claims": {cpu_env_key(f"{number:08x}{NOBODY[8:]}", None): "2-3" for number in range(4000)},
}


@pytest.mark.core
@pytest.mark.parametrize("bomb", BOMBS)
def test_no_environment_keeps_the_backend_busy(cluster: Cluster, bomb: str) -> None:
    """A pod with 48 KiB of CPU lists, or 4000 of the driver's variables, is rejected; other pods start as fast as
    usual.
    """
    bomber, web = cluster.node.pod("bomber"), cluster.node.pod("web")
    with pytest.raises(CriError, match="dra-driver-numa: "):
        bomber.run(env=BOMBS[bomb])
    began = time.monotonic()
    db = cluster.pod(cpus(2, numa_node=1))
    assert db.run().cpus_allowed == db.cpus
    assert web.run().cpus_allowed == ALL - RESERVED - db.cpus
    assert time.monotonic() - began < 20 * PATIENCE
    assert cluster.instance.lease()["active"], "the runtime has not disconnected the backend"


@pytest.mark.core
def test_a_container_that_forges_a_claim_never_gets_the_pool_for_itself(cluster: Cluster) -> None:
    """A container that forges a claim's environment variable with all CPUs of the pool, and starts while no instance is
    connected, is treated like a container without a claim, however often the backend restarts.
    """
    db = cluster.pod(cpus(2, numa_node=1))
    box, pool = db.run(), ALL - RESERVED - db.cpus
    web, forger = cluster.node.pod("web").run(), cluster.node.pod("forger")
    cluster.instance.kill_backend()
    evil = forger.run(env={cpu_env_key(NOBODY, None): format_cpu_list(pool)})
    cluster.wait_ready()
    until(lambda: evil.cpus_allowed == web.cpus_allowed == pool, "the forger has the CPUs of the pool")
    for _ in range(2):
        cluster.instance.kill_backend()
        cluster.wait_ready()
        assert web.cpus_allowed == cluster.node.pod("late").run().cpus_allowed == pool
        assert box.cpus_allowed == db.cpus
        assert cluster.instance.held() == {db.claim_uid: db.cpus}
    other = cluster.pod(cpus(2, numa_node=0))
    assert other.run().cpus_allowed == other.cpus
    until(
        lambda: evil.cpus_allowed == web.cpus_allowed == pool - other.cpus,
        "the forger leaves the claimed CPUs like any other container",
    )


@contextmanager
def frozen(service: DriverContainer) -> Iterator[None]:
    """Suspends a process with SIGSTOP for the duration of the block."""
    service.send(signal.SIGSTOP)
    try:
        yield
    finally:
        service.send(signal.SIGCONT)


def attempt(pod: ClaimPod) -> Container | None:
    """Runs one of the kubelet's attempts to start the pod's container; returns None if it is rejected."""
    try:
        # While no instance is active, a container that has already been created may start without a partition.
        return pod.run(mode=None)
    except CriError:
        return None


@pytest.mark.core
def test_a_frozen_leader_is_replaced(cluster: Cluster) -> None:
    """While no instance is enforcing claims, a claim container is rejected or pinned. Within seconds, a standby takes
    over as the only active instance.
    """
    old, new = cluster.instance, cluster.add_instance().start().wait_ready()
    until(lambda: new.status.get("synchronized"), "the standby is connected to the runtime")
    plain = cluster.node.pod("web").run()
    until(lambda: cluster.kubelet_calls(new), "the kubelet calls the newer instance")
    first = cluster.pod(cpus(1, numa_node=1))
    new.frontend.wait_for_log(first.claim_uid)
    assert first.sandbox.id

    with frozen(old.backend):
        early = attempt(first)
        assert early is None or early.cpus_allowed == first.cpus, "the container has its claim's CPUs"
        until(lambda: new.active, "the standby is active", within=40)
        box = early or until(lambda: attempt(first), "the claim's container starts", every=1.0)
        assert box is not None
        second = cluster.pod(cpus(1, numa_node=1))
        assert second.run().cpus_allowed == second.cpus
        pool = ALL - RESERVED - first.cpus - second.cpus
        until(
            lambda: (box.cpus_allowed, plain.cpus_allowed) == (first.cpus, pool),
            "every container has the CPUs that the claims leave it",
        )

    until(lambda: not old.backend.alive, "the frozen instance notices the loss of the lock and exits")
    former = old.status.get("instance")  # the lease of a dead process remains valid for several seconds
    old.start().wait_ready()
    until(
        lambda: old.status.get("synchronized") and old.status["instance"] != former,
        "the restarted instance is a standby",
    )
    until(lambda: [one for one in cluster.instances if one.active] == [new], "only the newer instance is active")
    third = cluster.pod(cpus(1, numa_node=1))
    assert third.run().cpus_allowed == third.cpus


def privileged(cluster: Cluster, script: str) -> Container:
    """Runs a privileged container that first runs a script, where `$d` is the container's own cgroup."""
    command = f"d=/sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup); {script} && echo done; exec sleep 1000"
    box = cluster.node.pod("mole", privileged=True).run(command=["sh", "-c", command])
    assert until(box.log, "the script has ended") == "done\n"
    return box


def check_leaves_claimed_cpus(cluster: Cluster, box: Container, claims: int) -> None:
    """Prepares several claims one after another, and checks after each that the container has left all their CPUs."""
    claimed: frozenset[int] = frozenset()
    for _ in range(claims):
        db = cluster.pod(cpus(1, numa_node=1))
        assert db.run().cpus_allowed == db.cpus
        claimed |= db.cpus
        assert box.cpus_allowed == ALL - RESERVED - claimed


def test_a_cgroup_named_container_affects_only_its_own_pod(cluster: Cluster) -> None:
    """A privileged container that creates a cgroup named `container` inside its own cgroup does not block claims, and
    leaves claimed CPUs like any other container.
    """
    dind = privileged(cluster, "mkdir $d/container")
    assert (dind.cgroup.directory / "container").is_dir()
    check_leaves_claimed_cpus(cluster, dind, 4)


def test_a_container_that_hides_its_cgroup_files_is_moved(cluster: Cluster) -> None:
    """A container that changes the owner and mode of its cpuset files leaves claimed CPUs and does not block claims."""
    files = "$d $d/cpuset.cpus $d/cpuset.cpus.effective $d/cpuset.mems $d/cgroup.procs $d/cgroup.events"
    mole = privileged(cluster, f"chown 1000:1000 {files} && chmod 000 {files}")
    assert (mole.cgroup.directory / "cpuset.cpus.effective").stat().st_mode & 0o777 == 0
    check_leaves_claimed_cpus(cluster, mole, 2)


@contextmanager
def mounted(cluster: Cluster) -> Iterator[None]:
    """Mounts a single tmpfs of 1 MiB for the run directory and the claim files. On a node, they share a tmpfs, too,
    because both are in /run.
    """
    places = {RUN_DIRECTORY: SMALL / "run", CDI_DIRECTORY: SMALL / "cdi"}
    SMALL.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "small", SMALL], check=True)
    try:
        for place, source in places.items():
            source.mkdir()
            subprocess.run(["mount", "--bind", source, place], check=True)
        # containerd still watches the inode of the previous directory with the claim files, so restart containerd.
        cluster.node.restart_containerd()
        yield
    finally:
        for service in (cluster.instance.frontend, cluster.instance.backend):
            service.kill()
        for place in (*places, SMALL):
            subprocess.run(["umount", place], check=True)
        cluster.node.restart_containerd()


@pytest.fixture
def small(cluster: Cluster) -> Iterator[Path]:
    """Runs the driver with its files on a small tmpfs. Yields the path at which the test can create a file that fills
    the tmpfs.
    """
    for service in (cluster.instance.frontend, cluster.instance.backend):
        service.stop()
    with mounted(cluster):
        cluster.wait_ready()
        yield SMALL / "filler"


def fill(file: Path) -> None:
    """Fills the file system to its last page."""
    ended = subprocess.run(["dd", "if=/dev/zero", f"of={file}", "bs=4k"], check=False, capture_output=True, text=True)
    assert "No space left" in ended.stderr


def test_a_full_run_directory_does_not_block_pods(cluster: Cluster, small: Path) -> None:
    """Without free space, a claim can be unprepared and a plain pod can start. Once there is space again, everything
    works.
    """
    db, kept = cluster.pod(cpus(2, numa_node=1)), cluster.pod(cpus(1, numa_node=1))
    db.run()
    box, claimed = kept.run(), kept.cpus
    fill(small)
    plain = cluster.node.pod("web").run()
    assert plain.cpus_allowed == ALL - RESERVED - claimed - db.cpus
    db.end()
    until(lambda: plain.cpus_allowed == ALL - RESERVED - claimed, "the claim's CPUs are free")
    assert box.cpus_allowed == claimed
    small.unlink()
    cluster.wait_ready()
    later = cluster.pod(cpus(2, numa_node=1))
    assert later.run().cpus_allowed == later.cpus
    assert cluster.instance.held() == {kept.claim_uid: claimed, later.claim_uid: later.cpus}
    for pod in (kept, later):
        pod.end()
    assert not list(CDI_DIRECTORY.iterdir()), "no claim file is left"
