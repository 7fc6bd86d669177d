# SPDX-License-Identifier: Apache-2.0
"""What explain knows of a node whose service runs."""

import asyncio
import json
from collections.abc import Iterator

import pytest
from dra_frontend.commands.explain import explain
from numa_contract.cdi import RECORD_ANNOTATION

from tests.rigs.ailing_node import AilingNode
from tests.rigs.builders import cpu_record, write_claim


@pytest.fixture
def node() -> Iterator[AilingNode]:
    """A node with a claim of CPUs 2-3."""
    made = AilingNode()
    yield made
    made.close()


@pytest.mark.parametrize("serving", [True, False])
async def test_a_damaged_claim_file_holds_its_cpus(serving: bool, node: AilingNode) -> None:
    """Whether the service runs, which shows claims with a record alone, or not."""
    node.serving = serving
    file = write_claim(node.cdi, cpu_record("u8", "r=5-6"))
    document = json.loads(file.read_text())
    document["annotations"][RECORD_ANNOTATION] = "{damaged"
    file.write_text(json.dumps(document))
    async with node.up() as settings:
        used = [(await asyncio.to_thread(explain, settings, f"cpu/{cpu}"))[0]["use"] for cpu in (2, 5, 7)]
        found, _ = await asyncio.to_thread(explain, settings, "cpudevnuma001")
    assert used == [
        "claimed by ns/work",
        "claimed by u8, whose record is not known",
        "shared by containers without a claim",
    ]
    assert (found["cpus"], found["freeCpus"], found["claims"]) == ("4-7", "4,7", {"u8": "2"})
