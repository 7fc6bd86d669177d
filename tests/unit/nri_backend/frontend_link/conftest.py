# SPDX-License-Identifier: Apache-2.0
"""Both ends of a connection live on one event loop here, so no test waits."""

from collections.abc import Callable, Mapping

from tests.fakes.clock import JumpingLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], JumpingLoop]]:
    """What pytest-asyncio makes loops by."""
    return {"jumping": JumpingLoop}
