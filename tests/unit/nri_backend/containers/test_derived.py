# SPDX-License-Identifier: Apache-2.0
"""Values derived from the state are recomputed after each state change, and only then."""

from nri_backend.containers.audit_scope import AuditScope
from nri_backend.containers.container import Tracked, tracked_as
from nri_backend.containers.derived import Derived
from nri_backend.containers.state import NodeState
from nri_backend.problems import Problem
from numa_contract.backend_codes import BackendCode

from tests.rigs.builders import cpu_record, files_of
from tests.rigs.containers import config, container, pod


def tracked(id_: str) -> Tracked:
    """Returns a container without claims."""
    return tracked_as(pod(), container(id_))


def test_a_derived_value_is_recomputed_after_each_state_change() -> None:
    state = NodeState(config())
    ids = Derived(state, lambda: [one.id for one in state])
    assert ids.value == []
    assert ids.value is ids.value
    state.put(tracked("a"))
    assert ids.value == ["a"]
    state.replace_containers([tracked("b")])
    assert ids.value == ["b"]
    state.drop("b")
    assert ids.value == []
    held = Derived(state, lambda: state.pool.held)
    assert held.value == set()
    state.set_claim_files(files_of(cpu_record("c1", "r=2-3")))
    assert held.value == {2, 3}


def test_container_problems_follow_the_state_and_are_computed_once() -> None:
    """Each report to the frontend contains the problems, and each comparison with the previous report uses them."""
    state = NodeState(config())
    scope = AuditScope(state)
    state.put(tracked("a"))
    assert not scope.problems.value
    state.put(tracked("a").with_observation(failure=Problem("the kernel refuses", BackendCode.INTERNAL_ERROR)))
    (problem,) = problems = scope.problems.value
    assert "the kernel refuses" in problem
    assert scope.problems.value is problems
    state.drop("a")
    assert not scope.problems.value
