# SPDX-License-Identifier: Apache-2.0
"""A claim is shared as a whole, whichever driver is asked."""

from typing import Any

import pytest
from dra_frontend.allocation.claim import ClaimView
from dra_frontend.devices.inventory import build_inventory
from numa_contract.config import Config
from numa_contract.names import DRIVERS

from tests.rigs.decisions import decided, refused, view
from tests.strategies.claims import NODE, cpus, memory, memory_opaque, opaque, result
from tests.strategies.machines import machine

INVENTORY = build_inventory(machine(), Config(), NODE)


def sharing(*config: dict[str, Any]) -> ClaimView:
    """A claim with two requests for CPUs and one for memory."""
    return view("u", cpus(1, "a"), cpus(1, "b"), memory("64Mi", "m"), config=config)


def shares(name: str, wish: str, **more: Any) -> dict[str, Any]:
    """Says how a request is shared."""
    return (memory_opaque if name == "m" else opaque)({"sharing": wish}, name, **more)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ((), "container"),
        ((shares("a", "pod"),), "pod"),
        ((shares("m", "pod"),), "pod"),
        ((shares("m", "container"),), "container"),
        ((shares("a", "pod"), shares("b", "pod"), shares("m", "pod")), "pod"),
        ((shares("a", "container", from_class=True), shares("a", "pod"), shares("m", "pod")), "pod"),
    ],
)
def test_silent_requests_follow_those_that_speak(config: tuple[dict[str, Any], ...], expected: str) -> None:
    """Both drivers record the same."""
    assert [decided(sharing(*config), INVENTORY, driver).sharing for driver in DRIVERS] == [expected, expected]


@pytest.mark.parametrize("other", ["b", "m"])
def test_two_that_differ_are_refused_by_both_drivers_in_the_same_words(other: str) -> None:
    """Who says what is named, and nothing is half given."""
    differing = sharing(shares("a", "pod"), shares(other, "container", from_class=True))
    driver = "dra.memory" if other == "m" else "dra.cpu"
    expected = (
        "claim ns/claim-u: parameters: sharing: holds for the whole claim, but its requests differ "
        f"(a of dra.cpu: pod FromClaim, {other} of {driver}: container FromClass); give all the same"
    )
    assert [refused(differing, INVENTORY, each) for each in DRIVERS] == [expected, expected]


def test_what_cannot_be_read_for_one_driver_is_refused_by_both() -> None:
    """Whether they agree is not known, and the pod could not start with one of them anyway."""
    texts = {refused(sharing(memory_opaque({"limit": "all"})), INVENTORY, driver) for driver in DRIVERS}
    assert len(texts) == 1
    assert texts.pop().startswith("claim ns/claim-u: request m: parameters FromClaim: memoryConfig.limit: 'all'")


def test_other_drivers_and_watchers_have_no_say() -> None:
    """Their parameters are not ours to read, and administrative access uses nothing."""
    watching = result("w", "dra.cpu", "cpudevnuma001", adminAccess=True)
    config = (opaque({"sharing": "container"}, "w"), opaque({"sharing": 1}, driver="gpu.example.com"))
    found = view("u", cpus(1, "a"), watching, config=(*config, shares("a", "pod")))
    assert decided(found, INVENTORY).sharing == "pod"


def test_a_bad_value_is_refused() -> None:
    """With the field that has it."""
    text = refused(sharing(shares("m", "all")), INVENTORY)
    assert "memoryConfig.sharing: 'all': input should be 'container' or 'pod'" in text
