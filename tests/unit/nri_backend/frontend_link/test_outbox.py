# SPDX-License-Identifier: Apache-2.0
import itertools
from collections.abc import Callable

import pytest
from nri_backend.frontend_link.outbox import MAX_TOGETHER, Message, Outbox
from numa_contract.reports import ContainerReport


def report(name: str, state: str = "running") -> ContainerReport:
    return ContainerReport.model_validate(
        {"id": name, "name": "c", "podUid": "u", "podNamespace": "n", "podName": "p", "state": state}
    )


def epochs() -> Callable[[], str]:
    counter = itertools.count(1)
    return lambda: f"e{next(counter)}"


class Node:
    """The containers of a node, and an outbox that tells them."""

    def __init__(self, *names: str, limit: int = 100) -> None:
        self.containers = {name: report(name) for name in names}
        self.outbox = Outbox(self.containers.values, epochs(), limit)

    def drain(self) -> list[str]:
        return [name for names in self.requests() for name in names]

    def requests(self, *, poisoned: str = "") -> list[list[str]]:
        """Sends everything to a frontend that refuses one report; returns the containers of each request."""
        told = []
        while messages := self.outbox.take():
            told.append([message.container_id for message in messages])
            self.outbox.settle(acknowledged=poisoned not in told[-1])
        return told


@pytest.fixture
def node() -> Node:
    node = Node("a", "b")
    node.outbox.connected()
    node.outbox.answered("f1", known=False)
    return node


def test_nothing_is_told_before_the_epoch_was_announced() -> None:
    """Reports of an epoch follow its lease, never the other way round."""
    node = Node("a")
    node.outbox.connected()
    assert node.outbox.take() == ()
    epoch = node.outbox.epoch
    node.outbox.answered("f1", known=False)
    assert node.outbox.epoch == epoch
    assert node.drain() == ["a"]


def test_a_new_epoch_is_unknown_to_the_frontend_once(node: Node) -> None:
    """``known: false`` in answer to the first lease of an epoch is the normal case and starts no other epoch."""
    epoch = node.outbox.epoch
    node.outbox.answered("f1", known=True)
    assert node.outbox.epoch == epoch


def test_complete_only_after_every_acknowledgement(node: Node) -> None:
    """The lease says complete when the last report of the resend was acknowledged, not when it was sent."""
    seen = [node.outbox.complete]
    for _ in range(2):
        assert len(node.outbox.take(1)) == 1
        seen.append(node.outbox.complete)
        node.outbox.settle(acknowledged=True)
        seen.append(node.outbox.complete)
    assert seen == [False, False, False, False, True]


def test_an_empty_node_is_complete_as_soon_as_it_is_announced() -> None:
    """No container, nothing to wait for; but the runtime must have said so."""
    node = Node()
    node.outbox.answered("f1", known=False)
    assert not node.outbox.complete
    node.outbox.connected()
    assert not node.outbox.complete
    node.outbox.answered("f1", known=False)
    assert node.outbox.complete


def test_the_latest_report_of_a_container_wins(node: Node) -> None:
    """A container that changes quickly is one message, with its last state."""
    node.drain()
    node.outbox.put(report("a", "created"))
    node.outbox.put(report("b"))
    node.outbox.put(report("a", "stopped"))
    assert len(node.outbox) == 2
    told = node.outbox.take()
    assert [m.report.state for m in told if m.report is not None] == ["running", "stopped"]


def test_a_deletion_comes_after_the_report_it_replaces(node: Node) -> None:
    """PUT, DELETE is told as DELETE; DELETE, PUT of the same id as PUT."""
    node.drain()
    node.outbox.put(report("a"))
    node.outbox.delete("a")
    assert node.outbox.take() == (Message("a", None),)
    node.outbox.delete("b")
    node.outbox.put(report("b"))
    assert node.outbox.take() == (Message("b", report("b")),)


@pytest.mark.parametrize(("instance", "known"), [("f2", False), ("f2", True), ("f1", False)])
def test_a_frontend_that_forgot_is_told_everything(node: Node, instance: str, known: bool) -> None:
    """Another instance, or one that does not know the epoch, gets a full resend under a new epoch."""
    node.drain()
    before = node.outbox.epoch
    node.outbox.answered(instance, known)
    assert node.outbox.epoch != before
    assert not node.outbox.complete
    node.outbox.answered(instance, known=False)
    assert node.drain() == ["a", "b"]
    assert node.outbox.complete


