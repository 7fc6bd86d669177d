# SPDX-License-Identifier: Apache-2.0
"""A client of irqbalance, the daemon that distributes interrupts over CPUs. Every call blocks.

irqbalance accepts one request per connection to its unix socket and authenticates the sender by its credentials.
``settings cpus LIST`` bans the CPUs in the list, and the reply to ``setup`` contains the mask of banned CPUs
(sock_handle in irqbalance.c). A ban lasts until the daemon exits.
"""

import contextlib
import os
import re
import socket
import struct
import time
from pathlib import Path
from typing import Final

from numa_contract.cpuset import format_cpu_list

from nri_backend.host_isolation.masks import parse_mask
from nri_backend.host_isolation.plan import Cpus
from nri_backend.node.host import possible_cpus
from nri_backend.node.node_files import NodeFiles

SETTLE_SECONDS: Final = 15.0
"""Time after a request during which the client returns the requested CPUs instead of those in the reply.

irqbalance applies a setting in its next round and returns the old mask until then; rounds are ten seconds apart.
"""
_TIMEOUT_SECONDS: Final = 1.0
_MAX_REPLY_BYTES: Final = 1 << 16
_BANNED: Final = re.compile(r"\bBANNED ([0-9a-f,]+)\s*$", re.ASCII)


class IrqbalanceNotRunningError(Exception):
    """Raised if irqbalance is not listening on the node."""


class Irqbalance:
    """Client of the node's irqbalance, whose sockets are in ``run/irqbalance`` under ``root``."""

    def __init__(self, root: str, host_root: str, files: NodeFiles | None = None) -> None:
        self._files = files or NodeFiles()
        self.directory = Path(root, "run/irqbalance")
        """Directory where irqbalance creates its socket."""
        self._host_root = host_root
        self._last_setting: tuple[str, Cpus, float] | None = None
        """Socket path, allowed CPUs and time of the last accepted setting."""

    def allowed(self) -> Cpus | None:
        """Returns the CPUs that irqbalance may use, or None if it does not reply.

        Raises IrqbalanceNotRunningError.
        """
        with contextlib.suppress(OSError, ValueError):
            path, reply = self._request("setup")
            if banned := _BANNED.search(reply):
                last = self._last_setting
                if last and last[0] == path and time.monotonic() - last[2] < SETTLE_SECONDS:
                    return last[1]
                return possible_cpus(self._host_root) - parse_mask(banned[1])
        return None

    def allow(self, cpus: Cpus) -> None:
        """Bans all CPUs except ``cpus``. Errors are ignored: the next `allowed()` shows whether the ban is in
        effect.
        """
        # NULL removes the ban, after which irqbalance uses the list in its environment again.
        with contextlib.suppress(OSError, ValueError, IrqbalanceNotRunningError):
            possible = possible_cpus(self._host_root)
            banned = format_cpu_list(possible - cpus)
            present = format_cpu_list(possible - (self.allowed() or possible)) if self._files.observes else ""
            if not self._files.allows(str(self.directory), present, banned):
                return
            path, _ = self._request(f"settings cpus {banned or 'NULL'}")
            self._last_setting = path, cpus, time.monotonic()

    def _request(self, request: str) -> tuple[str, str]:
        """Returns the path of the first socket that accepts a connection, and the reply, which may be empty.

        Sockets of processes that have died are skipped. Raises OSError if irqbalance does not reply in time, and
        IrqbalanceNotRunningError if no socket accepts a connection.
        """
        error: Exception = IrqbalanceNotRunningError()
        for path in sorted(self.directory.glob("irqbalance*.sock")):
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(_TIMEOUT_SECONDS)
                    connection.connect(str(path))
                    sender = struct.pack("3i", os.getpid(), os.getuid(), os.getgid())
                    credentials = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, sender)]
                    connection.sendmsg([request.encode()], credentials)
                    return str(path), connection.recv(_MAX_REPLY_BYTES).decode(errors="replace")
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError as caught:
                error = caught
        raise error
