# SPDX-License-Identifier: Apache-2.0
"""A fake irqbalance that listens on a socket and handles the requests that the backend sends (sock_handle in
irqbalance.c).
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from nri_backend.host_isolation.masks import format_mask
from numa_contract.cpuset import parse_cpu_list


class IrqbalanceStandIn:
    """An irqbalance that bans the CPUs in its environment or, after it has applied a request, those in that request."""

    def __init__(self, root: Path, environment: str, pid: int) -> None:
        self.banned = self._own = parse_cpu_list(environment)
        self.requests: list[str] = []
        self.busy = False
        """Whether it accepts connections without replying."""
        self._next = self._own
        directory = root / "run/irqbalance"
        directory.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / f"irqbalance{pid}.sock"))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._listener.listen()

    def round(self) -> None:
        """Applies the last request, as irqbalance does every ten seconds."""
        self.banned = self._next

    def serve(self) -> None:
        """Handles one request per connection until the socket is closed."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    if not self.busy:
                        self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        data, ancillary, *_ = connection.recvmsg(16384, socket.CMSG_SPACE(12))
        ((level, kind, credentials),) = ancillary
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        assert struct.unpack("3i", credentials) == (os.getpid(), os.getuid(), os.getgid())
        request = data.decode()
        self.requests.append(request)
        if request.startswith("settings cpus "):
            banned = request.removeprefix("settings cpus ")
            self._next = self._own if banned.startswith("NULL") else parse_cpu_list(banned)
        elif request.startswith("setup"):
            connection.send(f"SLEEP 10 BANNED {format_mask(self.banned)}".encode())

    def close(self) -> None:
        """Stops listening. The socket file remains, as after a crash."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def irqbalance(root: Path, environment: str = "", pid: int = 1) -> Iterator[IrqbalanceStandIn]:
    """Runs the fake in a thread."""
    stand_in = IrqbalanceStandIn(root, environment, pid)
    thread = threading.Thread(target=stand_in.serve)
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.close()
        thread.join()
