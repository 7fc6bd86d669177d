# SPDX-License-Identifier: Apache-2.0
"""Host daemons are kept off claimed CPUs if the operator enables it."""

import subprocess

import pytest
from numa_contract.cpuset import format_cpu_list

from tests.node.rig import kernel
from tests.node.rig.cluster import Cluster
from tests.node.rig.kernel import Cgroup
from tests.node.rig.wait import until
from tests.stage.pods import cpus

pytestmark = [pytest.mark.profile("containerd-1.7"), pytest.mark.configuration(hostSlices=True, cpuExclusivity="pool")]
SYSTEM, INIT = Cgroup("/system.slice"), Cgroup("/init.scope")
CPUS = kernel.online_cpus()


def set_property(value: str) -> None:
    """Restricts init.scope to these CPUs until the next boot, as an administrator would."""
    subprocess.run(["systemctl", "set-property", "--runtime", "init.scope", f"AllowedCPUs={value}"], check=True)


def allowed() -> tuple[frozenset[int], frozenset[int]]:
    """Returns the CPUs that the cpuset of system.slice permits, and those that the cpuset of init.scope permits. An
    empty cpuset permits every CPU.
    """
    return SYSTEM.cpus("cpuset.cpus") or CPUS, INIT.cpus("cpuset.cpus") or CPUS


def test_host_daemons_leave_claimed_cpus(cluster: Cluster) -> None:
    """From Prepare on, host daemons such as sshd and the runtime stay off the claimed CPUs, even after a daemon-reload.
    When the claim ends, the daemons' own limits are restored.
    """
    daemon = int(subprocess.run(["pidof", "-s", "containerd"], check=True, capture_output=True).stdout)
    before = allowed()
    db = cluster.pod(cpus(3, numa_node=1))
    until(lambda: not (SYSTEM.cpus() | INIT.cpus()) & db.cpus, "both slices have left the claimed CPUs")
    assert kernel.cpus_allowed(daemon) == SYSTEM.cpus() == CPUS - db.cpus
    db.run()
    set_property("0-5")
    try:
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        confined = frozenset(range(6)) - db.cpus
        until(lambda: SYSTEM.cpus() == CPUS - db.cpus and INIT.cpus() == confined, "both slices are confined again")
        db.end()
        until(lambda: allowed() == (before[0], frozenset(range(6))), "both slices have their own limits again")
    finally:
        set_property(format_cpu_list(CPUS))


def test_host_daemons_get_their_cpus_back_after_the_backend_was_killed(cluster: Cluster) -> None:
    """The backend is killed while a claim exists. The restarted backend reads the original limits, which the killed
    process had stored, and restores them when the claim ends.
    """
    before = allowed()
    db = cluster.pod(cpus(2, numa_node=1))
    until(lambda: not (SYSTEM.cpus() | INIT.cpus()) & db.cpus, "both slices have left the claimed CPUs")
    cluster.instance.kill_backend()
    assert not (SYSTEM.cpus() | INIT.cpus()) & db.cpus
    cluster.wait_ready()
    db.end()
    until(lambda: allowed() == before, "both slices have their original limits")
