# SPDX-License-Identifier: Apache-2.0
"""Listening addresses: TCP addresses from flags, and the length limit of unix socket paths."""

import os
import socket
from typing import Final

from numa_contract.config import ConfigError
from numa_contract.errors import MalformedError
from numa_contract.names import check_uid

SOCKET_PATH_BYTES: Final = 107
"""Maximum length of a socket path: sun_path has 108 bytes, including the terminating NUL (unix(7))."""


class SocketPathError(ValueError):
    """A unix socket's path is longer than the kernel allows."""


class BindError(OSError):
    """The process cannot listen on a TCP address."""


def check_socket_path(path: str | os.PathLike[str]) -> None:
    """Raises SocketPathError if a path is too long for a unix socket."""
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES:
        raise SocketPathError(
            f"the socket path {os.fspath(path)} is {length} bytes long, but the kernel allows {SOCKET_PATH_BYTES}: "
            f"choose a directory whose path is at least {length - SOCKET_PATH_BYTES} bytes shorter"
        )


def parse_bind_address(text: str) -> tuple[str, int] | None:
    """Parses ``HOST:PORT``, ``:PORT`` (all addresses), ``[IPv6]:PORT`` or ``off`` (None). Raises ConfigError."""
    if text == "off":
        return None
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in host and not bracketed):
        raise ConfigError("command line", [f"--bind-address {text!r}: must be HOST:PORT, :PORT, [IPv6]:PORT or off"])
    return host.strip("[]"), int(port)


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listens on an address. Without a host, or with ``::``, listens on all addresses of both IP versions.

    Raises BindError if the address cannot be used.
    """
    try:
        if host in ("", "::") and socket.has_dualstack_ipv6():
            # The kubelet probes the pod's address, which may be an IPv6 address.
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BindError(
            f"cannot listen on {host or '*'}:{port} ({reason}); choose another --bind-address, or 'off' to disable the "
            "probes"
        ) from error


def pod_uid(given: str | None) -> str:
    """Returns the UID of the pod that this process runs in, from the flag or the environment. Raises ConfigError."""
    if not given:
        reason = "the pod's UID is unknown: set POD_UID from metadata.uid (downward API) or pass --pod-uid"
        raise ConfigError("command line", [reason])
    try:
        return check_uid(given)
    except MalformedError as error:
        raise ConfigError("command line", [f"--pod-uid or POD_UID: {error}"]) from error


def node_name(*given: str | None) -> str:
    """Returns the first name that is not empty, else the host name, in the form that Kubernetes uses: stripped and in
    lower case.
    """
    return next((name for name in given if name), os.uname().nodename).strip().lower()
