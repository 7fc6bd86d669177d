# SPDX-License-Identifier: Apache-2.0
"""Client for the helper container that resizes hugepage pools; sizes are read from sysfs directly (docs/adr/0023)."""

import os
from collections.abc import Callable
from typing import Final

from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.hugepage_pools import KernelPools
from dra_frontend.node.pool_requests import MAX_RESPONSE_BYTES, MAX_SECONDS, PoolRequest, PoolResponse, pool_socket

_PATIENCE_SECONDS: Final = 30.0
"""Seconds that the client waits beyond the time given to the helper, since one write can block while the kernel frees
memory.
"""
_CHECK_SECONDS: Final = 5.0
"""Timeout for a check, which does not write anything. No hugepages are allocated on demand until it is complete."""


class HelperError(HostTreeError):
    """Raised if the helper container does not respond."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        text = f"the helper is not responding ({reason}); see the log of the hugepages container in the driver's pod"
        super().__init__(os.fspath(path), text)


class HelperPools:
    """The machine's hugepage pools. Calls block, and raise HostTreeError or HelperError."""

    def __init__(
        self,
        kernel: KernelPools,
        path: str,
        patience: float = _PATIENCE_SECONDS,
        check_seconds: float = _CHECK_SECONDS,
    ) -> None:
        """``path`` is the path of the helper's socket."""
        self._kernel = kernel
        self._path = path
        self._patience = patience
        self._check_seconds = check_seconds

    def pages(self, node: int, page_bytes: int) -> int:
        """Returns the number of pages in a pool, excluding surplus pages."""
        return self._kernel.pages(node, page_bytes)

    def check(self, node: int, page_bytes: int) -> None:
        """Checks a pool. Raises HostTreeError if it cannot be resized, or HelperError if the helper does not respond in
        time.
        """
        self._ask(PoolRequest(numa_node=node, page_bytes=page_bytes), self._check_seconds)

    def shrink(self, node: int, page_bytes: int, pages: int) -> None:
        """Requests a smaller pool."""
        self._ask(PoolRequest(numa_node=node, page_bytes=page_bytes, pages=pages), self._patience)

    def grow(self, node: int, page_bytes: int, pages: int, left: Callable[[], float]) -> None:
        """Requests a larger pool.

        The helper retries for the number of seconds that ``left()`` returns at the time of the call, at most
        MAX_SECONDS.
        """
        seconds = min(max(0.0, left()), MAX_SECONDS)
        request = PoolRequest(numa_node=node, page_bytes=page_bytes, pages=pages, seconds=seconds)
        self._ask(request, seconds + self._patience)

    def _ask(self, request: PoolRequest, timeout: float) -> None:
        try:
            with pool_socket() as connection:
                connection.settimeout(timeout)
                connection.connect(self._path)
                connection.send(request.model_dump_json(exclude_none=True).encode())
                data = connection.recv(MAX_RESPONSE_BYTES)
            response = PoolResponse.model_validate_json(data)
        except OSError as error:
            raise HelperError(self._path, error.strerror or str(error)) from error
        except ValueError as error:
            raise HelperError(self._path, "its response is malformed") from error
        if response.problem:
            raise HostTreeError(response.subject, response.problem)
