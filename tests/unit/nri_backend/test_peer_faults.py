# SPDX-License-Identifier: Apache-2.0
"""What the CPU peer gets wrong and the backend must not, by the numbers of section 9 of its page of facts.

The frontend's are in the file of this name there, what needs processes and sockets in ``tests/integration/``.
"""

import ast
import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nri_backend
import pytest
from nri_backend.claims.judge import Reason
from nri_backend.containers.container import tracked_as
from nri_backend.containers.state import Choices, NodeState
from nri_backend.nri.model import Container, ContainerState, Pod, RefusedError, Resources
from numa_contract.cpuset import parse_cpu_list

from tests.fakes.waiting import eventually
from tests.rigs.claims import cgroup_of, container, cpu_record, env_of, files_of, pod
from tests.rigs.enforcement import Node, enforcing

ONE = cpu_record("c1", "cpus=2-3")
TWO = cpu_record("c2", "cpus=4-5", pods=("p2",))


def running(id_: str, *env: str, of: str = "p1", name: str = "main") -> Container:
    """A running container as the runtime lists it."""
    return replace(container(id_, *env, of=of, name=name), state=ContainerState.RUNNING)


def listed(node: Node, *containers: Container) -> list[Pod]:
    """Makes the cgroups of containers that have run all along; returns their pods."""
    pods = [pod(one.pod_id.removeprefix("sandbox-")) for one in containers]
    for of, one in zip(pods, containers, strict=True):
        node.make_cgroups(of, one)
    return list(dict.fromkeys(pods))


@pytest.mark.fault("cpu peer 9.1.4")
async def test_an_empty_pool_leaves_nobody_on_exclusive_cpus(memory: Path) -> None:
    """When claims hold every CPU, a plain container does not start: an empty cpuset would mean "as it is"."""
    async with enforcing(Node(memory, reserved="")) as node:
        node.claim(cpu_record("c1", "cpus=0-7"))
        with pytest.raises(RefusedError, match="claims hold every CPU of the node and none is reserved"):
            await node.create("plain")
        assert node.counts.refusals == {Reason.NO_POOL: 1}


@pytest.mark.fault("cpu peer 9.1.4")
async def test_with_reserved_cpus_the_rest_shares_them(node: Node) -> None:
    """Containers that run and those that come are put on the reserved CPUs, by name and never by an empty set."""
    path = await node.run("early", of="p2")
    node.claim(cpu_record("c1", "cpus=1-7"))
    stored, answer = await node.create("late", of="p2", name="other")
    assert answer.resources.cpus == "0"
    await eventually(lambda: node.cpus(path) == "0")
    assert await node.enforcer.update_container(pod("p2"), stored, Resources(cpus="0-7")) != []


@pytest.mark.fault("cpu peer 9.2.1")
async def test_a_synchronisation_forgets_no_claim(node: Node) -> None:
    """What is prepared stays held although the runtime lists no container of it, and its container starts then."""
    env = node.claim(ONE)
    await node.enforcer.synchronize([], [])
    assert node.enforcer.state.pool == parse_cpu_list("1,4-7")
    assert node.cpus(await node.run("late", *env)) == "2-3"


@pytest.mark.fault("cpu peer 9.2.3")
async def test_a_snapshot_is_taken_over_in_one_step(node: Node) -> None:
    """Hooks that run while snapshots come see the state before or after, never one that is half filled."""
    web = running("web", of="p9", name="web")
    pods = listed(node, web)
    env, other = node.claim(ONE), node.claim(TWO)

    async def snapshots() -> None:
        for _ in range(20):
            await node.enforcer.synchronize(pods, [web])

    async def lives(id_: str, env: tuple[str, ...], of: str, cpus: str) -> None:
        for turn in range(20):
            stored, answer = await node.create(f"{id_}-{turn}", *env, of=of)
            assert answer.resources.cpus == cpus
            await node.enforcer.remove_container(pod(of), stored)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(snapshots())
        tasks.create_task(lives("one", env, "p1", "2-3"))
        tasks.create_task(lives("two", other, "p2", "4-5"))
        tasks.create_task(lives("plain", (), "p3", "1,6-7"))
    assert node.enforcer.state.get("web") is not None


