# SPDX-License-Identifier: Apache-2.0
"""Opaque parameters for memory: strict, claim over class, and nothing that could not be kept."""

from typing import Any

import pytest
from dra_frontend.allocation.errors import Refused
from dra_frontend.allocation.memory import requested_memory
from dra_frontend.allocation.memory_parameters import MemoryConfig
from dra_frontend.allocation.parameters import read_parameters
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.machine.discovery import discover
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import Config, MemoryProtection
from numa_contract.records import MemoryMount, MemoryParameters

from tests.rigs.decisions import view
from tests.rigs.trees import small_machine
from tests.strategies.claims import NODE, memory, memory_opaque

INVENTORY = build_inventory(discover(small_machine()), Config(), NODE)
HUGE = "hugepages-2m"


BOTH = MemoryProtection(allowed=("low", "min"))


def wish(*config: dict[str, Any], kinds: tuple[str, ...] = ("memory",), size: str = "64Mi") -> MemoryParameters:
    """Returns the parameters of the request ``r``, which has a result of each kind."""
    found = view("u", *(memory(size, "r", 1, kind) for kind in kinds), config=config)
    stated = read_parameters(found, {"dra.memory": MemoryConfig})
    return requested_memory(found.results, stated, INVENTORY, BOTH)["r"]


def fault(*config: dict[str, Any], kinds: tuple[str, ...] = ("memory",), size: str = "64Mi") -> str:
    """Returns the text of the refusal."""
    with pytest.raises(Refused) as caught:
        wish(*config, kinds=kinds, size=size)
    return caught.value.text.removeprefix("request r: ")


def test_without_parameters_everything_is_the_default() -> None:
    """Memory is bound by cpuset.mems, and nothing is limited, protected or mounted."""
    assert wish() == wish(memory_opaque({})) == MemoryParameters()
    assert (wish().binding, wish().limit, wish().protect, wish().high, wish().mount) == (
        "strict",
        "none",
        "none",
        None,
        None,
    )


def test_every_field_arrives() -> None:
    """All fields of the table, with values that are no defaults."""
    assert wish(
        memory_opaque({"binding": "interleave", "limit": "claim", "protect": "min", "high": 0.9, "sharing": "pod"})
    ) == MemoryParameters(binding="interleave", limit="claim", protect="min", high=0.9)
    mount = {"path": "/dev/hugepages", "mode": "1777"}
    assert wish(memory_opaque({"mount": mount}), kinds=(HUGE,)).mount == MemoryMount(**mount)


def test_the_claim_beats_the_class_field_by_field() -> None:
    """What the claim does not say, the class decides; a mount is one field, so that no mode of another path remains."""
    class_says = memory_opaque({"limit": "claim", "protect": "low"}, from_class=True)
    claim_says = memory_opaque({"protect": "none"})
    expected = MemoryParameters(limit="claim")
    assert wish(class_says, claim_says) == wish(claim_says, class_says) == expected
    both = [memory_opaque({"mount": {"path": "/a", "mode": "0700"}}, from_class=True)]
    both += [memory_opaque({"mount": {"path": "/b"}})]
    assert wish(*both, kinds=(HUGE,)).mount == MemoryMount(path="/b", mode="0770")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"bindings": "strict"}, "memoryConfig.bindings: unknown field; known are sharing, binding, limit, protect,"),
        ({"binding": "bind"}, "memoryConfig.binding: 'bind': input should be 'strict', 'preferred' or 'interleave'"),
        ({"limit": "64Mi"}, "memoryConfig.limit: '64Mi': input should be 'none' or 'claim'"),
        ({"protect": True}, "memoryConfig.protect: 'True'"),
        ({"high": 0}, "memoryConfig.high: '0': input should be greater than 0"),
        ({"high": 1.01}, "memoryConfig.high: '1.01': input should be less than or equal to 1"),
        ({"high": "0.9"}, "memoryConfig.high: '0.9': input should be a valid number"),
        ({"high": True}, "memoryConfig.high: 'True'"),
        ({"mount": "/a"}, "memoryConfig.mount: must be a map of fields"),
        ({"mount": {}}, "memoryConfig.mount.path: is missing"),
        ({"mount": {"path": "/a", "size": "1Gi"}}, "memoryConfig.mount.size: unknown field; known are path, mode"),
        ({"mount": {"path": "a"}}, "memoryConfig.mount.path: 'a': must be an absolute path"),
        ({"mount": {"path": "/a/../b"}}, "must be an absolute path without '.' and '..'"),
        ({"mount": {"path": "/./a"}}, "without '.' and '..'"),
        ({"mount": {"path": ""}}, "must be an absolute path"),
        ({"mount": {"path": "/"}}, "belongs to the runtime"),
        ({"mount": {"path": "/proc/x"}}, "belongs to the runtime"),
        ({"mount": {"path": "//dev/"}}, "belongs to the runtime"),
        ({"mount": {"path": "/a\nb"}}, "printable"),
        ({"mount": {"path": "/" + "a" * 4095}}, "at most 4095 bytes"),
        ({"mount": {"path": "/a", "mode": 504}}, "memoryConfig.mount.mode: '504': input should be a valid string; wr"),
        ({"mount": {"path": "/a", "mode": "0888"}}, 'must be octal permissions, such as "0770"'),
        ({"mount": {"path": "/a", "mode": "4755"}}, "must be octal permissions"),
        ({"mount": {"path": "/a", "mode": "rwx"}}, "must be octal permissions"),
    ],
)
def test_what_is_not_understood_is_refused(fields: dict[str, Any], text: str) -> None:
    """Source, field, value and what it should be are named."""
    shown = fault(memory_opaque(fields), kinds=(HUGE,))
    assert shown.startswith("parameters FromClaim: memoryConfig.")
    assert text in shown


