# SPDX-License-Identifier: Apache-2.0
"""The client for the state socket, tested with real sockets."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from numa_contract.names import STATE_SOCKET
from numa_contract.state.devices import CpuDocument
from numa_contract.state.node import ProblemDocument
from numa_tools.state_client import NoServiceError, StateClient


@contextmanager
def answering(root: Path, answer: bytes) -> Iterator[StateClient]:
    """Yields a client that is connected to a server that always sends the same response."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / STATE_SOCKET))
        listening.listen()

        def serve() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(4096)
                taken.sendall(answer)
                taken.shutdown(socket.SHUT_WR)
                while taken.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield StateClient(root, seconds=0.5)
        finally:
            thread.join()
            (root / STATE_SOCKET).unlink()


def http(body: bytes, status: str = "200 OK") -> bytes:
    """Returns an HTTP response."""
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def test_documents_and_text_pages_are_read(short_root: Path) -> None:
    """JSON is parsed. A text page is returned as a string, even if it has an expected status other than 200."""
    with answering(short_root, http(b'[{"a": 1}]')) as client:
        assert client.document("/v1/claims") == [{"a": 1}]
    with answering(short_root, http(b"not yet\n", "503 Service Unavailable")) as client:
        assert client.text("/readyz", accepted_status=503) == "not yet\n"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (http(b'{"detail": "no claim"}', "404 Not Found"), "status 404"),
        (http(b"{"), "cannot be read as JSON"),
        (http(b"[" * 100_000), "nested more than 64 levels deep"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", "is not responding"),
        (b"SSH-2.0\r\n\r\n", "is not responding"),
        (b"", "is not responding"),
        (http(b"1" * ((16 << 20) + 2)), "is larger than"),
    ],
)
def test_every_invalid_response_raises_the_same_error_type(short_root: Path, answer: bytes, text: str) -> None:
    """Callers need not know which errors a socket may raise, and no response can exhaust memory."""
    with answering(short_root, answer) as client, pytest.raises(NoServiceError, match=text):
        client.document("/v1/claims")


def test_the_error_says_why_the_service_cannot_be_reached(short_root: Path) -> None:
    """Covers a missing socket, a socket without a listener, a server that stays silent, and a path that is too long."""
    client = StateClient(short_root, seconds=0.1)
    with pytest.raises(NoServiceError, match="no such socket"):
        client.text("/healthz")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(short_root / STATE_SOCKET))
        with pytest.raises(NoServiceError, match="refused"):
            client.text("/healthz")
        silent.listen()
        with pytest.raises(NoServiceError, match="timed out"):
            client.text("/healthz")
    with pytest.raises(NoServiceError, match="kernel allows"):
        StateClient(short_root / ("x" * 200)).text("/healthz")


def test_documents_are_read_as_models(short_root: Path) -> None:
    """Fields from a newer release are ignored. For a response in a different format, the error names the first invalid
    field.
    """
    cpu = {"cpu": 1, "use": "pool", "fieldOfANewerRelease": 1}
    with answering(short_root, http(json.dumps([cpu]).encode())) as client:
        assert client.read_list("/v1/cpus", CpuDocument) == (CpuDocument(cpu=1, use="pool"),)
    for body in (b'{"cpu": 1}', b"[1]", b'[{"cpu": 1}]'):
        with answering(short_root, http(body)) as client, pytest.raises(NoServiceError, match="/v1/cpus"):
            client.read_list("/v1/cpus", CpuDocument)
    with (
        answering(short_root, http(b'{"level": "fault", "code": "\\u001b"}')) as client,
        pytest.raises(NoServiceError, match="ProblemDocument: 'subject': Field required"),
    ):
        client.read("/v1/node", ProblemDocument)
