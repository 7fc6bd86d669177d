# SPDX-License-Identifier: Apache-2.0
import copy
from typing import Any

import pytest
from dra_frontend.publishing.compare import canonical, differences
from dra_frontend.publishing.plan import Adoption, Delete, PoolPlan, plan_pools

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


def wanted(*devices: Document, pool: str = POOL, **spec: Any) -> Document:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"labels": {"a": "b"}},
        "spec": {
            "driver": "dra.memory",
            "nodeName": "node-a",
            "pool": {"name": pool},
            "devices": list(devices),
            **spec,
        },
    }


def stored(document: Document, index: int = 0, *, generation: int = 1, count: int = 1, name: str = "") -> Document:
    """The document as it comes back from the server."""
    document = copy.deepcopy(document)
    name = name or f"{index:05x}-dra.memory-node-a-x{index}z"
    document["metadata"] |= {"name": name, "uid": f"uid-{name}", "resourceVersion": "7"}
    document["spec"]["pool"] |= {"generation": generation, "resourceSliceCount": count}
    return document


def only(plans: tuple[PoolPlan, ...]) -> PoolPlan:
    (plan,) = plans
    return plan


def headers(plan: PoolPlan) -> set[tuple[int, int]]:
    pools = [write.document["spec"]["pool"] for write in plan.writes]
    return {(pool["generation"], pool["resourceSliceCount"]) for pool in pools}


def test_first_publication_has_generation_one_and_ordered_names() -> None:
    """A new pool starts at generation 1, counts its slices, and its names sort in our order of preference."""
    plan = only(plan_pools([], {POOL: [wanted(device("b")), wanted(device("a"))]}))
    assert headers(plan) == {(1, 2)}
    assert not plan.deletes
    assert not plan.updates
    assert [create.document["metadata"] for create in plan.creates] == [
        {"labels": {"a": "b"}, "generateName": "00000-dra.memory-node-a-"},
        {"labels": {"a": "b"}, "generateName": "00001-dra.memory-node-a-"},
    ]


def test_trap_5_1_same_machine_writes_nothing() -> None:
    """A restart that wants what is there writes nothing and keeps the generation."""
    pair = [wanted(device("a")), wanted(device("b"))]
    existing = [stored(one, index, generation=5, count=2) for index, one in enumerate(pair)]
    assert plan_pools(existing, {POOL: pair}) == ()


def test_trap_5_2_device_order_is_part_of_the_wish() -> None:
    """The scheduler takes devices in order, so another order is a change, not noise."""
    existing = [stored(wanted(device("a"), device("b")))]
    plan = only(plan_pools(existing, {POOL: [wanted(device("b"), device("a"))]}))
    assert [update.index for update in plan.updates] == [0]


def test_trap_5_3_quantities_are_compared_by_value() -> None:
    """The server may spell a quantity in another way; nil and empty are the same too."""
    existing = stored(wanted(device("a", "8Gi", taints=[])))
    capacity = existing["spec"]["devices"][0]["capacity"]["size"]
    capacity["value"] = "8192Mi"
    capacity["requestPolicy"]["default"] = "1024Ki"
    capacity["requestPolicy"]["validRange"]["max"] = 8589934592
    existing["spec"]["sharedCounters"] = None
    assert plan_pools([existing], {POOL: [wanted(device("a", "8Gi"))]}) == ()


def test_false_is_a_value() -> None:
    """Only empty means absent: an attribute that is false differs from one that is missing."""
    other = device("a")
    del other["attributes"]["smt"]
    plan = only(plan_pools([stored(wanted(device("a")))], {POOL: [wanted(other)]}))
    assert len(plan.updates) == 1


def test_trap_5_4_adopted_answer_is_not_sent_again() -> None:
    """What the server made of our wish is taken as the wish, until we want something else."""
    wish = wanted(device("a", extra={"x": 1}))
    existing = stored(wanted(device("a")))
    adopted = {(POOL, 0): Adoption(canonical(wish["spec"]), canonical(existing["spec"]))}
    assert plan_pools([existing], {POOL: [wish]}, adopted) == ()
    assert plan_pools([existing], {POOL: [wanted(device("a", extra={"x": 2}))]}, adopted) != ()
    assert plan_pools([stored(wanted(device("z")))], {POOL: [wish]}, adopted) != ()


