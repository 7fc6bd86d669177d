# SPDX-License-Identifier: Apache-2.0
"""Every check against a node that is good, or ill in one place: real files, real sockets, an API server."""

from collections.abc import Iterator

import pytest
from dra_frontend.doctor.gather import gather
from dra_frontend.doctor.model import Level
from dra_frontend.doctor.table import CHECKS, Verdict, examine
from dra_frontend.doctor.text import findings_text

from tests.rigs.ailing_node import AilingNode
from tests.unit.dra_frontend.doctor.illnesses import ILLNESSES


@pytest.fixture
def node() -> Iterator[AilingNode]:
    """A good node."""
    made = AilingNode()
    yield made
    made.close()


async def verdicts(node: AilingNode) -> dict[str, Verdict]:
    """What the checks say of a node, by id."""
    async with node.up() as settings:
        facts = await gather(settings)
    return {one.check.id: one for one in examine(node.edit(facts))}


async def test_a_good_node_has_no_findings(node: AilingNode) -> None:
    """Whoever runs the command on a node without faults reads that every check is good."""
    found = await verdicts(node)
    assert {name: one.findings for name, one in found.items() if one.result != "good"} == {}
    assert findings_text([*found.values()], "n") == f"n: {len(CHECKS)} good, of {len(CHECKS)} checks"


def test_every_check_has_an_illness() -> None:
    """A check that nothing makes fail is not there; ids are unique."""
    assert sorted(check.id for check in CHECKS) == sorted(ILLNESSES)


@pytest.mark.parametrize("name", ILLNESSES)
async def test_each_illness_is_found(name: str, node: AilingNode) -> None:
    """The check finds its illness, in whole sentences, and no check breaks on it."""
    ILLNESSES[name](node)
    found = await verdicts(node)
    findings = [one for one in found[name].findings if one.level is not Level.UNKNOWN]
    assert findings, {other: one.findings for other, one in found.items() if one.result != "good"}
    for one in findings:
        assert one.what.endswith(".")
        assert one.why
        assert one.remedy
        assert "\n" not in one.what + one.why + one.remedy
    failed = [one for verdict in found.values() for one in verdict.findings if "check itself failed" in one.why]
    assert failed == []
