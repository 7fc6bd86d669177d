# SPDX-License-Identifier: Apache-2.0
"""A node's status screen, built from the service's data or from files."""

import asyncio
import re
from collections.abc import Iterator

import pytest
from numa_contract.state.words import ENFORCED
from numa_tools.commands.status import read_status, status_screen

from tests.rigs.builders import report
from tests.rigs.faulty_node import FaultyNode


@pytest.fixture
def node() -> Iterator[FaultyNode]:
    """Returns a node with a claim for CPUs 2-3."""
    made = FaultyNode()
    yield made
    made.close()


@pytest.mark.parametrize("serving", [True, False])
async def test_devices_claims_and_cpus_are_shown(serving: bool, node: FaultyNode) -> None:
    """Devices, claims and CPUs are shown whether or not the service is running. If the service is not running, the
    first line of the screen says so.
    """
    node.serving = serving
    async with node.up() as settings:
        status = await asyncio.to_thread(read_status, settings)
    assert status["source"] == ("service" if serving else "files")
    assert [(one["claim"], one["cpus"]) for one in status["claims"]] == [("ns/work", "2-3")]
    assert {use: status["cpus"][use] for use in ("reserved", "claimed", "pool")} == {
        "reserved": "0",
        "claimed": "2-3",
        "pool": "1,4-7",
    }
    assert status["uses"] == {"exclusive": "2-3", "pool": "1,4-7", "reserved": "0"}
    assert {one["name"]: one["claimed"] for one in status["devices"]}["cpudevnuma000"] == 2
    screen = status_screen(status)
    uid, enforced = status["claims"][0]["uid"], status["claims"][0]["enforced"]
    (wide,) = (line for line in status_screen(status, wide=True).splitlines() if line.endswith(uid))
    assert enforced["reason"] in wide
    assert uid not in screen
    assert "CPUs: exclusive 2-3  pool 1,4-7  reserved 0" in screen
    assert "ns/work  CPUs 2-3" in screen
    assert ("no problems" in screen) == serving == (not status["problems"])
    assert ("the service is down" in screen.splitlines()[0]) != serving
    assert ("kernel" in screen) == serving, "who keeps others off is known to the backend alone"


@pytest.mark.parametrize("serving", [True, False])
async def test_the_screen_shows_whether_a_claim_is_enforced(serving: bool, node: FaultyNode) -> None:
    """The screen uses the same words as the web page for the statuses of the claim's condition. Without the service,
    the status is unknown.
    """
    node.serving = serving
    async with node.up() as settings:
        status = await asyncio.to_thread(read_status, settings)
    (claim,) = status["claims"]
    assert (claim["enforced"]["status"], claim["enforced"]["reason"]) == ("Unknown", "NoContainer" if serving else "")
    for condition, word in ENFORCED.items():
        claim["enforced"]["status"] = condition
        (line,) = (line for line in status_screen(status).splitlines() if line.startswith("ns/work"))
        assert re.split(" {2,}", line)[3] == word


async def test_problems_are_shown(node: FaultyNode) -> None:
    """Each problem with the service, its backend or a container is shown once, on a single line."""
    node.problems.append("dra.cpu: not registered")
    node.status["problems"] = ["irqbalance undoes what is moved"]
    node.containers[0].update(fallbackReason="x has CPU 2", exclusivity="pool")
    node.containers.append(report("r", "unknown", refused="no CPU is free").model_dump())
    async with node.up() as settings:
        screen = status_screen(await asyncio.to_thread(read_status, settings))
    problems = [line for line in screen.splitlines() if line.startswith("PROBLEM ")]
    assert len(problems) == len(set(problems)) == 4
    for text in ("not registered", "irqbalance", "x has CPU 2", "no CPU is free"):
        assert any(text in line for line in problems)


async def test_the_kind_of_enforcement_is_shown(node: FaultyNode) -> None:
    """The screen lists the CPUs in kernel partitions. If claims are isolated by the pool or refused instead, it gives
    the reason.
    """
    node.status |= {"exclusivity": "pool", "exclusivityReason": "nri-backend lacks the capability SYS_ADMIN"}
    async with node.up() as settings:
        status = await asyncio.to_thread(read_status, settings)
    assert (status["exclusivity"], status["exclusivityReason"]) == (
        "pool",
        "nri-backend lacks the capability SYS_ADMIN",
    )
    assert "; isolated by the pool: nri-backend lacks the capability SYS_ADMIN\n" in status_screen(status)
    node.settings_of["cpuExclusivity"] = "partition"
    async with node.up() as settings:
        screen = status_screen(await asyncio.to_thread(read_status, settings))
    refused = (
        "; claims for a single container are refused (cpuExclusivity: partition): nri-backend lacks the capability"
    )
    assert refused in screen
    assert "isolated by the pool" not in screen
    node.status |= {"exclusivity": "partition", "exclusivityReason": "", "partitioned": "2-3"}
    async with node.up() as settings:
        screen = status_screen(await asyncio.to_thread(read_status, settings))
    assert screen.splitlines()[2].endswith("  kept by the kernel 2-3")
    assert "isolated by the pool" not in screen


async def test_untrusted_strings_stay_on_one_line(node: FaultyNode) -> None:
    """A string from a pod or a peer can neither forge a line nor send control sequences to the terminal."""
    node.problems.append("dra.cpu: \x1b[2J\x07 \u202e")
    node.containers[0].update(fallbackReason="x\nno problems", exclusivity="\x1b[31mpool")
    async with node.up() as settings:
        screen = status_screen(await asyncio.to_thread(read_status, settings))
    assert all(line.isprintable() for line in screen.split("\n"))
    assert "no problems" not in screen.split("\n")
    assert r"dra.cpu: \x1b[2J\x07 \u202e" in screen


async def test_a_claim_whose_file_is_lost_is_named(node: FaultyNode) -> None:
    """Without the service, the journal still shows that a claim whose file is gone was prepared."""
    node.serving = False
    node.note_in_journal("lost")
    async with node.up() as settings:
        status = await asyncio.to_thread(read_status, settings)
    (lost,) = (one for one in status["problems"] if one["code"] == "ClaimFileMissing")
    assert (lost["subject"], "ns/lost was prepared" in lost["text"]) == ("ns/lost", True)
