# SPDX-License-Identifier: Apache-2.0
"""The transition table for a container's lifecycle: every event has an entry, and no event frees CPUs too early."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.containers.lifecycle import (
    ENDED,
    MAY_RUN,
    NOT_ALIVE,
    OCCUPYING,
    PENDING,
    TRANSITIONS,
    Event,
    Phase,
    _row,
)

RUNTIME_EVENTS = [
    Event.CREATE,
    Event.START,
    Event.STOP,
    Event.REMOVE,
    Event.LIST_CREATED,
    Event.LIST_RUNNING,
    Event.UNLISTED,
]
KERNEL_SHOWS_NO_PROCESS = {Event.EMPTY, Event.CGROUP_GONE, Event.START_REJECTED}
"""Events after which the container has no process. START_REJECTED is one of them, because it is raised after
``cgroup.kill`` has been written to and before the process has run.
"""


def test_phases_and_events_are_hashed_in_c() -> None:
    """Phases are looked up tens of thousands of times for each pool change, which would be slow with hash methods
    written in Python.
    """
    assert {type(one).__hash__ for one in (*Phase, *Event)} == {object.__hash__}


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, Event)))
def test_every_phase_has_an_entry_for_every_event(phase: Phase, event: Event) -> None:
    assert TRANSITIONS[phase][event] in Phase


def test_the_table_contains_only_phases_and_events() -> None:
    assert set(TRANSITIONS) == set(Phase)
    assert all(set(row) == set(Event) for row in TRANSITIONS.values())


def test_an_unknown_event_in_the_table_is_an_error_at_import() -> None:
    with pytest.raises(KeyError):
        _row(Phase.RUNNING, stopped=Phase.STOPPED)


def test_every_phase_is_in_exactly_one_group() -> None:
    """The groups are pending, running, ending and over. VANISHED belongs to the last group, but the backend still
    asks the kernel whether the container has a process.
    """
    groups = [PENDING, MAY_RUN, OCCUPYING - MAY_RUN, NOT_ALIVE]
    assert sum(map(len, groups)) == len(Phase)
    assert frozenset().union(*groups) == set(Phase)
    assert {Phase.VANISHED} == ENDED & NOT_ALIVE


@pytest.mark.parametrize(("phase", "event"), list(product(sorted(OCCUPYING, key=lambda one: one.name), Event)))
def test_a_container_occupies_its_cpus_until_the_kernel_shows_that_it_exited(phase: Phase, event: Event) -> None:
    """A start that returns the container to STARTING is an exception, because the new process has not run yet."""
    after = TRANSITIONS[phase][event]
    assert after in OCCUPYING or event in KERNEL_SHOWS_NO_PROCESS or (after, event) == (Phase.STARTING, Event.START)


@given(st.lists(st.sampled_from(Event), max_size=12))
def test_a_removed_container_whose_cgroup_is_empty_is_always_forgotten(events: list[Event]) -> None:
    phase = Phase.ABSENT
    for event in (*events, Event.REMOVE, Event.EMPTY):
        phase = TRANSITIONS[phase][event]
    assert phase is Phase.ABSENT


@given(st.lists(st.sampled_from(Event), max_size=12), st.sampled_from(RUNTIME_EVENTS))
def test_a_repeated_runtime_event_does_not_change_the_phase(events: list[Event], event: Event) -> None:
    phase = Phase.ABSENT
    for one in (*events, event):
        phase = TRANSITIONS[phase][one]
    assert TRANSITIONS[phase][event] is phase


@pytest.mark.parametrize(
    ("events", "phases"),
    [
        pytest.param("CREATE START APPLIED STOP EMPTY", "CREATED STARTING RUNNING ENDING STOPPED", id="full lifecycle"),
        pytest.param("CREATE STOP REMOVE", "CREATED STOPPED ABSENT", id="never started"),
        pytest.param("CREATE START START_REJECTED", "CREATED STARTING ABSENT", id="rejected start"),
        pytest.param("LIST_RUNNING REMOVE EMPTY", "RUNNING LINGERING ABSENT", id="removed before it ended"),
        pytest.param("LIST_CREATED START APPLIED", "LISTED STARTING RUNNING", id="listed before its start"),
        pytest.param("LIST_RUNNING CGROUP_GONE STOP POPULATED", "RUNNING VANISHED VANISHED RUNNING", id="hidden"),
        pytest.param("LIST_RUNNING KILLED UNLISTED EMPTY", "RUNNING ENDING LINGERING ABSENT", id="killed"),
    ],
)
def test_events_lead_through_the_expected_phases(events: str, phases: str) -> None:
    phase, seen = Phase.ABSENT, []
    for event in events.split():
        phase = TRANSITIONS[phase][Event[event]]
        seen.append(phase.name)
    assert seen == phases.split()
