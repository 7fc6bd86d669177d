# SPDX-License-Identifier: Apache-2.0
"""One right that the chart grants is missing: each case produces a message that names it.

The pod is the rendered one with a single capability or mount removed. A message counts only if it is where an operator
looks: in the log of the container that lacks the right, in its failing probe, or among the backend's problems. The
complete pod must not produce any of these messages, so a pattern that always matches fails the tests.
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
    "frontend mount config": r"/etc/dra-driver-numa/config\.yaml.*No such file",
    "frontend mount run": r"run directory /run/dra-driver-numa is not mounted from the node",
    "frontend mount hidden": r"the frontend can open the backend's .*/active\.lock.*'hidden' volume",
    "frontend mount cdi": r"CDI directory /var/run/cdi is not mounted from the node",
    "frontend mount token": "",
    "frontend mount access": r"/run/node-test/kubeconfig.*the file does not exist",
    "frontend mount registry-cpu": r"/var/lib/kubelet/plugins_registry/dra\.cpu is not mounted from the node",
    "frontend mount registry-memory": r"/var/lib/kubelet/plugins_registry/dra\.memory is not mounted from the node",
    "frontend mount plugin-cpu": r"/var/lib/kubelet/plugins/dra\.cpu is not mounted from the node",
    "frontend mount plugin-memory": r"/var/lib/kubelet/plugins/dra\.memory is not mounted from the node",
    "frontend mount cgroup": r"/sys/fs/cgroup has no kubepods cgroup.*hostHugepages\.detect",
    "backend capability DAC_OVERRIDE": r"lacks the capability DAC_OVERRIDE",
    "backend capability SYS_ADMIN": r"lacks the capability SYS_ADMIN",
    "backend mount config": r"/etc/dra-driver-numa/config\.yaml.*No such file",
    "backend mount run": r"no frontend has answered yet; check .* mount the same run directory",
    "backend mount run-backend": r"run directory /run/dra-driver-numa/backend cannot be written",
    "backend mount cdi": r"/var/run/cdi does not exist.*chart's cdi volume",
    "backend mount nri": r"/var/run/nri/nri\.sock",
    "backend mount cgroup": r"/sys/fs/cgroup is mounted read-only.*chart's cgroup volume",
    "backend mount irq": r"interrupts are not moved off claimed CPUs: /host/proc/irq cannot be written",
    "backend mount workqueue": r"unbound kernel workers stay on claimed CPUs: /host/sys/devices/virtual/workqueue/",
    "backend mount irqbalance": r"run/irqbalance is not mounted",
}
"""Pattern that the message must match, by missing right. The pattern is empty for the token, which is not used with a
kubeconfig.
"""


@pytest.fixture
def pod_restored_afterwards(cluster: Cluster) -> Iterator[None]:
    """Restores the complete pod, as rendered by the chart, after the test."""
    yield
    cluster.configure({})


def words(cluster: Cluster, half: str) -> list[str]:
    """Returns the lines that one container currently reports: its log, its failing probe, and the backend's
    problems.
    """
    instance = cluster.instance
    container = instance.pod.containers[half]
    probe = container.probe("readiness") if container.alive else ""
    problems = map(str, instance.status.get("problems", ())) if half == "backend" else ()
    return "\n".join([container.log(), probe, *problems]).splitlines()


def test_every_right_of_the_rendered_pod_is_tested(cluster: Cluster) -> None:
    """Every mount and capability of the rendered pod has an entry in MESSAGES; a new one needs an entry, too."""
    cluster.configure({})
    assert sorted(removals(cluster.objects)) == sorted(MESSAGES)


def test_the_complete_pod_reports_no_missing_right(cluster: Cluster) -> None:
    """No pattern in MESSAGES matches a report of the complete pod."""
    cluster.configure({})
    matches = {
        removal: line
        for removal, pattern in MESSAGES.items()
        if pattern
        for line in words(cluster, removal.split(" ")[0])
        if re.search(pattern, line)
    }
    assert matches == {}


def test_without_the_token_the_kubeconfig_is_used(cluster: Cluster, pod_restored_afterwards: None) -> None:
    """The pod becomes ready without the token."""
    cluster.configure({}, lacking="frontend mount token")


@pytest.mark.timeout(480 * PATIENCE)
@pytest.mark.parametrize("removal", [removal for removal, pattern in MESSAGES.items() if pattern])
def test_a_missing_right_is_named(cluster: Cluster, pod_restored_afterwards: None, removal: str) -> None:
    """If a container lacks a right, a message of that container names the right."""
    cluster.replace_pod({}, lacking=removal)
    for container in cluster.instance.pod.containers.values():
        container.start()
    half, _, _ = removal.partition(" ")

    def named() -> str:
        found = [line for line in words(cluster, half) if re.search(MESSAGES[removal], line)]
        return found[0] if found else ""

    try:
        line = until(named, "a message names the missing right", within=120, every=2.0)
    except TimeoutError:
        reported = "\n".join(words(cluster, half))
        raise AssertionError(f"no message names the missing {removal}:\n{reported[-4000:]}") from None
    figures.note(f"without {removal}", line.strip()[:300])
