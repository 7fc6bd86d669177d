# SPDX-License-Identifier: Apache-2.0
"""Requests to a helper that is listening but does not respond."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dra_frontend.claims import on_demand
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.hugepage_pools import KernelPools
from dra_frontend.node.pool_client import HelperError, HelperPools
from dra_frontend.node.pool_requests import pool_socket

MIB2 = 2 << 20
SHORT, LONG = 0.05, 600.0


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Callable[[float, float], HelperPools]]:
    """Returns a function that creates a client for a hung helper, with the given timeouts for a write and for a
    check.
    """
    path = str(tmp_path / "pools.sock")
    with pool_socket() as listening:
        listening.bind(path)
        listening.listen()
        yield lambda write, check: HelperPools(KernelPools(HostTree(tmp_path)), path, write, check)


def test_a_check_has_its_own_timeout(hung: Callable[[float, float], HelperPools]) -> None:
    """The timeout for checks is short, because a check writes nothing and claims wait for it. A write may block in the
    kernel for much longer.
    """
    with pytest.raises(HelperError, match="timed out"):
        hung(LONG, SHORT).check(0, MIB2)


def test_a_write_waits_longer_than_the_requested_time(hung: Callable[[float, float], HelperPools]) -> None:
    """The client waits for the requested time plus its timeout for writes. Its timeout for checks does not apply."""
    with pytest.raises(HelperError, match="timed out"):
        hung(SHORT, LONG).shrink(0, MIB2, 0)
    with pytest.raises(HelperError, match="timed out"):
        hung(SHORT, LONG).grow(0, MIB2, 1, lambda: SHORT)


def test_a_check_ends_before_the_next_one_is_due(tmp_path: Path) -> None:
    """If a check took longer, a hung helper would be checked without a pause."""
    pools = HelperPools(KernelPools(HostTree(tmp_path)), str(tmp_path / "pools.sock"))
    assert pools._check_seconds == 5.0 < on_demand._CHECK_SECONDS
