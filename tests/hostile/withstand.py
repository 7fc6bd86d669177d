# SPDX-License-Identifier: Apache-2.0
"""What every attack is judged by."""

import re
from collections.abc import Sequence

import pytest

from tests.hostile.attack import Attack
from tests.hostile.field import Field


def rows(attacks: Sequence[Attack]) -> list[object]:
    """Returns the rows of a table as parameters of a test."""
    return [pytest.param(attack, id=attack.name, marks=pytest.mark.fault(*attack.findings)) for attack in attacks]


def withstand(field: Field, attack: Attack) -> None:
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
