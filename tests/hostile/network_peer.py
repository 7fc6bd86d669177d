# SPDX-License-Identifier: Apache-2.0
"""Attacks by whoever reaches the two open ports. The probes must be answered, and the claims door not be disturbed."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tests.hostile.attack import Actor, Attack
from tests.hostile.field import Field

# Opens connections to both ports, sends the same on each, keeps the newest 2,000 and goes on until it is ended.
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
_SECONDS = 1.5


def flood(sent: bytes) -> Callable[[Field], AbstractContextManager[str]]:
    """Floods both ports, and goes on meanwhile."""

    @contextmanager
    def attack(field: Field) -> Iterator[str]:
        command = ["sh", "-c", 'ulimit -n 4096; exec "$0" "$@"', sys.executable, "-c", _FLOOD, sent.hex()]
        with subprocess.Popen([*command, *map(str, field.ports)]) as peer:
            try:
                time.sleep(_SECONDS)
                began = time.monotonic()
                assert field.healthy()
                yield f"probes answered after {time.monotonic() - began:.1f} s"
            finally:
                peer.kill()

    return attack


_SOON = r"after [0-2]\.\d s"
_FLOODED = ("backend A8", "frontend A7", "security S3", "security S5")

ATTACKS = [
    Attack(Actor.NETWORK_PEER, "2,000 idle connections", flood(b""), _SOON, 1.5, _FLOODED),
    Attack(Actor.NETWORK_PEER, "headers that do not end", flood(b"GET /healthz HTTP/1.1\r\nA: "), _SOON, 2.0, _FLOODED),
    Attack(
        Actor.NETWORK_PEER,
        "500 requests at once, of which no answer is read",
        flood(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 500),
        _SOON,
        2.5,
        _FLOODED,
    ),
    Attack(Actor.NETWORK_PEER, "a header of 1 MB", flood(b"GET / HTTP/1.1\r\nA: " + b"a" * (30 << 10)), _SOON, 2.0),
    Attack(
        Actor.NETWORK_PEER,
        "a body of any length",
        flood(b"POST /healthz HTTP/1.1\r\nContent-Length: 1" + b"0" * 15 + b"\r\n\r\n"),
        _SOON,
        2.5,
    ),
    Attack(
        Actor.NETWORK_PEER, "what is no HTTP", flood(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50), _SOON, 2.5
    ),
]
