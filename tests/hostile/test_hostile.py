# SPDX-License-Identifier: Apache-2.0
"""Every attack of every actor, one actor's after the other on his own node."""

import re
from collections.abc import Iterator

import pytest

from tests.hostile import api_server, claim_author, files, host, network_peer, pod_author, runtime
from tests.hostile.attack import Attack
from tests.hostile.field import Field

_TABLES = (pod_author, claim_author, files, host, network_peer, api_server, runtime)


def _rows() -> Iterator[object]:
    for attack in (attack for table in _TABLES for attack in table.ATTACKS):
        yield pytest.param(attack, id=f"{attack.actor}: {attack.name}")


@pytest.mark.parametrize("attack", list(_rows()))
def test_nobody_else_is_hurt(field: Field, attack: Attack) -> None:
    """What is heard is what must be; the CPU time is bounded; a fresh claim gets its CPUs, others the pool."""
    field.unharmed = False
    before = field.spent()
    with attack.run(field) as heard:
        spent = [round(now - then, 2) for now, then in zip(field.spent(), before, strict=True)]
        print(f"heard {heard[:400]!r}, frontend and backend took {spent} s")
        assert re.search(attack.expects, heard), heard[:2000]
        assert max(spent) <= attack.seconds, f"frontend and backend took {spent} s"
        field.works()
    field.unharmed = not attack.spoils_the_node
