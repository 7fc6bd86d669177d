# SPDX-License-Identifier: Apache-2.0
"""What those who look after claims need of others, from wherever it comes."""

from typing import Any, Protocol


class ClaimSource(Protocol):
    """Where claims are read."""

    async def get_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Returns the ResourceClaim, None if there is none; raises KubeError otherwise."""


class Recovery(Protocol):
    """What must be settled before new claims may be given CPUs."""

    async def recover(self) -> None:
        """Rebuilds what running containers hold and no record tells, as far as it can be done now."""
