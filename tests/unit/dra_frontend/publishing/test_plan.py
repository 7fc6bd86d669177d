# SPDX-License-Identifier: Apache-2.0
"""The decision about which slices to write and delete, and the comparison of two slices."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from dra_frontend.publishing.plan import Accepted, canonical, differences, notes, plan_pool, variants
from hypothesis import given
from hypothesis import strategies as st

Document = dict[str, Any]
POOL = "node-a"


def device(name: str, size: str = "8Gi", **more: Any) -> Document:
    policy = {"default": "1Mi", "validRange": {"min": "4Ki", "step": "4Ki", "max": size}}
    return {
        "name": name,
        "attributes": {"dra.memory/tier": {"string": "local"}, "smt": {"bool": False}},
        "capacity": {"size": {"value": size, "requestPolicy": policy}},
        "allowMultipleAllocations": True,
        **more,
    }


def wanted(index: int, *devices: Document, count: int = 1) -> Document:
    """Returns a desired slice."""
    pool = {"name": POOL, "generation": 1, "resourceSliceCount": count}
    return {
        "kind": "ResourceSlice",
        "metadata": {"name": f"{index:05x}"},
        "spec": {"driver": "dra.memory", "nodeName": "n", "pool": pool, "devices": list(devices)},
    }


def stored(document: Document, *, generation: int = 1, count: int = 1, name: str = "") -> Document:
    """Returns a slice's document as the server returns it."""
    document = copy.deepcopy(document)
    name = name or document["metadata"]["name"]
    document["metadata"] |= {"name": name, "uid": f"uid-{name}", "resourceVersion": "7"}
    document["spec"]["pool"] |= {"generation": generation, "resourceSliceCount": count}
    return document


