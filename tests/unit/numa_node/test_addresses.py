# SPDX-License-Identifier: Apache-2.0
"""Parsing listen addresses and socket paths."""

import socket
from pathlib import Path

import pytest
from numa_contract.config import ConfigError
from numa_node.addresses import SocketPathError, check_socket_path, listen_tcp, node_name, parse_bind_address, pod_uid


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":8081", ("", 8081)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:9", ("::1", 9)),
        ("node.example:80", ("node.example", 80)),
        ("off", None),
    ],
)
def test_bind_addresses(text: str, expected: tuple[str, int] | None) -> None:
    """The host and the port are written as in Go programs, with IPv6 addresses in brackets, or the address is "off"."""
    assert parse_bind_address(text) == expected


@pytest.mark.parametrize("text", ["", "8081", "host", "a:b", ":70000", "::1:80", ":-1", ":٣"])
def test_invalid_bind_addresses(text: str) -> None:
    """Any other string is rejected before a socket is created."""
    with pytest.raises(ConfigError, match="--bind-address"):
        parse_bind_address(text)


def test_a_socket_path_has_at_most_107_bytes() -> None:
    """A longer path is rejected with an error that gives the path, its length and a remedy. The limit is in bytes, not
    in characters.
    """
    check_socket_path(Path("/" + "a" * 106))
    with pytest.raises(
        SocketPathError, match=r"is 110 bytes long, but the kernel allows 107: .* at least 3 bytes shorter"
    ):
        check_socket_path("/" + "a" * 109)
    with pytest.raises(SocketPathError, match="is 121 bytes long"):
        check_socket_path("/" + "ä" * 60)


def test_the_node_is_named_as_kubernetes_names_it() -> None:
    """The first name that is set is used, in lower case and without surrounding whitespace."""
    assert node_name(None, "", " Worker-1\n", "other") == "worker-1"
    assert node_name()


def test_only_a_valid_pod_uid_becomes_a_path() -> None:
    """The UID names a subdirectory of a directory that other instances use too."""
    assert pod_uid("0b1c") == "0b1c"
    for text in ("../x", "a/b", "", None):
        with pytest.raises(ConfigError, match="POD_UID"):
            pod_uid(text)


@pytest.mark.parametrize("client", ["127.0.0.1", "::1"])
def test_without_a_host_both_ip_versions_are_served(client: str) -> None:
    """The kubelet probes the pod's address, whichever IP version the cluster uses."""
    with listen_tcp("", 0) as server, socket.create_connection((client, server.getsockname()[1])):
        peer, _ = server.accept()
        peer.close()
