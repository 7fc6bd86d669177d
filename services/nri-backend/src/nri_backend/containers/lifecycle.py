# SPDX-License-Identifier: Apache-2.0
"""A container's lifecycle as a table of phases, events and transitions.

Two sources report on a container, and neither is complete. The runtime calls hooks, but its events are lost while no
instance is connected, and it may forget a container before the container's last process has exited. The kernel shows
whether a process exists and where it may run, but not which container a cgroup belongs to, and it shows nothing while a
mount hides the cgroup tree. The phase combines both sources into the state that enforcement has to assume.

    ABSENT ──CREATE──> CREATED ──START──> STARTING ──APPLIED──> RUNNING ──STOP──> ENDING ──EMPTY──> STOPPED
                                                                   │                 │                 │
                                                              UNLISTED, REMOVE    REMOVE            REMOVE
                                                                   └──> LINGERING <──┘                 │
                                                                            └────────EMPTY──────────> ABSENT

One rule determines most entries: **a container keeps its CPUs until the kernel shows that its last process has
exited.** When the runtime reports that a container has exited, one of its processes may still be running. So STOP leads
to ENDING and REMOVE to LINGERING, and only EMPTY, which the kernel reports, leads to a phase without CPUs. A container
that has never run (CREATED) has no process to wait for.

Every (phase, event) pair has an entry, because events can repeat and arrive out of order: StopContainer may come twice
or for a container that never started, an audit may find that a cgroup is gone while the hook that reports the
container's exit is still running, and a snapshot from the runtime may contradict all of these. An entry that leads to
its own phase means that the event has no effect in that phase.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


class _HashedByIdentity(Enum):
    """An enumeration whose members are hashed by identity, in C.

    Phases and events are looked up tens of thousands of times when a full node's pool changes. ``Enum`` itself is
    slower, since it hashes a member's name in Python.
    """

    __hash__ = object.__hash__


class Phase(_HashedByIdentity):
    """The state that enforcement assumes a container's processes to be in."""

    ABSENT = auto()
    """Not tracked: the container was never seen, has been forgotten, or was rejected by a hook."""
    CREATED = auto()
    """CreateContainer was answered. None of the container's processes has run, and none will before StartContainer."""
    STARTING = auto()
    """The start hook is running: the container's cgroup exists and is being set up, and its process is waiting for the
    hook's answer.
    """
    LISTED = auto()
    """The runtime listed the container as created when this instance connected. It may start at any time without an
    event, so it is treated as running. If its cgroup has never been seen, the absence of the cgroup does not mean that
    the container has exited.
    """
    RUNNING = auto()
    """The container's process may run."""
    ENDING = auto()
    """The runtime has reported that the container has exited, or its processes have been killed; one of them may still
    exist.
    """
    LINGERING = auto()
    """Like ENDING, but the runtime no longer knows the container, so no event will report its removal."""
    VANISHED = auto()
    """The container's cgroup is gone, so the container has no process. The runtime has not reported that it has exited,
    and the cgroup may reappear if it was only hidden by a mount.
    """
    STOPPED = auto()
    """The container has exited and has no processes left. The runtime still lists it."""


class Event(_HashedByIdentity):
    """A lifecycle event of a container, reported by the runtime (the first seven), by the hooks, or by the kernel."""

    CREATE = auto()
    """CreateContainer was answered."""
    START = auto()
    """StartContainer was called."""
    STOP = auto()
    """StopContainer was called: the runtime has noticed that the container has exited."""
    REMOVE = auto()
    """RemoveContainer was called, or the sandbox of the container's pod was removed."""
    LIST_CREATED = auto()
    """Synchronize lists the container as created."""
    LIST_RUNNING = auto()
    """Synchronize lists the container as running or paused, or in a state that is unknown to this release."""
    UNLISTED = auto()
    """Synchronize does not list the container, or lists it as stopped."""
    APPLIED = auto()
    """The container's cgroup was set up, so its process may run. Also used if it is unknown whether the process is
    running.
    """
    CREATE_REJECTED = auto()
    """CreateContainer was answered with a rejection."""
    START_REJECTED = auto()
    """StartContainer was answered with a rejection, and the container's processes were killed."""
    KILLED = auto()
    """The container's processes were killed: SIGKILL was sent to all of them (``cgroup.kill``)."""
    EMPTY = auto()
    """The container's cgroup contains no process, or does not exist."""
    POPULATED = auto()
    """The container's cgroup contains a process, or the kernel does not show whether it does."""
    CGROUP_GONE = auto()
    """The container's cgroup existed and no longer exists."""


