# SPDX-License-Identifier: Apache-2.0
"""Explaining claims on a node whose service is running."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.claims.journal import Journal, JournalEntries
from numa_contract.cdi import RECORD_ANNOTATION, ClaimFile
from numa_contract.names import CLAIMS_JOURNAL
from numa_tools import cli
from numa_tools.commands.explain import explain
from numa_tools.commands.gather import gather

from tests.rigs.builders import cpu_record, report, write_claim
from tests.rigs.faulty_node import FaultyNode
from tests.rigs.trees import small_machine, write_tree


@pytest.fixture
def node() -> Iterator[FaultyNode]:
    """Returns a node with a claim for CPUs 2-3."""
    made = FaultyNode()
    yield made
    made.close()


_GOOD: dict[str, Any] = {"claims": [], "containers": [], "backend": {}, "devices": []}
_DEVICE = {"driver": "dra.cpu", "name": "cpudevnuma000"}


@pytest.mark.parametrize(
    ("odd", "problems"),
    [
        ({"devices": [1]}, 0),
        ({"devices": {"a": 1}}, 0),
        ({"devices": [{**_DEVICE, "taints": 5}]}, 0),
        ({"devices": [{**_DEVICE, "taints": [1]}]}, 0),
        ({"backend": [1], "claims": None, "containers": 5}, 0),
        ({"devices": [{**_DEVICE, "health": "\x1b[2J\x1b]0;owned\x07", "message": "\ud800"}]}, 1),
        ({"containers": [{**report("c").model_dump(), "cgroup": "a\0b", "claims": [{"uid": "u", "driver": "d"}]}]}, 0),
    ],
)
def test_a_malformed_archive_is_explained(
    odd: dict[str, Any], problems: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unreadable parts are left out, everything else is explained, and no control character reaches the terminal."""
    write_tree(small_machine(), tmp_path)
    (tmp_path / "etc/dra-driver-numa").mkdir(parents=True)
    (tmp_path / "state").mkdir()
    said = {f"state/{name}.json": document for name, document in (_GOOD | odd).items()}
    for path, document in (said | {"manifest.json": {}, "etc/dra-driver-numa/config.yaml": {}}).items():
        (tmp_path / path).write_text(json.dumps(document))
    assert cli.main(["explain", "cpudevnuma000", "--from", str(tmp_path)]) == problems
    printed = capsys.readouterr()
    assert printed.out.startswith("Device cpudevnuma000 of driver dra.cpu: ")
    assert all(line.isprintable() for line in printed.out.split("\n"))


@pytest.mark.parametrize("serving", [True, False])
async def test_a_claim_that_is_being_released_holds_its_cpus(
    serving: bool, node: FaultyNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPUs stay allocated for as long as the journal contains the release, and an archive from the node shows the
    same.
    """
    node.serving = serving
    record = cpu_record("u9", "r=5-6")
    held = JournalEntries(releasing={("dra.cpu", "u9"): ClaimFile.of(record)})
    Journal(node.run / CLAIMS_JOURNAL).write(held)
    said = "held: claimed by ns/claim-u9, which is being released: one of its containers may still be running"
    async with node.up() as settings:
        found, _ = await asyncio.to_thread(explain, settings, "cpu/5")
        device, _ = await asyncio.to_thread(explain, settings, "cpudevnuma001")
        await asyncio.to_thread(gather, settings, str(tmp_path / "a"), masked=False)
    assert (found["use"], device["freeCpus"]) == (said, "4,7")
    assert cli.main(["explain", "cpu/5", "--from", str(tmp_path / "a")]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("serving", [True, False])
async def test_a_claim_with_a_damaged_file_keeps_its_cpus(serving: bool, node: FaultyNode) -> None:
    """The CPUs stay allocated whether or not the service is running, even though the service itself shows only claims
    that have a record.
    """
    node.serving = serving
    file = write_claim(node.cdi, cpu_record("u8", "r=5-6"))
    document = json.loads(file.read_text())
    document["annotations"][RECORD_ANNOTATION] = "{damaged"
    file.write_text(json.dumps(document))
    async with node.up() as settings:
        used = [(await asyncio.to_thread(explain, settings, f"cpu/{cpu}"))[0]["use"] for cpu in (2, 5, 7)]
        found, _ = await asyncio.to_thread(explain, settings, "cpudevnuma001")
    assert used == [
        "exclusive: claimed by ns/work",
        "held: claimed by u8, whose record is unknown",
        "pool: free to claim; all containers without a claim run here",
    ]
    assert (found["cpus"], found["freeCpus"], found["claims"]) == ("4-7", "4,7", {"u8": "2"})
