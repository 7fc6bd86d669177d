# SPDX-License-Identifier: Apache-2.0
"""A right that the chart gives is missing: each ends in a message that names it.

The pod is the rendered one with a single capability or mount taken out. A message counts where an operator looks: in
the log of a container, in a failing probe, or among the problems of the backend.
"""

import re
from collections.abc import Iterator

import pytest

from tests.fakes.waiting import PATIENCE
from tests.node.rig import figures
from tests.node.rig.cluster import Cluster
from tests.node.rig.removal import removals
from tests.node.rig.wait import until

MESSAGES = {
    "frontend mount config": r"/etc/dra-driver-numa/config\.yaml",
    "frontend mount run": r"run directory /run/dra-driver-numa",
    "frontend mount hidden": "",
    "frontend mount cdi": r"/var/run/cdi",
    "frontend mount token": "",
    "frontend mount access": r"/run/node-test/kubeconfig",
    "frontend mount registry-cpu": r"/var/lib/kubelet/plugins_registry/dra\.cpu",
    "frontend mount registry-memory": r"/var/lib/kubelet/plugins_registry/dra\.memory",
    "frontend mount plugin-cpu": r"/var/lib/kubelet/plugins/dra\.cpu",
    "frontend mount plugin-memory": r"/var/lib/kubelet/plugins/dra\.memory",
    "frontend mount cgroup": r"/sys/fs/cgroup",
    "backend capability DAC_OVERRIDE": r"lacks the capability DAC_OVERRIDE",
    "backend capability SYS_ADMIN": r"lacks the capability SYS_ADMIN",
    "backend mount config": r"/etc/dra-driver-numa/config\.yaml",
    "backend mount run": r"no frontend has answered yet; check .* mount the same run directory",
    "backend mount run-backend": r"run directory /run/dra-driver-numa/backend cannot be written",
    "backend mount cdi": r"/var/run/cdi does not exist.*volume cdi of the chart",
    "backend mount nri": r"/var/run/nri/nri\.sock",
    "backend mount cgroup": r"/sys/fs/cgroup is mounted read-only.*volume cgroup of the chart",
    "backend mount irq": r"interrupts stay where they are: proc/irq cannot be written",
    "backend mount workqueue": r"sys/devices/virtual/workqueue",
    "backend mount irqbalance": r"run/irqbalance is not mounted",
}
"""What the message must contain, by the right that is missing.

Empty for two mounts whose absence does no harm: `hidden` is a defence inside the container, and the token is not used
with a kubeconfig.
"""


@pytest.fixture
def whole_pod_afterwards(cluster: Cluster) -> Iterator[None]:
    """The next test finds the pod as the chart renders it."""
    yield
    cluster.configure({})


def words(cluster: Cluster) -> str:
    """Everything that both halves report now: logs, failing probes, problems of the backend."""
    instance = cluster.instance
    backend = instance.status
    probes = [one.probe("readiness") for one in instance.pod.containers.values() if one.alive]
    logs = [one.log() for one in instance.pod.containers.values()]
    return "\n".join([*logs, *probes, *map(str, backend.get("problems", ()))])


def test_every_right_of_the_rendered_pod_is_tried(cluster: Cluster) -> None:
    """A mount or capability that is added to the chart needs a message for its absence."""
    cluster.configure({})
    assert sorted(removals(cluster.objects)) == sorted(MESSAGES)


@pytest.mark.timeout(480 * PATIENCE)
@pytest.mark.parametrize("removal", MESSAGES)
def test_a_missing_right_is_named(cluster: Cluster, whole_pod_afterwards: None, removal: str) -> None:
    """The message appears, or without one the driver works."""
    if not MESSAGES[removal]:
        cluster.configure({}, lacking=removal)
        return
    cluster.replace_pod({}, lacking=removal)
    for half in cluster.instance.pod.containers.values():
        half.start()

    def named() -> str:
        found = [line for line in words(cluster).splitlines() if re.search(MESSAGES[removal], line)]
        return found[0] if found else ""

    try:
        line = until(named, "a message", within=120, every=2.0)
    except TimeoutError:
        raise AssertionError(f"without {removal} nothing names it:\n{words(cluster)[-4000:]}") from None
    figures.note(f"without {removal}", line.strip()[:300])