@pytest.mark.parametrize(
    ("kept", "generation"),
    [pytest.param(2, 5, id="one-of-three-changes"), pytest.param(1, 6, id="two-of-three-change")],
)
def test_generation_is_raised_only_for_more_than_one_change(kept: int, generation: int) -> None:
    """One change in place keeps the generation and touches one slice; more raise it and rewrite the whole pool."""
    before = [wanted(device(name)) for name in "abc"]
    after = before[:kept] + [wanted(device(name, "4Gi")) for name in "abc"[kept:]]
    existing = [stored(one, index, generation=5, count=3) for index, one in enumerate(before)]
    plan = only(plan_pools(existing, {POOL: after}))
    assert headers(plan) == {(generation, 3)}
    assert [update.index for update in plan.updates] == ([2] if generation == 5 else [0, 1, 2])


def test_create_raises_the_generation_of_all() -> None:
    """A new slice means a new generation, else consumers count too many slices of the old one."""
    pair = [wanted(device("a")), wanted(device("b"))]
    plan = only(plan_pools([stored(pair[0], 0, generation=3)], {POOL: pair}))
    assert headers(plan) == {(4, 2)}
    assert ([one.index for one in plan.updates], [one.index for one in plan.creates]) == ([0], [1])


def test_trap_5_8_count_follows_a_deletion() -> None:
    """A slice too many is deleted in place, and the count of those that stay is mended: a wrong one hides the pool."""
    existing = [stored(wanted(device(name)), index, generation=2, count=2) for index, name in enumerate("ab")]
    plan = only(plan_pools(existing, {POOL: [wanted(device("a"))]}))
    assert plan.deletes == (Delete(existing[1]["metadata"]["name"], existing[1]["metadata"]["uid"], "7"),)
    assert headers(plan) == {(2, 1)}


def test_half_written_generation_is_finished() -> None:
    """Slices left behind at an older generation are obsolete for consumers: they count as changed."""
    pair = [wanted(device("a")), wanted(device("b"))]
    existing = [stored(pair[0], 0, generation=4, count=2), stored(pair[1], 1, generation=3, count=2)]
    plan = only(plan_pools(existing, {POOL: pair}))
    assert [update.index for update in plan.updates] == [1]
    assert headers(plan) == {(4, 2)}


def test_own_generation_wins_when_higher() -> None:
    """A generation that the driver brings is used when it is ahead of the server's."""
    wish = wanted(device("a"))
    wish["spec"]["pool"]["generation"] = 9
    assert headers(only(plan_pools([stored(wanted(device("a")))], {POOL: [wish]}))) == {(9, 1)}


def test_pool_that_is_not_desired_is_deleted() -> None:
    """Everything of this driver and node whose pool is unknown goes; other pools are left alone."""
    old = stored(wanted(device("a"), pool="old"))
    mine = wanted(device("b"))
    plan = only(plan_pools([old, stored(mine)], {POOL: [mine]}))
    assert plan == PoolPlan("old", (Delete(old["metadata"]["name"], old["metadata"]["uid"], "7"),))


def test_update_keeps_the_existing_metadata() -> None:
    """An update carries name, uid, version and owner of what is there, and no generateName."""
    existing = stored(wanted(device("a")))
    existing["metadata"]["ownerReferences"] = [{"kind": "Node"}]
    plan = only(plan_pools([existing], {POOL: [wanted(device("a", "4Gi"))]}))
    assert plan.updates[0].document["metadata"] == existing["metadata"]


def test_racing_duplicates_leave_the_same_survivor() -> None:
    """Two instances that both created a slice agree on which one goes, whatever order the list has."""
    wish = wanted(device("a"))
    twins = [stored(wish, name=f"00000-dra.memory-node-a-{end}") for end in ("zz", "aa")]
    for existing in (twins, twins[::-1]):
        plan = only(plan_pools(existing, {POOL: [wish]}))
        assert [one.name for one in plan.deletes] == ["00000-dra.memory-node-a-zz"]
        assert not plan.writes


def test_names_without_an_index_match_by_devices() -> None:
    """Slices of a helper before 1.36 are adopted by their device names instead of being made anew."""
    pair = [wanted(device("a")), wanted(device("b"))]
    names = ["node-a-dra.memory-q1", "node-a-dra.memory-q2"]
    existing = [stored(one, count=2, name=name) for one, name in zip(pair[::-1], names, strict=True)]
    assert plan_pools(existing, {POOL: pair}) == ()


