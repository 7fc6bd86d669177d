# SPDX-License-Identifier: Apache-2.0
"""Every attack by every actor, run one after another on the actor's own node."""

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
def test_other_tenants_are_not_affected(field: Field, attack: Attack) -> None:
    """The output matches the attack's pattern, and both processes stay within the attack's CPU time. After the
    attack, a new claim gets its CPUs, and other pods get the pool.
    """
    field.unharmed = False
    before = field.spent()
    with attack.run(field) as heard:
        spent = [round(now - then, 2) for now, then in zip(field.spent(), before, strict=True)]
        print(f"output {heard[:400]!r}, CPU time of frontend and backend {spent} s")
        assert re.search(attack.expects, heard), heard[:2000]
        assert max(spent) <= attack.seconds, f"frontend and backend took {spent} s of CPU time"
        field.works()
    field.unharmed = not attack.spoils_the_node