def plan(
    desired: Sequence[Document], held: Sequence[Document], accepted: Accepted | None = None
) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Returns the planned writes as (name, generation, count), and the names to delete."""
    before, after = ({one["metadata"]["name"]: one for one in documents} for documents in (held, desired))
    writes, deletes = plan_pool(POOL, after, before, accepted or {})
    pools = [(one["metadata"]["name"], one["spec"]["pool"]) for one in writes]
    written = [(name, pool["generation"], pool["resourceSliceCount"]) for name, pool in pools]
    return written, [one["metadata"]["name"] for one in deletes]


A, B, C = (wanted(index, device(name)) for index, name in enumerate("abc"))
AB, BA = wanted(0, device("a"), device("b")), wanted(0, device("b"), device("a"))
A2, B2 = wanted(0, device("a", "4Gi")), wanted(1, device("b", "4Gi"))


def of(generation: int, *documents: Document) -> list[Document]:
    """Returns slices as the server stores them, all with the same generation."""
    return [stored(one, generation=generation, count=len(documents)) for one in documents]


@pytest.mark.parametrize(
    ("desired", "held", "writes", "deletes"),
    [
        pytest.param([A, B], [], [("00000", 1, 2), ("00001", 1, 2)], [], id="first publication"),
        pytest.param([A, B], of(5, A, B), [], [], id="nothing changed"),
        pytest.param([A2, B], of(5, A, B), [("00000", 5, 2)], [], id="one changed, in place"),
        pytest.param([A2, B2], of(5, A, B), [("00000", 6, 2), ("00001", 6, 2)], [], id="two changed"),
        pytest.param(
            [A2, B2, C], of(5, A, B, C), [(f"0000{n}", 6, 3) for n in range(3)], [], id="two of three changed"
        ),
        pytest.param([A, B], of(5, A, B)[:1], [("00001", 5, 2)], [], id="one deleted, written again unchanged"),
        pytest.param([A, B], of(3, A), [("00000", 4, 2), ("00001", 4, 2)], [], id="one added"),
        pytest.param([A], of(2, A, B), [("00000", 3, 1)], ["00001"], id="one removed"),
        pytest.param([A, B], [*of(4, A, B)[:1], *of(3, A, B)[1:]], [("00001", 4, 2)], [], id="interrupted update"),
        pytest.param([A], [*of(2, A), stored(A, name="old")], [], ["old"], id="leftover slice with an old name"),
        pytest.param([], of(2, A, B), [], ["00000", "00001"], id="pool removed"),
        pytest.param([BA], of(5, AB), [("00000", 5, 1)], [], id="devices in another order, which the scheduler keeps"),
        pytest.param(
            [A],
            [stored(A, name="00000-x-7k2p", generation=3)],
            [("00000", 4, 1)],
            ["00000-x-7k2p"],
            id="slice with a generated name",
        ),
        pytest.param(
            [A, B],
            [*of(5, A, B), stored(C, name="foreign", generation=(1 << 63) - 1)],
            [],
            ["foreign"],
            id="a generation that cannot be raised",
        ),
        pytest.param(
            [A, B],
            of((1 << 63) - 1, A, B),
            [("00000", 1, 2), ("00001", 1, 2)],
            [],
            id="own slices with a generation that cannot be raised",
        ),
    ],
)
def test_which_slices_are_written_and_deleted(
    desired: list[Document], held: list[Document], writes: list[tuple[str, int, int]], deletes: list[str]
) -> None:
    """A single slice is updated in place. If there are several, all of them are written with a higher generation, and
    superseded slices are deleted afterwards.
    """
    assert plan(desired, held) == (writes, deletes)


def published(present: dict[str, Document]) -> set[str] | None:
    """Returns the device sizes that a consumer sees, or None while the newest generation is incomplete."""
    newest = max((one["spec"]["pool"]["generation"] for one in present.values()), default=0)
    seen = [one["spec"] for one in present.values() if one["spec"]["pool"]["generation"] == newest]
    if any(spec["pool"]["resourceSliceCount"] != len(seen) for spec in seen):
        return None
    return {device["capacity"]["size"]["value"] for spec in seen for device in spec["devices"]}


@given(st.sets(st.sampled_from("abcd")), st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 3)))
def test_consumers_never_see_a_mixture_of_old_and_new_slices(desired: set[str], held: dict[str, int]) -> None:
    """At no time during the writes do consumers see only some of the new slices."""
    target, present = {}, {}
    for name in sorted(desired):
        target[name] = {**wanted(0, device(name, "8Gi"), count=len(desired)), "metadata": {"name": name}}
    for name, generation in held.items():
        present[name] = stored(wanted(0, device(name, "1Gi")), generation=generation, count=len(held), name=name)
    writes, deletes = plan_pool(POOL, target, present, {})
    for one in writes:
        present[one["metadata"]["name"]] = one
        assert published(present) in (None, {"8Gi"})
    for one in deletes:
        assert published(present) == {"8Gi"} or not writes
        del present[one["metadata"]["name"]]
    assert present.keys() == target.keys()
    assert published(present) == ({"8Gi"} if target else set())


def test_an_update_keeps_the_existing_metadata() -> None:
    """The update retains the existing slice's name, UID, version and owner."""
    existing = stored(A)
    existing["metadata"]["ownerReferences"] = [{"kind": "Node"}]
    writes, _ = plan_pool(POOL, {"00000": A2}, {"00000": existing}, {})
    assert writes[0]["metadata"] == existing["metadata"]


def test_an_accepted_slice_is_not_sent_again() -> None:
    """The server's version of the slice is accepted until either the desired or the stored slice changes."""
    desired, existing = wanted(0, device("a", extra={"x": 1})), wanted(0, device("a"))
    accepted = {"00000": (canonical(desired["spec"]), canonical(existing["spec"]))}
    assert plan([desired], [stored(existing)], accepted) == ([], [])
    assert plan([wanted(0, device("a", extra={"x": 2}))], [stored(existing)], accepted)[0]
    assert plan([desired], [stored(wanted(0, device("z")))], accepted)[0]


TAINT = {"key": "k", "effect": "NoSchedule"}
ADDED = {**TAINT, "timeAdded": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("desired", "existing", "equal"),
    [
        pytest.param({}, {"taints": [], "bindsToNode": None}, True, id="empty equals absent"),
        pytest.param({"attributes": {}}, {"attributes": {"x": {"bool": False}}}, False, id="false differs from absent"),
        pytest.param({"taints": [TAINT]}, {"taints": [ADDED]}, True, id="time set by the server"),
        pytest.param({"taints": [TAINT]}, {"taints": [{**ADDED, "value": "v"}]}, False, id="different taint"),
        pytest.param({}, {"nodeName": "n"}, False, id="field added by another client"),
    ],
)
def test_equality_of_slices(desired: Document, existing: Document, equal: bool) -> None:
    """Unknown fields in a slice count as a difference. Empty fields and fields that the server sets do not."""
    written = plan([wanted(0, device("a", **desired))], [stored(wanted(0, device("a", **existing)))])
    assert (written == ([], [])) == equal


