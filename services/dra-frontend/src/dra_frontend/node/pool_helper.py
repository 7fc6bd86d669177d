# SPDX-License-Identifier: Apache-2.0
"""The helper container for hugepages on demand. It resizes pools on behalf of the frontend (docs/adr/0023).

It accepts requests, one at a time, for the pools in the configuration's ``hugepagesOnDemand``. It does not decide how
many pages claims need and keeps no state, so it can be killed and restarted at any time.
"""

import logging
import os
import select
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from numa_contract.config import Config
from numa_contract.names import pool_socket_path
from numa_contract.pagesize import kubernetes_page_size, parse_page_size
from numa_node.addresses import check_socket_path
from numa_node.log import ErrorLog, set_up_logging

from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.hugepage_pools import KernelPools
from dra_frontend.node.pool_requests import MAX_REQUEST_BYTES, PoolRequest, PoolResponse, pool_socket

_log = logging.getLogger(__name__)
_SETTING: Final = "hugepagesOnDemand"
_CALLER_SECONDS: Final = 5.0
"""Time limit for a client to send its request, and to read the response."""


class _StoppedError(BaseException):
    """Raised when the process receives SIGTERM or SIGINT. It is not an Exception, so that it also ends the handling of
    a request.
    """


class PoolHelper:
    """Handles requests to resize the configured pools."""

    def __init__(self, pools: KernelPools, config: Config) -> None:
        self._pools = pools
        self._config = config

    def handle(self, data: bytes) -> PoolResponse:
        """Resizes the pool as requested and returns the response. Does not raise, whatever the request contains."""
        try:
            if len(data) > MAX_REQUEST_BYTES:
                raise ValueError(f"is larger than {MAX_REQUEST_BYTES} bytes")
            request = PoolRequest.model_validate_json(data)
        except ValueError:
            return PoolResponse.of_problem("request", "is malformed; frontend and helper have different versions")
        try:
            if request.pages is None:
                self._pools.check(request.numa_node, request.page_bytes)
            else:
                self._resize(request, request.pages)
            return PoolResponse(pages=self._pools.pages(request.numa_node, request.page_bytes))
        except HostTreeError as error:
            return PoolResponse.of_problem(error.path, error.reason)

    def _resize(self, request: PoolRequest, pages: int) -> None:
        """Resizes a pool. Raises HostTreeError, including when the configuration does not allow pages of that size."""
        node, page = request.numa_node, request.page_bytes
        limit, reserved = self._config.pages_on_demand(node, page), self._config.reserved_bytes(node, page)
        has = self._pools.pages(node, page)
        pages_text = f"pages of {kubernetes_page_size(page)} on NUMA node {node}"
        if not limit:
            raise HostTreeError(_SETTING, f"has no {pages_text}")
        if pages > max(limit, has):
            raise HostTreeError(_SETTING, f"allows {limit} {pages_text}, but {pages} were requested")
        if pages < min(-(-reserved // page), has):
            raise HostTreeError(
                "reservedMemory", f"reserves {reserved} bytes in {pages_text}, but {pages} pages were requested"
            )
        if pages < has:
            self._pools.shrink(node, page, pages)
        elif pages > has:
            end = time.monotonic() + request.seconds
            self._pools.grow(node, page, pages, lambda: end - time.monotonic())
        if pages != has:
            got = self._pools.pages(node, page)
            _log.info("pool resized", extra={"pool": pages_text, "before": has, "requested": pages, "pages": got})


def _listen(path: Path) -> socket.socket:
    """Listens on a socket to which only processes of the same user can connect, replacing the socket of a helper that
    was killed. Raises OSError if the socket cannot be created.
    """
    check_socket_path(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listening = pool_socket()
    before = os.umask(0o177)
    try:
        listening.bind(os.fspath(path))
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(before)
    listening.listen()
    return listening


def _stop(*_: object) -> None:
    raise _StoppedError


def _check_pools(pools: KernelPools, config: Config) -> None:
    """Logs pools that cannot be resized. That is not fatal: a NUMA node may appear later, and requests are still
    handled.
    """
    for entry in config.hugepages_on_demand:
        try:
            pools.check(entry.numa_node, parse_page_size(entry.size))
        except HostTreeError as error:
            _log.error("cannot resize hugepage pool", extra={"error": str(error)})


def _has_left(connection: socket.socket) -> bool:
    """Returns True if the caller has closed its end of the connection."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always reported
    return bool(poll.poll(0))


def _serve(listening: socket.socket, helper: PoolHelper) -> None:
    """Handles one request per connection until a signal arrives.

    A request whose caller no longer waits is dropped. The caller computed the number of pages from claims that may have
    changed since, for example if the helper was stopped or a kernel call took long.
    """
    error_log = ErrorLog(_log)
    while True:
        connection, _ = listening.accept()
        with connection, error_log.catch("caller", "request not answered"):
            connection.settimeout(_CALLER_SECONDS)
            if (data := connection.recv(MAX_REQUEST_BYTES + 1)) and not _has_left(connection):
                connection.send(helper.handle(data).model_dump_json().encode())


def main(config: Config, host_root: str) -> int:
    """Serves until SIGTERM and returns the exit code. Raises OSError if the socket cannot be created."""
    set_up_logging(config.log_level, config.log_format)
    pools, path = KernelPools(HostTree(host_root), observes=config.observes), Path(pool_socket_path(config.run_dir))
    # The helper is PID 1 in its container, and the kernel delivers to PID 1 only signals for which it has a handler.
    with suppress(_StoppedError):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        _check_pools(pools, config)
        with _listen(path) as listening:
            _log.info("serving", extra={"socket": str(path)})
            _serve(listening, PoolHelper(pools, config))
    _log.info("stopped")
    return 0
