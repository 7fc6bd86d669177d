# SPDX-License-Identifier: Apache-2.0
"""irqbalance is told what it may not use, and gets back what it had."""

from pathlib import Path

import pytest
from nri_backend.quiet.interrupts import BALANCER
from nri_backend.quiet.keeper import Kind, Outcome, Wanted, vacate
from nri_backend.quiet.things import StoreFile

from tests.rigs.irq_tree import IrqTree
from tests.rigs.irqbalance import irqbalance

ONLINE = frozenset(range(8))


class Node:
    """A node with interrupts, and the instance that keeps them off some CPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = IrqTree(root)

    def look(self, *taken: int) -> Outcome:
        """One look."""
        kind = Kind(self.tree, StoreFile(f"{self.root}/interrupts.json"), "interrupts", 30.0, elsewhere=True)
        return vacate(kind, Wanted(frozenset(taken), ONLINE), frozenset())


@pytest.fixture
def node(short_root: Path) -> Node:
    """Its sockets have short names."""
    return Node(short_root)


@pytest.mark.parametrize("own", ["", "1"])
def test_it_is_told_and_gets_its_own_back(node: Node, own: str) -> None:
    """What it was forbidden before stays forbidden, all the time and afterwards; each change is told once."""
    told = "1-3" if own else "2-3"
    with irqbalance(node.root, own) as daemon:
        before = daemon.banned
        assert BALANCER in node.look(2, 3).moved
        daemon.round()
        assert daemon.banned == before | {2, 3}
        node.tree.next_instance()
        node.look(2, 3)
        node.look(2, 3)
        daemon.round()
        assert [one for one in daemon.requests if one != "setup"] == [f"settings cpus {told}"]
        assert node.look() == Outcome()
        daemon.round()
        assert daemon.banned == before


def test_what_it_has_not_taken_up_yet_is_known(node: Node) -> None:
    """Between its rounds it tells what was before: a claim that ends at once leaves nothing behind."""
    with irqbalance(node.root) as daemon:
        node.look(2, 3)
        node.look()
        daemon.round()
        assert not daemon.banned


def test_one_that_was_restarted_is_told_again(node: Node) -> None:
    """It has forgotten what it was told; the socket of the dead one is passed by."""
    with irqbalance(node.root, pid=1):
        node.look(2, 3)
    assert BALANCER not in node.look(2, 3).moved
    with irqbalance(node.root, pid=2) as daemon:
        assert BALANCER in node.look(2, 3).moved
        daemon.round()
        assert daemon.banned == {2, 3}


def test_one_that_does_not_answer_once_gets_its_own_back_all_the_same(node: Node) -> None:
    """What it tells afterwards is our ban: who took that for its own would never lift it."""
    with irqbalance(node.root) as daemon:
        node.look(2, 3)
        daemon.round()
        node.tree.next_instance()
        daemon.busy = True
        node.look(2, 3)
        daemon.busy = False
        node.look(2, 3)
        node.look()
        daemon.round()
        assert daemon.banned == set()
