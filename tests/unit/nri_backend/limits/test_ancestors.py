# SPDX-License-Identifier: Apache-2.0
"""What the cgroups above containers must pass on."""

from hypothesis import given
from hypothesis import strategies as st
from nri_backend.claims.memory import Protected
from nri_backend.limits.ancestors import ancestors, protections
from nri_backend.limits.limit import Raise

MIN, LOW = "memory.min", "memory.low"
shares = st.dictionaries(
    st.tuples(st.sampled_from([MIN, LOW]), st.sampled_from("ab"), st.sampled_from("xy")), st.just(7), max_size=4
)
paths = st.tuples(st.sampled_from(["g", "b"]), st.sampled_from(["p1", "p2"]), st.sampled_from(["c1", "c2"]))


def test_every_cgroup_but_the_root_is_above() -> None:
    """Zero anywhere above means no protection; a nested root of the kubelet's is above as well."""
    assert ancestors("kubelet/kubepods/pod1/c1") == ("kubelet/kubepods/pod1", "kubelet/kubepods", "kubelet")
    assert ancestors("") == ancestors("top") == ()


def test_sums_go_up_to_the_top() -> None:
    """Each ancestor has the sum of those below it; a claim that two containers share counts once."""
    found = protections(
        [
            ("k/b/p1/c1", {(MIN, "m1", "x"): 5, (LOW, "m2", "x"): 3}),
            ("k/b/p1/c2", {(MIN, "m1", "x"): 5}),
            ("k/g2/c3", {(MIN, "m3", "x"): 2}),
            ("k/p4/c4", {}),
        ]
    )
    below = {MIN: Raise(plus=5, needed=True), LOW: Raise(plus=3, needed=True)}
    assert found == {
        "k/b/p1": below,
        "k/b": below,
        "k/g2": {MIN: Raise(plus=2, needed=True)},
        "k": {MIN: Raise(plus=7, needed=True), LOW: Raise(plus=3, needed=True)},
    }


@given(st.dictionaries(paths, shares, max_size=8))
def test_no_ancestor_has_less_than_any_of_its_children(below: dict[tuple[str, str, str], dict[Protected, int]]) -> None:
    """Else the child's protection would be cut."""
    found = protections(("/".join(("k", *path)), protected) for path, protected in below.items())
    for path, raises in found.items():
        for above in ancestors(path):
            for file, raised in raises.items():
                assert found[above][file].plus >= raised.plus
