# SPDX-License-Identifier: Apache-2.0
"""How claimed CPUs are banned in irqbalance, tested against a fake with a real socket."""

from collections.abc import Callable
from pathlib import Path

import pytest
from nri_backend.host_isolation.evictor import AffinityClass, DesiredIsolation, EvictionResult, evict
from nri_backend.host_isolation.interrupts import IRQBALANCE
from nri_backend.host_isolation.originals import OriginalsFile
from numa_contract.backend_codes import BackendCode

from tests.rigs.irq_tree import IrqTree
from tests.rigs.irqbalance import irqbalance

ONLINE = frozenset(range(8))


class Node:
    """A node with interrupts, and a backend instance that evicts them from some CPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = IrqTree(root)

    def evict(self, *cpus: int, may_write: Callable[[], bool] = lambda: True) -> EvictionResult:
        """Runs one pass that vacates the given CPUs."""
        originals = OriginalsFile(f"{self.root}/interrupts.json")
        code = BackendCode.INTERRUPTS_NOT_MOVED
        interrupts = AffinityClass(
            self.tree,
            originals,
            "interrupts",
            30.0,
            may_relocate=True,
            not_moved=code,
            delayed=frozenset({IRQBALANCE}),
            may_write=may_write,
        )
        return evict(interrupts, DesiredIsolation(frozenset(cpus), ONLINE), frozenset())


@pytest.fixture
def node(short_root: Path) -> Node:
    """Returns a node whose directory has a short path, since a socket path is limited to 107 bytes."""
    return Node(short_root)


@pytest.mark.parametrize("own", ["", "1"])
def test_claimed_cpus_are_banned_once_and_the_original_ban_is_restored(node: Node, own: str) -> None:
    """CPUs banned by irqbalance's environment stay banned during and after claims."""
    banned = "1-3" if own else "2-3"
    with irqbalance(node.root, own) as daemon:
        before = daemon.banned
        assert IRQBALANCE in node.evict(2, 3).moved
        daemon.round()
        assert daemon.banned == before | {2, 3}
        node.tree.next_instance()
        node.evict(2, 3)
        node.evict(2, 3)
        daemon.round()
        assert [one for one in daemon.requests if one != "setup"] == [f"settings cpus {banned}"]
        assert node.evict().moved == {IRQBALANCE}
        daemon.round()
        assert daemon.banned == before
        assert node.evict() == EvictionResult()


def test_a_ban_that_is_not_in_effect_yet_is_lifted_again(node: Node) -> None:
    """irqbalance reports the old mask until its next round. If the CPUs no longer need to be vacated by then,
    no ban is left behind.
    """
    with irqbalance(node.root) as daemon:
        node.evict(2, 3)
        node.evict()
        daemon.round()
        assert not daemon.banned


def test_a_restarted_irqbalance_gets_the_ban_again(node: Node) -> None:
    """The new process has no ban, and the socket that the old process left behind is skipped."""
    with irqbalance(node.root, pid=1):
        node.evict(2, 3)
    assert IRQBALANCE not in node.evict(2, 3).moved
    with irqbalance(node.root, pid=2) as daemon:
        assert IRQBALANCE in node.evict(2, 3).moved
        daemon.round()
        assert daemon.banned == {2, 3}


def test_the_original_ban_is_restored_after_a_pass_without_a_reply(node: Node) -> None:
    """The pass without a reply keeps the stored original. Otherwise, the next pass would mistake the driver's own ban
    for the original.
    """
    with irqbalance(node.root) as daemon:
        node.evict(2, 3)
        daemon.round()
        node.tree.next_instance()
        daemon.busy = True
        node.evict(2, 3)
        daemon.busy = False
        node.evict(2, 3)
        node.evict()
        daemon.round()
        assert daemon.banned == set()


def test_the_original_ban_is_restored_if_the_backend_dies_before_the_last_of_several_bans_is_in_effect(
    node: Node,
) -> None:
    """The next instance reads a ban that is older than the last two writes, and does not take it for the original."""
    with irqbalance(node.root) as daemon:
        node.evict(1)
        daemon.round()
        node.evict(1, 2)
        node.evict(1, 2, 3)
        node.tree.next_instance()
        node.evict(1, 2, 3)
        daemon.round()
        assert daemon.banned == {1, 2, 3}
        node.evict()
        daemon.round()
        assert daemon.banned == set()


def test_the_original_ban_is_restored_if_the_backend_dies_before_the_ban_is_lifted(node: Node) -> None:
    """The next instance still reads the driver's own ban, and there is a new claim."""
    with irqbalance(node.root) as daemon:
        node.evict(1)
        daemon.round()
        node.evict()
        node.tree.next_instance()
        node.evict(2)
        daemon.round()
        assert daemon.banned == {2}
        node.evict()
        daemon.round()
        assert daemon.banned == set()


def test_the_original_ban_is_restored_if_the_backend_is_replaced_while_it_lifts_a_ban(node: Node) -> None:
    """The instance has stored the originals, but has not written to irqbalance, which has not applied the ban yet."""
    with irqbalance(node.root) as daemon:
        node.evict(2, 3)
        answers = iter([True, False])
        with pytest.raises(OSError, match="another instance is active"):
            node.evict(may_write=lambda: next(answers))
        node.tree.next_instance()
        node.evict()
        daemon.round()
        assert daemon.banned == set()
        assert node.evict() == EvictionResult()


def test_the_original_ban_is_restored_if_the_backend_dies_before_the_first_ban_is_in_effect(node: Node) -> None:
    """The next instance still reads the original, although the ban takes effect later. The claim has ended."""
    with irqbalance(node.root) as daemon:
        node.evict(2, 3)
        node.tree.next_instance()
        node.evict()
        daemon.round()
        assert daemon.banned == set()
        assert node.evict() == EvictionResult()