def test_every_connection_to_the_runtime_is_an_epoch(node: Node) -> None:
    """A lost and a new connection each begin an epoch; in between nothing is told and nothing is complete."""
    node.drain()
    seen = {node.outbox.epoch}
    node.outbox.disconnected()
    seen.add(node.outbox.epoch)
    node.outbox.put(report("x"))
    node.outbox.answered("f1", known=False)
    assert node.outbox.take() == ()
    assert not node.outbox.complete
    node.outbox.connected()
    seen.add(node.outbox.epoch)
    assert len(seen) == 3


def test_an_overflow_tells_everything_again() -> None:
    """Nothing blocks and memory is bounded: what was dropped is made good by a full resend, the latest included."""
    node = Node("a", limit=3)
    node.outbox.connected()
    node.outbox.answered("f1", known=False)
    node.drain()
    before = node.outbox.epoch
    for name in ("x1", "x2", "x3", "x4"):
        node.outbox.delete(name)
    assert node.outbox.dropped == 3
    assert node.outbox.epoch != before
    assert node.outbox.take() == ()
    node.outbox.answered("f1", known=False)
    assert node.drain() == ["a", "x4"]


def test_more_containers_than_the_limit_are_no_overflow() -> None:
    """A resend that is larger than the limit does not start the next one for ever."""
    node = Node(*(f"c{number}" for number in range(10)), limit=3)
    node.outbox.connected()
    node.outbox.put(report("new"))
    node.outbox.answered("f1", known=False)
    assert len(node.drain()) == 11
    assert node.outbox.dropped == 0


def test_a_broken_connection_loses_no_message(node: Node) -> None:
    """What was sent and not acknowledged is sent again, first."""
    first = node.outbox.take()
    node.outbox.release()
    assert not node.outbox.complete
    assert node.outbox.take() == first


def test_a_newer_report_replaces_the_one_that_broke(node: Node) -> None:
    """After a broken connection the latest report is sent, not the old one."""
    node.outbox.take(1)
    node.outbox.put(report("a", "stopped"))
    node.outbox.release()
    assert node.drain() == ["b", "a"]


def test_a_refused_report_keeps_the_epoch_incomplete(node: Node) -> None:
    """Silence about a container whose report was refused must not look like its absence; others go on."""
    assert node.requests(poisoned="a") == [["a", "b"], ["a"], ["b"]]
    assert not node.outbox.complete
    node.outbox.retry()
    assert node.drain() == ["a"]
    assert node.outbox.complete


def test_an_answer_to_a_message_of_an_old_epoch_counts_for_nothing(node: Node) -> None:
    """A frontend that restarted between request and answer is told that container again."""
    node.outbox.take()
    node.outbox.connected()
    node.outbox.settle(acknowledged=True)
    node.outbox.answered("f2", known=False)
    assert node.drain() == ["a", "b"]


def test_reports_go_together_and_deletions_alone() -> None:
    """Order stays: reports that follow each other are one request, up to a limit; a deletion is a request."""
    node = Node(*(f"c{number}" for number in range(MAX_TOGETHER + 1)), limit=1000)
    node.outbox.connected()
    node.outbox.answered("f1", known=False)
    node.outbox.delete("x")
    node.outbox.put(report("y"))
    assert [len(names) for names in node.requests()] == [MAX_TOGETHER, 1, 1, 1]
    assert node.outbox.complete


def test_one_poisoned_report_stops_no_other(node: Node) -> None:
    """Refused together, each is sent alone; later the poisoned one is tried alone, the others go together again."""
    node.drain()
    for name in ("a", "b", "c"):
        node.outbox.put(report(name))
    assert node.requests(poisoned="b") == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert not node.outbox.complete
    node.outbox.retry()
    for name in ("a", "c"):
        node.outbox.put(report(name))
    assert node.requests() == [["b"], ["a", "c"]]
    assert node.outbox.complete


def test_a_broken_request_of_several_loses_none(node: Node) -> None:
    """All are sent again, in their order, except those of which there is later news."""
    assert len(node.outbox.take()) == 2
    assert len(node.outbox) == 2
    node.outbox.delete("a")
    node.outbox.release()
    assert node.requests() == [["b"], ["a"]]
