# SPDX-License-Identifier: Apache-2.0
"""Kills containers that must not run. What has begun goes on when the hook that wanted it is given up."""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Final

from nri_backend.containers.container import Phase, Tracked
from nri_backend.enforcement.actuator import Actuator
from nri_backend.node.cgroups import CgroupTree

# Part of what plugin.py leaves between our deadline and the runtime's patience.
WAIT_SECONDS: Final = 0.25
_FAILED: Final = "a refused container cannot be killed"
_log = logging.getLogger(__name__)


class Killer:
    """Kills, each container in a job of its own."""

    def __init__(self, actuator: Actuator, tree: CgroupTree) -> None:
        self._actuator = actuator
        self._tree = tree

    async def kill(self, tracked: Tracked) -> bool:
        """Kills every process of a container; tells whether that was done within WAIT_SECONDS.

        A container that is known as started is ENDING then; one that cannot be killed is logged.
        """
        if not tracked.cgroup:
            _log.warning(
                _FAILED, extra={"id": tracked.id, "error": tracked.problem or "the runtime names no cgroup for it"}
            )
            return False
        job = asyncio.get_running_loop().run_in_executor(None, self._tree.kill, tracked.cgroup)
        job.add_done_callback(partial(self._done, tracked.id))
        done, _ = await asyncio.wait({job}, timeout=WAIT_SECONDS)
        return bool(done) and job.exception() is None

    def _done(self, container_id: str, job: asyncio.Future[None]) -> None:
        if error := job.exception():
            _log.warning(_FAILED, extra={"id": container_id, "error": str(error)})
            return
        tracked = self._actuator.state.get(container_id)
        if tracked is not None and tracked.phase is Phase.STARTED:
            self._actuator.note(replace(tracked, phase=Phase.ENDING))
