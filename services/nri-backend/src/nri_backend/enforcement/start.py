# SPDX-License-Identifier: Apache-2.0
"""What happens to a container between its creation and its first instruction (ring 2)."""

from dataclasses import replace
from typing import Final

from nri_backend.claims.judge import Refusal
from nri_backend.containers.container import Phase, Tracked
from nri_backend.containers.refusals import untrue
from nri_backend.containers.targets import cpuset_wants
from nri_backend.enforcement.actuator import Actuator

MAX_TRIES: Final = 3
"""The pool may change so often while a container is being started."""


async def make_true(actuator: Actuator, tracked: Tracked) -> tuple[Tracked, Refusal | None]:
    """Makes the container's cgroup true; its phase says when that is done, the refusal why it cannot be."""
    state = actuator.state
    for _ in range(MAX_TRIES):
        actuator.note(tracked)
        wants = cpuset_wants(state, tracked)
        outcome = await actuator.apply(tracked)
        tracked = state.assessed(state.get(tracked.id) or tracked)
        if tracked.refusal is not None:
            return tracked, tracked.refusal
        if cpuset_wants(state, tracked) == wants:
            break
    trespass = outcome.seen is not None and (outcome.seen.cpus is None or outcome.seen.cpus & state.held)
    if tracked.entitlement.claims:
        if outcome.left or outcome.seen is None:
            return tracked, untrue(outcome.left)
    elif outcome.left and state.held and trespass and not tracked.own_pod:
        return tracked, untrue(outcome.left)
    # A container in a virtual machine has no cgroup of its own on the node; without a claim that is its affair.
    actuator.take_outcome(replace(tracked, phase=Phase.STARTED), outcome)
    return tracked, None
