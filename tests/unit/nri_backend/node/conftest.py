# SPDX-License-Identifier: Apache-2.0
"""Time is set by the tests here, that of the event loop, too."""

from collections.abc import Callable, Mapping

from tests.fakes.clock import JumpingLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], JumpingLoop]]:
    """What pytest-asyncio makes loops by."""
    return {"jumping": JumpingLoop}
