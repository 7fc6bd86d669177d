# SPDX-License-Identifier: Apache-2.0
"""Decides which CPUs interrupts and host daemons must vacate, runs an evictor for each, and reports the evictors'
state."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from numa_contract.backend_codes import BackendCode

from nri_backend.containers.lifecycle import OCCUPYING
from nri_backend.containers.state import NodeState
from nri_backend.host_isolation.evictor import AffinityClass, DesiredIsolation, Evictor, evict
from nri_backend.host_isolation.interrupts import IRQBALANCE, Interrupts
from nri_backend.host_isolation.irqbalance import Irqbalance
from nri_backend.host_isolation.originals import OriginalsFile
from nri_backend.host_isolation.plan import Cpus
from nri_backend.host_isolation.slices import HostSlices
from nri_backend.node.cgroups import CgroupTree
from nri_backend.problems import Problem
from nri_backend.settings import Settings

INTERRUPT_SECONDS: Final = 30.0
"""Interval between passes over the interrupts, in seconds."""
SLICE_SECONDS: Final = 5.0
"""Interval between passes over the slices, in seconds. The interval is short because a daemon-reload gives host daemons
all CPUs again.
"""
_CONTESTED: Final = Problem(
    "another process keeps moving interrupts back to claimed CPUs: if it is irqbalance, set "
    "IRQBALANCE_BANNED_CPULIST in its environment file, or stop it",
    BackendCode.INTERRUPTS_MOVED_BACK,
)
_CONFINED: Final = Problem(
    "host daemons stay on claimed CPUs: claims hold all CPUs that the daemons' slice allows (AllowedCPUs=); allow more "
    "CPUs, or reserve some",
    BackendCode.HOST_DAEMONS_STAY,
)
_READ_ONLY_IRQS: Final = "interrupts are not moved off claimed CPUs: {} cannot be written"
_READ_ONLY_WORKQUEUES: Final = "unbound kernel workers stay on claimed CPUs: {} cannot be written"
_log = logging.getLogger(__name__)


def cpus_without_interrupts(state: NodeState) -> Cpus:
    """Returns the online claimed CPUs of running containers, except the CPUs of requests with ``irqs: keep``."""
    running = [one.entitlement for one in state if one.phase in OCCUPYING and one.entitlement.cpus]
    claimed = frozenset[int]().union(*(held.cpus for held in running))
    return (claimed - frozenset().union(*(held.interrupt_cpus for held in running))) & state.host.online


def cpus_without_host_daemons(state: NodeState) -> Cpus:
    """Returns the online CPUs that the shared pool excludes because of claims."""
    return state.pool.held & state.host.online


class HostIsolation:
    """The evictors for interrupts and for host daemons.

    They act only while this instance is active and after the runtime has sent its list of containers: a standby, or an
    instance that has just started, does not know which claims are in use.
    """

    def __init__(self, state: NodeState, active: Callable[[], bool], tree: CgroupTree, settings: Settings) -> None:
        """Creates evictors that have not run yet.

        ``active`` returns False as soon as another instance may be active. It is called on the event loop and in
        threads.
        """
        self._state = state
        self._active = active
        # Observed passes record their writes instead of making them.
        may_write = (lambda: True) if tree.observes else active
        kernel, host, files = settings.kernel_root, settings.host_root, tree.files
        interrupts = Interrupts(kernel, Irqbalance(kernel, host, files), files)
        self._interrupts_writable = bool(settings.kernel_root) and interrupts.writable
        self._interrupts = Evictor(
            AffinityClass(
                interrupts,
                OriginalsFile(f"{settings.backend_dir}/interrupts.json", read_only=tree.observes),
                "interrupts",
                INTERRUPT_SECONDS,
                may_relocate=True,
                not_moved=BackendCode.INTERRUPTS_NOT_MOVED,
                delayed=frozenset({IRQBALANCE}),
                contested=_CONTESTED,
                may_write=may_write,
            ),
            self._desired_for_interrupts,
        )
        self._slices = Evictor(
            AffinityClass(
                HostSlices(tree, settings.host_root),
                OriginalsFile(f"{settings.backend_dir}/host-slices.json", read_only=tree.observes),
                "host daemons",
                SLICE_SECONDS,
                may_relocate=False,
                not_moved=BackendCode.HOST_DAEMONS_NOT_MOVED,
                remaining=_CONFINED,
                may_write=may_write,
            ),
            self._desired_for_slices,
        )
        self._mount_problems: tuple[Problem, ...] = ()
        """Problems with directories that were not mounted read-write at startup."""
        if settings.kernel_root and not self._interrupts_writable:
            text = _READ_ONLY_IRQS.format(f"{settings.kernel_root.rstrip('/')}/proc/irq")
            self._mount_problems += (Problem(text, BackendCode.INTERRUPTS_NOT_MOVED),)
        if settings.kernel_root and (path := interrupts.unwritable_workqueues):
            self._mount_problems += (Problem(_READ_ONLY_WORKQUEUES.format(path), BackendCode.KERNEL_WORKERS_STAY),)
        for problem in self._mount_problems:
            _log.warning(problem)
        if settings.kernel_root and not interrupts.irqbalance_mounted:
            text = "run/irqbalance is not mounted, so irqbalance may move interrupts back to claimed CPUs"
            _log.warning(text, extra={"root": settings.kernel_root})

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems to report to the operator, one sentence each."""
        mount_problems = self._mount_problems if self._state.config.irqs == "move" else ()
        return mount_problems + self._interrupts.problems + self._slices.problems

    def gauges(self) -> dict[str, float]:
        """Returns the current values of this package's metrics."""
        result = self._interrupts.result
        return {"moved_interrupts": sum(map(str.isdecimal, result.moved)), "immovable_interrupts": result.remaining}

    def wake(self) -> None:
        """Requests a check after the node's state has changed, or after this instance has become active."""
        self._interrupts.wake()
        self._slices.wake()

    def observed_passes(self) -> list[tuple[str, Callable[[], object]]]:
        """Returns the passes to run with ``enforcement: observe``: one per affinity class, each with the reason to
        report for its changes.

        A pass blocks, and its changes are recorded in ``tree.files``. It may raise OSError or ValueError.
        """
        interrupts = self._desired_for_interrupts(observing=True)
        return [
            (f"{noun} leave claimed CPUs ({key} in driverConfig)", partial(evict, one, desired, frozenset()))
            for key, noun, one, desired in (
                ("irqs", "interrupts", self._interrupts.affinity_class, interrupts),
                ("hostSlices", "host daemons", self._slices.affinity_class, self._desired_for_slices(observing=True)),
            )
            if desired is not None
        ]

    async def run_forever(self) -> None:
        """Runs both evictors. Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._interrupts.run_forever(), name="interrupts")
            tasks.create_task(self._slices.run_forever(), name="host slices")

    def _desired_for_interrupts(self, *, observing: bool = False) -> DesiredIsolation | None:
        if not self._interrupts_writable:
            return None
        enabled = self._state.config.irqs == "move"
        return self._desired(cpus_without_interrupts, enabled=enabled, observing=observing)

    def _desired_for_slices(self, *, observing: bool = False) -> DesiredIsolation | None:
        enabled = self._state.config.host_slices
        return self._desired(cpus_without_host_daemons, enabled=enabled, observing=observing)

    def _desired(
        self, cpus_to_vacate: Callable[[NodeState], Cpus], *, enabled: bool, observing: bool
    ) -> DesiredIsolation | None:
        """Returns the desired state, or None if this instance must not act. If ``enabled`` is False, no CPU has to be
        vacated, so the original affinities are restored.
        """
        if not ((observing or self._active()) and self._state.containers_listed):
            return None
        return DesiredIsolation(cpus_to_vacate(self._state) if enabled else frozenset(), self._state.host.online)
