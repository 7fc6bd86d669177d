# SPDX-License-Identifier: Apache-2.0
"""An NRI plugin that answers a container's creation with what the container's variable ANSWER asks for, as JSON.

Shows what a runtime does with an answer, apart from ours: `python -m tests.node.rig.answering_plugin`. Keys of ANSWER
are `hugepage_limits` (bytes by "2MB") and `unified` (values by cgroup file).
"""

import asyncio
import json
import logging
from collections.abc import Sequence

from nri_backend.nri.link import dial
from nri_backend.nri.model import Adjustment, Container, Pod, Resources, Update
from nri_backend.nri.session import RuntimeSession
from numa_contract.names import CPU_ENV_PREFIX

from tests.node.rig.node import NRI_SOCKET

# What the session hands on of an environment begins like this.
ANSWER = f"{CPU_ENV_PREFIX}answer"


class Answers:
    """Implements nri_backend.nri.hooks.ContainerHooks; only a creation is answered."""

    async def synchronize(self, _pods: Sequence[Pod], _containers: Sequence[Container]) -> list[Update]:
        return []

    async def create_container(self, _pod: Pod, container: Container) -> Adjustment:
        for variable in container.env:
            if variable.startswith(f"{ANSWER}="):
                return Adjustment(Resources(**json.loads(variable.removeprefix(f"{ANSWER}="))))
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


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(RuntimeSession(Answers(), name="answering", index="50").run_forever(lambda: dial(NRI_SOCKET)))