def _row(phase: Phase, **changes: Phase) -> Mapping[Event, Phase]:
    """Returns a row of the table. Events that are not in ``changes`` leave the phase unchanged."""
    return dict.fromkeys(Event, phase) | {Event[name.upper()]: after for name, after in changes.items()}


# Next phases after the events from Synchronize; most rows of the table use these.
_LISTING: Final = {"list_created": Phase.LISTED, "list_running": Phase.RUNNING}

TRANSITIONS: Final[Mapping[Phase, Mapping[Event, Phase]]] = {
    # StartContainer may be called for a container whose CreateContainer call no instance has seen.
    Phase.ABSENT: _row(Phase.ABSENT, create=Phase.CREATED, start=Phase.STARTING, applied=Phase.RUNNING, **_LISTING),
    Phase.CREATED: _row(
        Phase.CREATED,
        start=Phase.STARTING,
        applied=Phase.RUNNING,
        stop=Phase.STOPPED,
        remove=Phase.ABSENT,
        unlisted=Phase.ABSENT,
        create_rejected=Phase.ABSENT,
        start_rejected=Phase.ABSENT,
        **_LISTING,
    ),
    # If the hook is cancelled, it is unknown whether the process is running: APPLIED then means that it may be.
    Phase.STARTING: _row(
        Phase.STARTING,
        applied=Phase.RUNNING,
        stop=Phase.ENDING,
        remove=Phase.LINGERING,
        unlisted=Phase.LINGERING,
        start_rejected=Phase.ABSENT,
        **_LISTING,
    ),
    # The StartContainer call shows that the container's process has not run yet.
    Phase.LISTED: _row(
        Phase.LISTED,
        start=Phase.STARTING,
        applied=Phase.RUNNING,
        stop=Phase.ENDING,
        remove=Phase.LINGERING,
        unlisted=Phase.LINGERING,
        start_rejected=Phase.ABSENT,
        killed=Phase.ENDING,
        cgroup_gone=Phase.VANISHED,
        list_running=Phase.RUNNING,
    ),
    Phase.RUNNING: _row(
        Phase.RUNNING,
        start=Phase.STARTING,
        stop=Phase.ENDING,
        remove=Phase.LINGERING,
        unlisted=Phase.LINGERING,
        start_rejected=Phase.ABSENT,
        killed=Phase.ENDING,
        cgroup_gone=Phase.VANISHED,
        list_created=Phase.LISTED,
    ),
    Phase.ENDING: _row(
        Phase.ENDING,
        start=Phase.STARTING,
        applied=Phase.RUNNING,
        remove=Phase.LINGERING,
        unlisted=Phase.LINGERING,
        start_rejected=Phase.ABSENT,
        empty=Phase.STOPPED,
        **_LISTING,
    ),
    Phase.LINGERING: _row(
        Phase.LINGERING,
        start=Phase.STARTING,
        applied=Phase.RUNNING,
        start_rejected=Phase.ABSENT,
        empty=Phase.ABSENT,
        **_LISTING,
    ),
    Phase.VANISHED: _row(
        Phase.VANISHED,
        start=Phase.STARTING,
        applied=Phase.RUNNING,
        remove=Phase.ABSENT,
        unlisted=Phase.ABSENT,
        start_rejected=Phase.ABSENT,
        populated=Phase.RUNNING,
        **_LISTING,
    ),
    Phase.STOPPED: _row(
        Phase.STOPPED,
        start=Phase.STARTING,
        applied=Phase.RUNNING,
        remove=Phase.ABSENT,
        unlisted=Phase.ABSENT,
        start_rejected=Phase.ABSENT,
        **_LISTING,
    ),
}

PENDING: Final = frozenset({Phase.CREATED, Phase.STARTING})
"""Phases in which the container's process has not run yet."""
MAY_RUN: Final = frozenset({Phase.LISTED, Phase.RUNNING})
"""Phases in which the container's cgroup is kept in sync with its entitlement, as a partition if possible."""
OCCUPYING: Final = MAY_RUN | {Phase.ENDING, Phase.LINGERING}
"""Phases in which a process of the container may run on its CPUs: no claim container may start on these CPUs."""
ENDED: Final = frozenset({Phase.ENDING, Phase.LINGERING, Phase.VANISHED})
"""Phases in which Reconciler.reap() asks the kernel whether the container still has a process."""
NOT_ALIVE: Final = frozenset({Phase.ABSENT, Phase.VANISHED, Phase.STOPPED})
"""Phases in which the container has no process, and will not get one without another event."""
ALIVE: Final = frozenset(Phase) - NOT_ALIVE
"""Phases in which the container has, or may still get, a running process."""
