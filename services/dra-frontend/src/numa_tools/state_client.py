# SPDX-License-Identifier: Apache-2.0
"""Reads the documents of a running service from its state socket, with blocking I/O."""

import http.client
import socket
from pathlib import Path
from typing import Any, Final, TypeVar

from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError, shown
from numa_contract.names import STATE_SOCKET
from numa_contract.records import Document
from numa_node.addresses import SocketPathError, check_socket_path
from pydantic import ValidationError

_TIMEOUT_SECONDS: Final = 5.0
# A response from a node with 500 containers is about 1 % of this size.
_MAX_BYTES: Final = 16 << 20
_OK: Final = 200
_Model = TypeVar("_Model", bound=Document)


class NoServiceError(Exception):
    """Raised if the service does not respond as expected. The message contains the socket and the reason."""


class _Connection(http.client.HTTPConnection):
    """HTTP/1.1 connection over a unix socket."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("node", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        """Connects to the socket. Raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class StateClient:
    """Client for the state endpoint of the node's active instance (``state.sock`` in the run directory)."""

    def __init__(self, run_dir: str | Path, seconds: float = _TIMEOUT_SECONDS) -> None:
        """``run_dir`` is the run directory, and ``seconds`` is the maximum time to wait for a response's next byte."""
        self.socket = Path(run_dir, STATE_SOCKET)
        self._seconds = seconds

    def text(self, path: str, *, accepted_status: int = _OK) -> str:
        """Returns the body of the response to ``GET path`` if its status is 200 or ``accepted_status``. Raises
        NoServiceError otherwise.
        """
        connection = _Connection(self.socket, self._seconds)
        try:
            check_socket_path(self.socket)
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(_MAX_BYTES + 1).decode("utf-8", "replace")
            if answer.length and len(body) <= _MAX_BYTES:
                raise http.client.IncompleteRead(body.encode(), answer.length)
        except FileNotFoundError:
            raise NoServiceError(f"{self.socket}: no such socket; the service is not running here") from None
        except SocketPathError as error:
            raise NoServiceError(str(error)) from error
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NoServiceError(f"{self.socket}: the service is not responding: {why}") from error
        finally:
            connection.close()
        if len(body) > _MAX_BYTES:
            raise NoServiceError(f"{self.socket}: the response to {path} is larger than {_MAX_BYTES} bytes")
        if answer.status not in (_OK, accepted_status):
            raise NoServiceError(f"{self.socket}: {path}: status {answer.status} {shown(body)}")
        return body

    def document(self, path: str) -> Any:
        """Returns the JSON value in the response to ``GET path``, such as ``/v1/claims``. Raises NoServiceError."""
        try:
            return parse_json(self.text(path).encode(), _MAX_BYTES, "response to", path)
        except MalformedError as error:
            raise NoServiceError(f"{self.socket}: {error}") from error

    def read(self, path: str, model: type[_Model]) -> _Model:
        """Returns the document in the response to ``GET path``. Raises NoServiceError if it cannot be read or does not
        match ``model``.
        """
        return self._validated(path, model, self.document(path))

    def read_list(self, path: str, model: type[_Model]) -> tuple[_Model, ...]:
        """Returns the list of documents in the response to ``GET path``. Raises NoServiceError if the list cannot be
        read or a document does not match ``model``.
        """
        found = self.document(path)
        if not isinstance(found, list):
            raise NoServiceError(f"{self.socket}: the response to {path} is not a list")
        return tuple(self._validated(path, model, one) for one in found)

    def _validated(self, path: str, model: type[_Model], document: Any) -> _Model:
        try:
            return model.model_validate(document)
        except ValidationError as error:
            (first, *_) = error.errors(include_url=False, include_input=False)
            where = shown(".".join(map(str, first["loc"])))
            text = f"the response to {path} cannot be read as {model.__name__}: {where}: {first['msg']}"
            raise NoServiceError(f"{self.socket}: {text}") from error
