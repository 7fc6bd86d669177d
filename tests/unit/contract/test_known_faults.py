# SPDX-License-Identifier: Apache-2.0
"""Each known fault of the CPU peer, by its number, has a test that shows that we do not have it."""

import re
from pathlib import Path
from typing import Final

import pytest

_TESTS: Final = Path(__file__).parents[2]
FAULTS: Final = {
    "9.1.1": "core ids taken for unique on the node: claims get CPUs of another socket",
    "9.1.2": "averages taken for sizes: uneven sockets and hybrid parts are split wrongly",
    "9.1.3": "fragments defeat L3 alignment",
    "9.1.4": "an empty shared pool leaves others on exclusive CPUs",
    "9.1.5": "CPUs without cache or NUMA directories are dropped",
    "9.1.6": "the socket of a NUMA node depends on the order of a map",
    "9.1.7": "a container that names one request gets the CPUs of all",
    "9.2.1": "a synchronisation forgets claims whose container does not run",
    "9.2.2": "claims are prepared before the containers are known",
    "9.2.3": "the state is replaced while others read it",
    "9.2.4": "one bad pair of containers stops the synchronisation for good",
    "9.2.5": "five connections to the runtime, then the end",
    "9.2.6": "files of claims are not read at the start",
    "9.2.7": "names of single CPUs shift",
    "9.2.8": "a changed allocation is ignored",
    "9.2.9": "old slices stay when there is nothing to publish",
    "9.2.10": "released CPUs do not come back to those that run",
    "9.3.1": "a synchronisation costs pods times containers",
    "9.3.2": "a claim's first hook rewrites every other container",
    "9.3.3": "the allocator is quadratic",
    "9.3.4": "devices are searched for",
    "9.3.5": "health reports are made for nobody",
    "9.3.6": "liveness waits for the registration",
    "9.3.7": "library code ends the process",
    "9.4.1": "reserved CPUs are not compared with the machine",
    "9.4.2": "capacities without a request policy",
    "9.4.3": "parameters ignored in most modes and lax in the others; administrative access and share ids ignored",
    "9.4.4": "a pod that knows UID and CPUs takes the claim",
    "9.4.5": "refusals are not logged",
    "9.4.6": "probes do not know of the runtime; a taken port is not fatal",
    "9.4.7": "an open port, and permissions that nobody needs",
    "9.4.8": "the node's name is the host's",
    "9.4.9": "a CDI version higher than needed",
    "9.4.10": "the tool that gathers facts shows defaults when it looks at the wrong process",
    "9.4.11": "two threads per core at most; PCIe roots on one architecture only",
    "9.4.12": "strategies and devices that are missing",
    "9.4.13": "an upgrade remembers nothing",
}


@pytest.fixture(scope="module")
def marked() -> set[str]:
    """The faults that tests are marked with."""
    mark = re.compile(r"mark\.fault\(([^)]*)\)")
    texts = (file.read_text() for file in _TESTS.rglob("test_*.py"))
    return {name for text in texts for found in mark.findall(text) for name in re.findall(r'"([^"]*)"', found)}


@pytest.mark.fault("cpu peer 9.3.7")
def test_no_library_code_ends_the_process() -> None:
    """Only a program's entry exits; everything else raises or returns."""
    ends = re.compile(r"(?<![\w.])(sys\.exit|os\._exit|os\.abort|exit|quit)\(")
    sources = [file for folder in ("services", "shared") for file in (_TESTS.parent / folder).rglob("*.py")]
    assert sources
    assert not [file for file in sources if file.name != "__main__.py" and ends.search(file.read_text())]


@pytest.mark.parametrize("number", FAULTS)
def test_a_fault_of_the_peer_has_a_test(number: str, marked: set[str]) -> None:
    """It is marked with the number, so that a failure tells which fault came back."""
    assert f"cpu peer {number}" in marked, FAULTS[number]
