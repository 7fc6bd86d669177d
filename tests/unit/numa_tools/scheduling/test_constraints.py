# SPDX-License-Identifier: Apache-2.0
"""Constraints between a claim's devices, while devices are added and removed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_tools.scheduling.claim_spec import Constraint
from numa_tools.scheduling.constraints import ClaimConstraints, Effort
from numa_tools.scheduling.published import SliceDevice, read_slices
from numa_tools.scheduling.reading import ManifestError


def device(**attributes: Any) -> SliceDevice:
    """Returns a device with the given attributes."""
    return SliceDevice("d", "p", "n", {f"d/{name}": value for name, value in attributes.items()}, {}, False)


def holds(constraint: Constraint, chosen: list[tuple[str, SliceDevice]]) -> bool:
    """Returns True if the constraint holds, evaluated over all devices at once."""
    values = [one.values(constraint.attribute) for request, one in chosen if constraint.covers(request)]
    if constraint.distinct:
        return all(values) and sum(map(len, values)) == len(frozenset().union(*values))
    return not values or bool(frozenset.intersection(*values))


_values = st.one_of(st.booleans(), st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=3))
_devices = st.dictionaries(st.sampled_from(["a", "b"]), _values).map(lambda found: device(**found))
_constraints = st.builds(
    Constraint,
    st.frozensets(st.sampled_from(["r", "s/one"]), max_size=2),
    st.sampled_from(["d/a", "d/b"]),
    st.booleans(),
)
_moves = st.lists(st.one_of(st.none(), st.tuples(st.sampled_from(["r", "s/one", "s/two"]), _devices)), max_size=12)


@given(st.lists(_constraints, max_size=3), _moves)
def test_a_device_is_added_if_all_constraints_hold_with_it(
    constraints: list[Constraint], moves: list[tuple[str, SliceDevice] | None]
) -> None:
    """The result does not depend on devices that were added and removed earlier. Each generated move adds a device or,
    if it is None, removes the last one.
    """
    agreement, chosen = ClaimConstraints(constraints, Effort()), list[tuple[str, SliceDevice]]()
    for move in moves:
        if move is None:
            if chosen:
                agreement.remove(*chosen.pop())
            continue
        expected = all(holds(constraint, [*chosen, move]) for constraint in constraints)
        assert agreement.add(*move) is expected
        chosen += [move] if expected else []


def test_comparisons_are_counted() -> None:
    """The count limits the cost of a search. Long lists cost more, and attributes without a constraint cost nothing."""
    effort = Effort()
    agreement = ClaimConstraints(
        [Constraint(frozenset({"r"}), "d/a", False), Constraint(frozenset(), "d/b", True)], effort
    )
    assert agreement.add("r", device(a=list(range(64)), b=1))
    assert effort.spent == 10
    assert agreement.add("s", device(b=2))
    assert effort.spent == 11


@pytest.mark.parametrize("value", [{"map": {}}, {"list": [[1]]}, {"int": None}, {"int": 1, "bool": True}, {}, "x"])
def test_an_attribute_has_one_value_or_a_list(value: Any) -> None:
    """Any other value is rejected when it is read, and the error gives its location."""
    one = {"name": "n", "attributes": {"a": value}}
    slices = [{"metadata": {"name": "s"}, "spec": {"driver": "d", "pool": {"name": "p"}, "devices": [one]}}]
    with pytest.raises(ManifestError, match=r"ResourceSlice s: devices\[0\]: attributes.a: must have exactly one"):
        read_slices(slices)
