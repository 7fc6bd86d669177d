# SPDX-License-Identifier: Apache-2.0
"""An NRI plugin that answers a container's creation with what a variable of the container asks for, as JSON.

Shows what a runtime does with an answer, apart from ours: `python -m tests.node.rig.answering_plugin`. Its keys
are `hugepage_limits` (bytes by "2MB") and `unified` (values by cgroup file).
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Final

from nri_backend.nri.link import dial
from nri_backend.nri.model import Adjustment, Container, Pod, Resources, Update
from nri_backend.nri.session import RuntimeSession

from tests.node.rig.node import NRI_SOCKET

VARIABLE: Final = "DRA_CPUSET_answer"
"""Of the driver's own kind, since no other reaches a plugin."""


class Answers:
    """Implements ContainerHooks of nri_backend.nri.model; only a creation is answered."""

    async def synchronize(self, _pods: Sequence[Pod], _containers: Sequence[Container]) -> list[Update]:
        return []

    async def create_container(self, _pod: Pod, container: Container) -> Adjustment:
        for variable in container.env:
            if variable.startswith(f"{VARIABLE}="):
                return Adjustment(Resources(**json.loads(variable.removeprefix(f"{VARIABLE}="))))
        return Adjustment()

    async def start_container(self, _pod: Pod, _container: Container) -> None:
        return

    async def update_container(self, _pod: Pod, _container: Container, _wanted: Resources) -> list[Update]:
        return []

    async def stop_container(self, _pod: Pod, _container: Container) -> list[Update]:
        return []

    async def remove_container(self, _pod: Pod, _container: Container) -> None:
        return

    async def remove_pod(self, _pod: Pod) -> None:
        return

    def disconnected(self) -> None:
        return


def _ignored(*_told: object) -> None:
    return


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    session = RuntimeSession(Answers(), _ignored, _ignored, name="answering", index="50")
    asyncio.run(session.run_forever(lambda: dial(NRI_SOCKET)))
