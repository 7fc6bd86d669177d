# SPDX-License-Identifier: Apache-2.0
from tests.fakes.clock import pytest_asyncio_loop_factories  # noqa: F401  time is virtual
