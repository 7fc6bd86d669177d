# SPDX-License-Identifier: Apache-2.0
"""What plugin.py needs from whoever decides about containers. Every hook has a budget of 50 ms of our own time."""

from collections.abc import Sequence
from typing import Protocol

from nri_backend.containers import Adjustment, Container, Pod, Resources, Update


class ContainerHooks(Protocol):
    """The events of the runtime, in domain terms. A RefusedError fails the operation; nothing else may be raised."""

    async def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> list[Update]:
        """The complete state of the runtime, once per connection, all chunks joined."""

    async def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """A container is about to be created; answers when it may be."""

    async def start_container(self, pod: Pod, container: Container) -> None:
        """The container's cgroup exists and its first instruction has not run."""

    async def update_container(self, pod: Pod, container: Container, wanted: Resources) -> list[Update]:
        """The kubelet wants other resources; an update for this very container amends the request."""

    async def stop_container(self, pod: Pod, container: Container) -> list[Update]:
        """The container has ended; may come twice, or for one that never started."""

    async def remove_container(self, pod: Pod, container: Container) -> None:
        """The runtime forgets the container."""

    async def remove_pod(self, pod: Pod) -> None:
        """The runtime forgets the sandbox."""

    def disconnected(self) -> None:
        """The connection to the runtime is gone; nothing is known about containers until the next synchronize."""
