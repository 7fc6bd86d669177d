# SPDX-License-Identifier: Apache-2.0
"""The backend detects the kubelet's static managers solely from the kubelet's requests."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.enforcement.recorder import PINS
from nri_backend.limits.runtime import parse_limits
from nri_backend.nri.model import Resources
from numa_contract.cpuset import parse_cpu_list

from tests.fakes.kubelet_static import StaticManagers
from tests.rigs.builders import cpu_record, memory_record
from tests.rigs.containers import container, pod
from tests.rigs.descriptors import descriptors_left
from tests.rigs.enforcement import Node, auditing, enforcing


@pytest.mark.parametrize(
    ("requested", "managers"),
    [
        (Resources(), set()),
        (Resources(cpu_quota=100_000, memory_limit=1 << 20, hugepage_limits={"2MB": 0}), set()),
        (Resources(cpus="0-7"), {"cpu"}),
        (Resources(mems="0"), {"memory"}),
        (Resources(cpus="2", mems="0-1"), {"cpu", "memory"}),
    ],
)
def test_cpus_and_mems_in_a_request_show_static_managers(requested: Resources, managers: set[str]) -> None:
    assert parse_limits(requested, requested=True).kubelet_pins == managers
    assert parse_limits(requested).kubelet_pins == set()


def pins(node: Node) -> list[str]:
    """Returns the detected managers as they are published in the lease."""
    return sorted(node.enforcer.state.kubelet_pins)


async def create(node: Node, id_: str, cpus: str = "", mems: str = "") -> None:
    """Creates a container for which the kubelet has set the given cpuset."""
    asked = replace(container(id_, name=id_), resources=Resources(cpus, mems))
    await node.enforcer.create_container(pod(), asked)


async def test_static_managers_are_reported_while_one_of_their_containers_runs(tmp_path: Path) -> None:
    """After the policy is changed to none, existing containers keep their cpusets until they exit."""
    kubelet = StaticManagers(parse_cpu_list("0-7"), parse_cpu_list("0"), memory=True)
    async with enforcing(Node(tmp_path)) as node:
        await create(node, "plain", **kubelet.created("plain"))
        assert pins(node) == ["cpu"]
        await create(node, "guaranteed", **kubelet.created("guaranteed", exclusive=2, numa_nodes=[0]))
        assert pins(node) == ["cpu", "memory"]
        await node.stop("guaranteed")
        assert pins(node) == ["cpu"]
        kubelet.cpu = kubelet.memory = False
        await create(node, "later", **kubelet.created("later"))
        await node.stop("plain")
        assert pins(node) == []


async def test_an_update_with_a_cpuset_shows_a_static_manager(tmp_path: Path) -> None:
    """A kubelet whose policy has become static updates the running containers. A resize is not evidence of a static
    manager.
    """
    async with enforcing(Node(tmp_path)) as node:
        await create(node, "plain")
        await node.enforcer.update_container(pod(), container("plain"), Resources(cpu_quota=200_000))
        assert pins(node) == []
        await node.enforcer.update_container(pod(), container("plain"), Resources(cpus="1-3"))
        assert pins(node) == ["cpu"]
        await node.enforcer.update_container(pod(), container("plain"), Resources(cpu_quota=300_000))
        assert pins(node) == ["cpu"], "an update contains only the values that change"


async def test_this_plugins_own_answers_are_not_evidence_of_a_static_manager(tmp_path: Path) -> None:
    """The runtime stores the answers and includes them in its Synchronize call."""
    async with enforcing(Node(tmp_path)) as node:
        env = (*node.claim(cpu_record("c1", "cpus=2-3")), *node.claim(memory_record("m1", ("m", 1, 1 << 20, 4096))))
        await node.run("db", *env)
        await node.run("plain", of="p2")
        await node.synchronize(("db", "p1"), ("plain", "p2"), db="2-3", plain="1,4-7")
        assert pins(node) == []


async def test_static_managers_are_known_after_a_synchronization(tmp_path: Path) -> None:
    """The evidence is the listed containers that the kubelet has pinned. Containers that are no longer listed do not
    count.
    """
    async with enforcing(Node(tmp_path)) as node:
        await create(node, "plain", cpus="0-7")
        await node.synchronize(("plain", "p1"), plain="0-7")
        assert pins(node) == ["cpu"]
        await node.synchronize()
        assert pins(node) == []


async def test_static_managers_are_known_after_a_restart(tmp_path: Path) -> None:
    """Pins are stored whenever they change, because the cpuset that the runtime lists may come from this plugin's
    answers.
    """
    async with enforcing(Node(tmp_path)) as node:
        await create(node, "plain", cpus="0-7")
        await create(node, "guaranteed", cpus="1-2", mems="0")
        await node.until(lambda: (tmp_path / PINS).exists() and "guaranteed" in (tmp_path / PINS).read_text())
    restarted = Node(tmp_path)
    async with auditing(restarted):
        await restarted.enforcer.activate()
        assert "guaranteed" in (tmp_path / PINS).read_text(), "the runtime has listed no container yet"
        await restarted.synchronize(("plain", "p1"), ("guaranteed", "p1"), plain="1-7", guaranteed="1-7")
        assert pins(restarted) == ["cpu", "memory"]
        await restarted.stop("guaranteed")
        assert pins(restarted) == ["cpu"]
        await restarted.until(lambda: "guaranteed" not in (tmp_path / PINS).read_text())
        await restarted.stop("plain")
        assert pins(restarted) == []
        await restarted.until(lambda: "plain" not in (tmp_path / PINS).read_text())


async def test_pins_are_not_lost_while_no_file_descriptor_is_free(tmp_path: Path) -> None:
    """The runtime lists its containers again once the file can be read."""
    async with enforcing(Node(tmp_path)) as node:
        await create(node, "guaranteed", cpus="1-2", mems="0")
        await node.until((tmp_path / PINS).exists)
    restarted = Node(tmp_path)
    async with auditing(restarted):
        await restarted.enforcer.activate()
        with descriptors_left(), contextlib.suppress(OSError):
            await restarted.synchronize(("guaranteed", "p1"), guaranteed="1-7")
        await create(restarted, "plain", cpus="0-7")
        await restarted.enforcer.reconciler.recorder.store_pins()
        await restarted.synchronize(("guaranteed", "p1"), guaranteed="1-7")
        assert pins(restarted) == ["cpu", "memory"]


async def test_static_managers_are_known_after_a_takeover(tmp_path: Path) -> None:
    """During a rollout, the new instance is synchronized before the old one has been called for the last container."""
    successor = Node(tmp_path)
    async with enforcing(Node(tmp_path)) as node:
        await successor.enforcer.synchronize([], [])
        await create(node, "plain", cpus="0-7")
        await create(successor, "plain", cpus="1-7")
        await node.until((tmp_path / PINS).exists)
    assert pins(successor) == []
    await successor.enforcer.activate()
    assert pins(successor) == ["cpu"]


@pytest.mark.parametrize(
    "text", [None, "", "[", "[]", '{"version": 9}', '{"version": 1, "containers": {"plain": 1}}', "[" * (1 << 21)]
)
async def test_a_damaged_pins_file_is_ignored_and_replaced(tmp_path: Path, text: str | None) -> None:
    """No static manager is detected until the kubelet sends the next cpuset. Then the file is written again."""
    if text is not None:
        (tmp_path / PINS).write_text(text)
    node = Node(tmp_path)
    async with auditing(node):
        await node.enforcer.activate()
        await node.synchronize(("plain", "p1"), plain="1-7")
        assert pins(node) == []
        await node.enforcer.update_container(pod(), container("plain"), Resources(cpus="1-3"))
        await node.until(lambda: (tmp_path / PINS).exists() and '["cpu"]' in (tmp_path / PINS).read_text())


async def test_a_failed_write_of_pins_is_retried_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PINS).mkdir()
    async with enforcing(Node(tmp_path)) as node:
        await create(node, "plain", cpus="0-7")
        before = node.counts.counters["audits"]
        await node.until(lambda: node.counts.counters["audits"] >= before + 3)
        assert [record.message for record in caplog.records].count("cannot store kubelet pins") == 1
        (tmp_path / PINS).rmdir()
        await node.until((tmp_path / PINS).is_file)
    assert pins(node) == ["cpu"]


async def test_a_standby_detects_no_static_manager(tmp_path: Path) -> None:
    """The standby is called after the active instance, whose answers are then part of the request."""
    node = Node(tmp_path)
    await node.enforcer.synchronize([], [])
    await create(node, "plain", cpus="1-7")
    await node.enforcer.update_container(pod(), container("plain"), Resources(cpus="1-7"))
    assert pins(node) == []


def test_the_fake_kubelet_behaves_like_the_static_policy() -> None:
    """Every container gets a cpuset. Creating a container with exclusive CPUs shrinks the default set, and the kubelet
    then updates the other containers.
    """
    kubelet = StaticManagers(parse_cpu_list("0-7"), parse_cpu_list("0"))
    assert kubelet.created("a") == {"cpus": "0-7"}
    assert kubelet.created("b", exclusive=2, numa_nodes=[0]) == {"cpus": "1-2"}
    assert kubelet.reconcile() == {"a": {"cpus": "0,3-7"}}
    assert kubelet.reconcile() == {}
    kubelet.removed("b")
    assert kubelet.reconcile() == {"a": {"cpus": "0-7"}}
