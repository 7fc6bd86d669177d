# SPDX-License-Identifier: Apache-2.0
"""Address of the API server and credentials: from a kubeconfig or the service account."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from dra_frontend.api_server.errors import KubeConfigError
from dra_frontend.api_server.library import ConfigException, Configuration, InClusterConfigLoader, load_kube_config

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_UNREADABLE: Final = (
    *(ConfigException, yaml.YAMLError),
    *(OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError),
)


Load = Callable[[Configuration], None]
"""Fills in address and credentials; blocks. Raises KubeConfigError."""
_CONNECTIONS: Final = 16
"""Maximum number of connections to the server at the same time."""


def read_configuration(load: Load) -> tuple[Configuration, object]:
    """Returns the configuration, and a value that changes with the server, its CA bundle and the client certificate."""
    configuration = Configuration()
    configuration.connection_pool_maxsize = _CONNECTIONS
    load(configuration)
    # A token file that ends in a newline is valid for kubectl; in a header the newline is an injection.
    configuration.api_key = {key: value.strip() for key, value in configuration.api_key.items()}
    files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    return configuration, (configuration.host, configuration.verify_ssl, *map(_stamp, files))


def _stamp(path: str | None) -> object:
    """Returns a value that differs if the content of a file differs, also if a symbolic link to it was replaced."""
    try:
        status = Path(path or "").stat()
    except OSError:
        return path
    return path, status.st_ino, status.st_size, status.st_mtime_ns


def kubeconfig(path: str) -> Load:
    """Reads the current context of a kubeconfig file: tokens, token files, certificates, exec plugins.

    Without a file, what the kubelet gives to the pod.
    """

    def load(configuration: Configuration) -> None:
        if not Path(path).is_file():
            raise KubeConfigError(f"read kubeconfig {path}", "the file does not exist")
        try:
            # The loader is a coroutine that reads files; in this thread it has a loop of its own to block.
            asyncio.run(load_kube_config(path, client_configuration=configuration, persist_config=False))
        except _UNREADABLE as error:
            raise KubeConfigError(f"read kubeconfig {path}", _words(error)) from error

    return load if path else in_cluster()


def in_cluster(environ: Mapping[str, str] | None = None, folder: Path = SERVICE_ACCOUNT) -> Load:
    """Reads what the kubelet gives to every pod: address in the environment, CA and token in a folder."""
    more: dict[str, Any] = {} if environ is None else {"environ": dict(environ)}

    def load(configuration: Configuration) -> None:
        files = str(folder / "token"), str(folder / "ca.crt")
        try:
            InClusterConfigLoader(*files, try_refresh_token=False, **more).load_and_set(configuration)
        except _UNREADABLE as error:
            why = _words(error).rstrip(".")
            remedy = f"mount the pod's service account token at {folder} (the chart's volume token), or set kubeconfig"
            raise KubeConfigError("read the service account of the pod", f"{why}; {remedy}") from error

    return load


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