def test_differences_contain_dropped_fields() -> None:
    """The paths of dropped and changed fields are merged across all devices."""
    sent = wanted(0, device("a"), device("b"))["spec"]
    received = copy.deepcopy(sent)
    for one in received["devices"]:
        del one["allowMultipleAllocations"]
        del one["capacity"]["size"]["requestPolicy"]
    received["devices"][0]["attributes"]["smt"]["bool"] = True
    assert set(differences(canonical(sent), canonical(received))) == {
        "devices[*].allowMultipleAllocations",
        "devices[*].capacity.size.requestPolicy",
        "devices[*].attributes.smt.bool",
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["capacity", "devices", "x"]), inner),
    max_leaves=10,
)


@given(JSON, JSON)
def test_foreign_documents_are_replaced_and_never_fatal(spec: Any, devices: Any) -> None:
    """Whatever another client has written to a slice counts as a difference and never raises an exception."""
    existing = stored(A)
    existing["spec"] |= {"devices": devices, "sharedCounters": spec}
    assert canonical(existing["spec"]) == canonical(A["spec"]) or plan([A], [existing])[0] == [("00000", 1, 1)]
    list(differences(canonical(A["spec"]), canonical(existing["spec"])))


def test_omitted_fields_have_a_reason() -> None:
    """A slice without optional fields has only one variant. A slice with lists and a mapping has four variants, which
    omit nothing, the lists, the mapping, or both lists and mapping.
    """
    assert [len(left_out) for _, left_out in variants([A])] == [0]
    assert variants([]) == [([], ())]
    full = wanted(
        0, device("a", attributes={"l": {"strings": ["x"]}, "s": {"int": 1}}, nodeAllocatableResources={"cpu": {}})
    )
    found = [(one["spec"]["devices"][0], reasons) for (one,), reasons in variants([full])]
    lists, mapping = "ResourceSliceListsRefused", "NodeAllocatableMappingUnsupported"
    assert [reasons for _, reasons in found] == [(), (lists,), (mapping,), (lists, mapping)]
    assert found[3][0] == device("a", attributes={"s": {"int": 1}})


def test_an_unsupported_numa_list_is_omitted_silently() -> None:
    """The NUMA list is not part of the configuration, so the next variant omits the list without a warning."""
    full = wanted(0, device("a", attributes={"n": {"ints": [0, 1]}, "s": {"int": 1}}))
    _, (((without),), reasons) = variants([full])
    assert (without["spec"]["devices"][0], reasons) == (device("a", attributes={"s": {"int": 1}}), ("",))
    assert notes(reasons, []) == {}
    full["spec"]["devices"][0]["attributes"]["p"] = {"strings": ["x"]}
    assert variants([full])[1][1] == ("ResourceSliceListsRefused",)


@pytest.mark.parametrize(
    ("refused", "dropped", "conditions", "reason", "parts"),
    [
        (
            ["ResourceSliceListsRefused"],
            [],
            True,
            "ResourceSliceListsRefused",
            [
                "devices lack attributes that are lists",
                "refuses list attributes",
                "enable the feature gate DRAListTyp",
            ],
        ),
        (
            ["NodeAllocatableMappingUnsupported"],
            [],
            True,
            "NodeAllocatableMappingUnsupported",
            ["claims are not counted", "refuses nodeAllocatable", "or remove publishNodeAllocatableResourceMapping"],
        ),
        (
            [],
            ["a.taints"],
            True,
            "ResourceSliceFieldsDropped",
            [
                "the scheduler does not avoid devices",
                "dropped or changed a.taints",
                "enable DRADeviceTaints in the API",
            ],
        ),
        (
            [],
            ["a.other"],
            True,
            "ResourceSliceFieldsDropped",
            ["published devices are incomplete or wrong", "dropped or changed a.other", "report this message"],
        ),
        (
            [],
            [],
            False,
            "BindingConditionsUnsupported",
            [
                "devices for hugepagesOnDemand are not published",
                "drops bindingConditions",
                "or remove hugepagesOnDemand",
            ],
        ),
    ],
)
def test_event_notes_start_with_the_effect(
    refused: list[str], dropped: list[str], conditions: bool, reason: str, parts: list[str]
) -> None:
    """On a narrow terminal, kubectl shows only the first words of an Event."""
    (text,) = (found := notes(refused, dropped, conditions=conditions)).values()
    assert list(found) == [reason]
    assert text.startswith(parts[0])
    assert sorted(parts, key=text.index) == parts