def test_parameters_of_the_other_driver_are_refused() -> None:
    """They stand under the right driver with the wrong key: nobody would read them."""
    entry = memory_opaque({})
    entry["opaque"]["parameters"] = {"apiVersion": "v1alpha1", "cpuConfig": {}}
    assert "cpuConfig: is for the driver dra.cpu; dra.memory takes memoryConfig" in fault(entry)


def test_the_section_must_be_there() -> None:
    """A version alone is a section that was forgotten."""
    entry = memory_opaque({})
    entry["opaque"]["parameters"] = {"apiVersion": "v1alpha1"}
    assert fault(entry) == "parameters FromClaim: memoryConfig: is missing"


@pytest.mark.parametrize("fields", [{"limit": "claim"}, {"protect": "low"}, {"protect": "min"}, {"high": 0.5}])
def test_what_cgroups_charge_is_not_for_hugepages(fields: dict[str, Any]) -> None:
    """The refusal names who said it, the page size and the remedy; saying "none" is no wish."""
    shown = fault(memory_opaque(fields, from_class=True), kinds=(HUGE,))
    (name,) = fields
    assert shown.startswith(f"parameters FromClass: memoryConfig.{name}: ")
    assert "of 2Mi hugepages" in shown
    assert "name only such requests under config[].requests" in shown
    assert fault(memory_opaque(fields), kinds=("memory", HUGE))
    assert wish(memory_opaque({"limit": "none", "protect": "none"}), kinds=(HUGE,)) == MemoryParameters()


def test_a_mount_is_for_hugepages_of_one_size() -> None:
    """A file system has one page size, and plain memory has none."""
    mount = memory_opaque({"mount": {"path": "/a"}})
    assert "is for hugepages, and the request is of plain memory" in fault(mount)
    assert "is for hugepages" in fault(mount, kinds=("memory", HUGE))
    assert "has pages of 2Mi, 1Gi" in fault(mount, kinds=(HUGE, "hugepages-1g"), size="1Gi")
    assert wish(mount, kinds=(HUGE, HUGE)).mount == MemoryMount(path="/a")


def test_high_bounds_at_least_a_page() -> None:
    """A fraction that leaves nothing would stop the container before its first instruction."""
    assert "is less than a page" in fault(memory_opaque({"high": 0.5}), size="4Ki")
    assert wish(memory_opaque({"high": 0.5}), size="8Ki").high == 0.5
    assert wish(memory_opaque({"high": 1}), size="4Ki").high == 1.0


@pytest.mark.parametrize(("path", "plain"), [("/dev/hugepages", "/dev/hugepages"), ("//mnt//huge/", "/mnt/huge")])
def test_paths_are_recorded_plainly(path: str, plain: str) -> None:
    """One directory has one spelling, so that two requests cannot hide each other unnoticed."""
    assert wish(memory_opaque({"mount": {"path": path}}), kinds=(HUGE,)).mount == MemoryMount(path=plain)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["path", "mode"]) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
_FIELDS = st.sampled_from([*MemoryConfig.model_fields, "mount", "other"])


@given(st.dictionaries(_FIELDS, _JSON, max_size=4) | _JSON, st.sampled_from(["memory", HUGE]))
def test_any_json_is_parameters_or_a_refusal(fields: Any, kind: str) -> None:
    """Claims are written by anybody: what comes out can be recorded, or the text names the field."""
    try:
        found = wish(memory_opaque(fields), kinds=(kind,))
    except Refused as error:
        text = error.text
    else:
        assert MemoryParameters.model_validate_json(found.model_dump_json()) == found
        return
    assert "parameters FromClaim: memoryConfig" in text
    assert len(text) < 500
