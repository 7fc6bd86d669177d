# SPDX-License-Identifier: Apache-2.0
"""An NRI plugin that answers a container's creation with what a variable of the container asks for, as JSON.

Shows what a runtime does with an answer, apart from ours: `python -m tests.node.rig.answering_plugin`. Its keys
are `hugepage_limits` (bytes by "2MB") and `unified` (values by cgroup file).
"""

import asyncio
import json
import logging
from typing import Final

from nri_backend.nri.link import dial
from nri_backend.nri.model import Adjustment, Container, Pod, Resources
from nri_backend.nri.session import RuntimeSession

from tests.node.rig.node import NRI_SOCKET
from tests.rigs.nri_hooks import RecordingHooks, RecordingObserver

VARIABLE: Final = "DRA_CPUSET_answer"
"""Of the driver's own kind, since no other reaches a plugin."""


class Answers(RecordingHooks):
    """Answers a creation."""

    async def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """What the variable asks for."""
        for variable in container.env:
            if variable.startswith(f"{VARIABLE}="):
                return Adjustment(Resources(**json.loads(variable.removeprefix(f"{VARIABLE}="))))
        return Adjustment()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    observer = RecordingObserver()
    session = RuntimeSession(Answers(), observer.link_changed, observer.call_done, name="answering", index="50")
    asyncio.run(session.run_forever(lambda: dial(NRI_SOCKET)))