@pytest.mark.fault("cpu peer 9.2.4")
async def test_one_bad_pair_does_not_stop_the_rest(node: Node) -> None:
    """Of two that came to share a claim the first keeps it, the other joins the pool, and the rest is pinned."""
    env, other = node.claim(ONE), node.claim(TWO)
    bad = running("bad", "DRA_CPUSET_=x", of="p3")
    found = (running("first", *env), running("second", *env, name="side"), bad, running("right", *other, of="p2"))
    await node.enforcer.synchronize(listed(node, *found), found)
    wanted = {"first": "2-3", "second": "1,6-7", "bad": "1,6-7", "right": "4-5"}
    await eventually(lambda: {one.id: node.cpus(cgroup_of(one)) for one in found} == wanted)
    assert any("belongs to container main" in problem for problem in node.enforcer.problems)


@pytest.mark.fault("cpu peer 9.2.10")
async def test_running_containers_get_released_cpus_back(node: Node) -> None:
    """The pool grows with the release itself, for those that run; no hook and no new container is needed."""
    plain = await node.run("plain", of="p9")
    node.claim(ONE)
    node.enforcer.records_changed()
    await eventually(lambda: node.cpus(plain) == "1,4-7")
    node.unprepare(ONE)
    node.enforcer.records_changed()
    await eventually(lambda: node.cpus(plain) == "1-7")


class Walked(list[Any]):
    """A list that counts how often it is gone through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()


@pytest.mark.fault("cpu peer 9.3.1")
async def test_a_synchronisation_is_not_pods_times_containers(node: Node) -> None:
    """The pods are gone through once, however many containers there are."""
    found = [running(f"c{n}", of=f"p{n}") for n in range(60)]
    pods = Walked(listed(node, *found))
    await node.enforcer.synchronize(pods, found)
    assert pods.walks == 1
    assert len(node.enforcer.state) == 60


@pytest.mark.fault("cpu peer 9.3.2")
async def test_a_hook_touches_no_other_container(node: Node) -> None:
    """The others are moved when the claim is prepared; its containers' hooks write and answer for themselves alone."""
    others = [await node.run(f"plain-{n}", of=f"q{n}") for n in range(5)]
    env = node.claim(ONE)
    node.enforcer.records_changed()
    await eventually(lambda: {node.cpus(path) for path in others} == {"1,4-7"})
    node.kernel.written.clear()
    for life in ("first", "second"):
        path = await node.run(life, *env)
        await node.stop(life)
        assert {written for written, _, _ in node.kernel.written} <= {path, path.rpartition("/")[0]}


@pytest.mark.fault("cpu peer 9.3.7")
def test_no_library_code_ends_the_process() -> None:
    """Only the program's entry exits; everything else raises or returns."""
    for source in Path(nri_backend.__file__).parent.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
        forbidden = {"os._exit", "os.abort", "sys.exit", "exit", "quit"}
        assert source.name == "__main__.py" or not {ast.unparse(call) for call in calls} & forbidden, source.name


@pytest.mark.fault("cpu peer 9.4.4")
def test_who_knows_uid_and_cpus_gets_nothing() -> None:
    """A pod that the claim is not reserved for is refused with the right values too, and the claim stays free."""
    state = NodeState(Choices(parse_cpu_list("0")))
    state.take_files(files_of(ONE))
    thief = state.assessed(tracked_as(pod("p2"), container("thief", *env_of(ONE), of="p2")))
    assert thief.refusal is not None
    assert thief.refusal.reason is Reason.NOT_RESERVED
    state.put(thief)
    rightful = state.assessed(tracked_as(pod("p1"), container("rightful", *env_of(ONE))))
    assert rightful.own_cpus == {2, 3}


@pytest.mark.fault("cpu peer 9.4.5")
async def test_refusals_are_logged(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """By container, pod and reason: the runtime's log is elsewhere, and the pod's events are soon gone."""
    with caplog.at_level(logging.WARNING), pytest.raises(RefusedError):
        await node.create("bad", "DRA_CPUSET_zz=0-3")
    (entry,) = [record for record in caplog.records if record.getMessage() == "refused"]
    fields = vars(entry)
    assert (fields["container"], fields["pod"], fields["reason"]) == ("main", "ns/p1", "no_record")
    assert "DRA_CPUSET_zz" in fields["error"]
