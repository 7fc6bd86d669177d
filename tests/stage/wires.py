# SPDX-License-Identifier: Apache-2.0
"""Blocking clients for the stage: JSON lines to the fakes, HTTP to the API server and the state socket."""

import http.client
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.fakes.waiting import PATIENCE

_SECONDS = 60.0 * PATIENCE


class AnsweredError(Exception):
    """A fake or a server returned an error. The exception contains the message that was returned."""

    def __init__(self, text: str, code: int = 0) -> None:
        self.code = code
        super().__init__(text)


class UnixHttpConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, seconds: float = _SECONDS) -> None:
        super().__init__("node", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        """Connects to the socket's path."""
        self.sock = _connect(self._path, self.timeout or _SECONDS)


def _connect(path: Path, seconds: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(seconds)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def ask_line(path: Path, call: str, **args: Any) -> Any:
    """Calls a fake over its control socket (tests/fakes/control.py). Raises AnsweredError."""
    with _connect(path, _SECONDS) as connection, connection.makefile("rwb") as lines:
        lines.write(json.dumps({"call": call, "args": args}).encode() + b"\n")
        lines.flush()
        line = lines.readline()
    if not line:
        raise ConnectionError(f"{path} closed the connection without a response")
    answer = json.loads(line)
    if "error" in answer:
        raise AnsweredError(answer["error"])
    return answer["result"]


def _exchange(connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> Any:
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    is_json = "json" in (response.getheader("Content-Type") or "")
    if response.status >= 400:
        told = json.loads(text).get("message") or text if is_json else text
        raise AnsweredError(f"{method} {path}: {response.status} {told}".rstrip(), response.status)
    return json.loads(text) if is_json else text


def ask_unix(socket_path: Path, path: str, method: str = "GET", body: Any = None) -> Any:
    """Sends an HTTP request over a unix socket and parses a JSON response. Raises AnsweredError for status 400 and
    above.
    """
    return _exchange(UnixHttpConnection(socket_path), method, path, body)


def ask_http(server: str, path: str, method: str = "GET", body: Any = None) -> Any:
    """Sends an HTTP request to a base URL and parses a JSON response. Raises AnsweredError for status 400 and above."""
    address = urlsplit(server)
    return _exchange(
        http.client.HTTPConnection(str(address.hostname), address.port, timeout=_SECONDS), method, path, body
    )