def test_single_slices_always_match() -> None:
    """One existing and one desired slice belong together whatever they are called and hold."""
    existing = stored(wanted(device("a")), name="node-a-dra.memory-q1")
    plan = only(plan_pools([existing], {POOL: [wanted(device("z"))]}))
    assert [update.document["metadata"]["name"] for update in plan.updates] == ["node-a-dra.memory-q1"]


def test_hexadecimal_node_name_is_no_index() -> None:
    """A name such as abcdef-dra.memory... of a node called abcdef is not mistaken for an index that we gave."""
    existing = [stored(wanted(device("a")), name="abcdef-node-dra.memory-x")]
    pair = [wanted(device("a")), wanted(device("b"))]
    plan = only(plan_pools(existing, {POOL: pair}))
    assert not plan.deletes


def test_trap_5_13_pool_without_devices_is_published() -> None:
    """A pool that exists but is empty has one slice without devices."""
    assert only(plan_pools([], {POOL: [wanted()]})).creates[0].document["spec"]["devices"] == []
    assert plan_pools([stored(wanted())], {POOL: [wanted()]}) == ()


def taint(added: str | None) -> Document:
    times = {} if added is None else {"timeAdded": added}
    return wanted(device("a", taints=[{"key": "k", "effect": "NoSchedule", **times}]))


@pytest.mark.parametrize(
    ("ours", "same"),
    [(None, True), ("2026-01-01T00:00:00.9Z", True), ("2026-01-01T00:00:01Z", True), ("2026-01-01T00:00:02Z", False)],
)
def test_trap_5_14_taint_times_settle(ours: str | None, same: bool) -> None:
    """timeAdded is filled in and cut to seconds by the server: unset or within a second is no difference."""
    existing = stored(taint("2026-01-01T00:00:00Z"))
    assert (plan_pools([existing], {POOL: [taint(ours)]}) == ()) is same


def test_rewritten_taint_keeps_its_time() -> None:
    """When another field changes, the time that the server has is sent again, not a new one."""
    existing = stored(taint("2026-01-01T00:00:00Z"))
    wish = taint(None)
    wish["spec"]["devices"][0]["capacity"] = {}
    sent = only(plan_pools([existing], {POOL: [wish]})).updates[0].document["spec"]["devices"][0]
    assert sent["taints"][0]["timeAdded"] == "2026-01-01T00:00:00Z"


def test_differences_name_what_was_dropped_once() -> None:
    """Paths of dropped and of changed fields are folded over devices, and spelling is no difference."""
    sent = wanted(device("a"), device("b"))["spec"]
    received = copy.deepcopy(sent)
    for one in received["devices"]:
        del one["allowMultipleAllocations"]
        one["capacity"]["size"] = {"value": "8192Mi"}
    received["devices"][0]["attributes"]["smt"]["bool"] = True
    assert set(differences(sent, received)) == {
        "devices[*].allowMultipleAllocations",
        "devices[*].capacity.size.requestPolicy",
        "devices[*].attributes.smt.bool",
    }


def test_counters_and_multipliers_are_quantities_too() -> None:
    """Shared counters, their consumption and node-allocatable multipliers are compared by value."""

    def spec(amount: str) -> Document:
        counters = [{"name": "c", "counters": {"memory": {"value": amount}}}]
        mapping = {"memory": {"capacityKey": "size", "allocationMultiplier": amount}}
        mine = device(
            "a",
            consumesCounters=[{"counterSet": "c", "counters": {"memory": {"value": amount}}}],
            nodeAllocatableResourceMappings=mapping,
        )
        return canonical({"sharedCounters": counters, "devices": [mine]})

    assert spec("1Gi") == spec("1024Mi")
    assert spec("1Gi") != spec("1G")


def test_foreign_nonsense_is_replaced_not_fatal() -> None:
    """A quantity that cannot be read is a difference, never an exception."""
    existing = stored(wanted(device("a")))
    existing["spec"]["devices"][0]["capacity"]["size"]["value"] = "8K"
    assert len(only(plan_pools([existing], {POOL: [wanted(device("a"))]})).updates) == 1
