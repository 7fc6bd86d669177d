# SPDX-License-Identifier: Apache-2.0
"""Every attack of the tables, one after the other on its actor's node: each is cheap, and hurts nobody else."""

import re

import pytest

from tests.hostile import api_server, claim_author, files, host, network_peer, pod_author, runtime
from tests.hostile.attack import Attack
from tests.hostile.field import Field

_TABLES = (pod_author, claim_author, files, host, network_peer, api_server, runtime)


def _row(attack: Attack) -> object:
    # One actor's attacks on one worker: a stage for each of them would cost more than they do.
    marks = [pytest.mark.fault(*attack.findings), pytest.mark.xdist_group(attack.actor)]
    return pytest.param(attack, id=f"{attack.actor}: {attack.name}", marks=marks)


@pytest.mark.parametrize("attack", [_row(attack) for table in _TABLES for attack in table.ATTACKS])
def test_an_attack_hurts_nobody_else(field: Field, attack: Attack) -> None:
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
