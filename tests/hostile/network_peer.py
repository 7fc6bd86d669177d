# SPDX-License-Identifier: Apache-2.0
"""Attacks through the two open ports. Probes must be answered, and Prepare must not be disturbed."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.hostile.attack import Actor, Attack, parametrized
from tests.hostile.field import OPEN_FILES, Field

# Opens connections to both ports, sends the same bytes on each, keeps the newest 2,000 open and continues until it is
# stopped.
_FLOOD = r"""
import socket, sys, time
sent, held, ports = bytes.fromhex(sys.argv[1]), [], [int(port) for port in sys.argv[2:]]
while True:
    for port in ports:
        peer = socket.socket()
        peer.settimeout(0.05)
        try:
            peer.connect(("127.0.0.1", port))
            peer.send(sent)
        except OSError:
            continue
        held = [*held[-1999:], peer]
    time.sleep(0.0005)
"""
_SECONDS = 1.0


@parametrized
def flood(field: Field, sent: bytes) -> Iterator[str]:
    """Floods both ports for the duration of the block."""
    command = [sys.executable, str(OPEN_FILES), "4096", sys.executable, "-c", _FLOOD, sent.hex()]
    with subprocess.Popen([*command, *map(str, field.ports)]) as peer:
        try:
            time.sleep(_SECONDS)
            began = time.monotonic()
            assert field.healthy()
            # This is far below 1024, the limit on open files that a container runtime may set.
            assert all(len(list(Path(f"/proc/{one.pid}/fd").iterdir())) < 200 for one in field.processes)
            yield f"probes answered after {time.monotonic() - began:.1f} s"
        finally:
            peer.kill()


_SOON = r"after [0-2]\.\d s"

_HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
_BODY = b"POST /healthz HTTP/1.1\r\nContent-Length: 1000000000000000\r\n\r\n"


def _row(name: str, sent: bytes) -> Attack:
    return Attack(Actor.NETWORK_PEER, name, flood(sent), _SOON, 1.5)


ATTACKS = [
    _row("2,000 idle connections", b""),
    _row("a header that does not end", b"GET /healthz HTTP/1.1\r\nA: " + b"a" * 9000),
    _row("500 pipelined requests whose responses are not read", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 500),
    _row("requests with many headers", _HEAD + b"a:b\r\n" * 1300 + b"\r\n"),
    _row(
        "a header with long runs of spaces and a control character",
        _HEAD + b"A: " + (b"a" + b" " * 63) * 120 + b"\0\r\n\r\n",
    ),
    _row(
        "a body of unlimited length, and bytes that are not HTTP", _BODY + b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 500
    ),
]
