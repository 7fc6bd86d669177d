# SPDX-License-Identifier: Apache-2.0
"""The daemon that spreads interrupts, told through its socket which CPUs it may use. Every call blocks.

One request for each connection, with the sender's credentials; the CPUs of a request are those that it may not use
(sock_handle in irqbalance.c).
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

from nri_backend.node.host import possible_cpus
from nri_backend.quiet.masks import parse_mask
from nri_backend.quiet.moves import Cpus

SETTLE_SECONDS: Final = 15.0
"""It takes up what it was told with its next round, ten seconds apart; until then it tells what was before."""
_SECONDS: Final = 1.0
_LONGEST_ANSWER: Final = 1 << 16
_BANNED: Final = re.compile(r"\bBANNED ([0-9a-f,]+)\s*$", re.ASCII)


class NoBalancerError(Exception):
    """None runs."""


class Irqbalance:
    """The one that runs on the node, if one does: its sockets are in ``run/irqbalance`` below a root.

    What it is told is in force until it ends.
    """

    def __init__(self, root: str, host_root: str) -> None:
        self.directory = Path(root, "run/irqbalance")
        """Directory in which irqbalance creates its socket."""
        self._host_root = host_root
        self._told: tuple[str, Cpus, float] | None = None
        """Which one was told what, and when."""

    def allowed(self) -> Cpus | None:
        """Returns the CPUs that it may use; None of one that does not answer now. NoBalancerError where none runs."""
        with contextlib.suppress(OSError, ValueError):
            who, answer = self._ask("setup")
            if banned := _BANNED.search(answer):
                if self._told and self._told[0] == who and time.monotonic() - self._told[2] < SETTLE_SECONDS:
                    return self._told[1]
                return possible_cpus(self._host_root) - parse_mask(banned[1])
        return None

    def allow(self, cpus: Cpus) -> None:
        """Tells it which CPUs it may use; where it cannot be told, what it allows later shows it."""
        # Without a list of ours it goes back to that of its own environment.
        with contextlib.suppress(OSError, ValueError, NoBalancerError):
            banned = format_cpu_list(possible_cpus(self._host_root) - cpus)
            who, _ = self._ask(f"settings cpus {banned or 'NULL'}")
            self._told = who, cpus, time.monotonic()

    def _ask(self, request: str) -> tuple[str, str]:
        """Returns who takes connections (the dead leave their sockets) and the answer, "" where there is none.

        OSError of one that takes none in time; NoBalancerError.
        """
        error: Exception = NoBalancerError()
        for path in sorted(self.directory.glob("irqbalance*.sock")):
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(_SECONDS)
                    connection.connect(str(path))
                    sender = struct.pack("3i", os.getpid(), os.getuid(), os.getgid())
                    credentials = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, sender)]
                    connection.sendmsg([request.encode()], credentials)
                    return str(path), connection.recv(_LONGEST_ANSWER).decode(errors="replace")
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError as caught:
                error = caught
        raise error
