# SPDX-License-Identifier: Apache-2.0
"""Waiting for what tells nobody when it changes: files, and tasks of the program under test."""

import asyncio
import os
from collections.abc import Callable
from typing import Final

PATIENCE: Final = float(os.environ.get("PATIENCE", "1"))
"""How many times as long everything may take, for machines with other work."""


async def eventually(condition: Callable[[], object], seconds: float = 8.0) -> None:
    """Returns as soon as the condition is true; TimeoutError when it never is."""
    async with asyncio.timeout(seconds * PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
