# SPDX-License-Identifier: Apache-2.0
"""Reads the API server's address and credentials from a kubeconfig file or the service account."""

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


ConfigurationLoader = Callable[[Configuration], None]
"""A function that writes the address and credentials to a configuration. It blocks, and it raises KubeConfigError."""
_CONNECTIONS: Final = 16
"""Maximum number of simultaneous connections to the server."""


def read_configuration(load: ConfigurationLoader) -> tuple[Configuration, object]:
    """Returns the configuration, and a value that changes whenever the server, its CA bundle or the client certificate
    changes.
    """
    configuration = Configuration()
    configuration.connection_pool_maxsize = _CONNECTIONS
    load(configuration)
    # kubectl accepts a token file that ends in a newline, but in a header the newline would allow header injection.
    configuration.api_key = {key: value.strip() for key, value in configuration.api_key.items()}
    files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    return configuration, (configuration.host, configuration.verify_ssl, *map(_stamp, files))


def _stamp(path: str | None) -> object:
    """Returns a value that changes when the file is written or replaced, or when a symbolic link to it is replaced."""
    try:
        status = Path(path or "").stat()
    except OSError:
        return path
    return path, status.st_ino, status.st_size, status.st_mtime_ns


def kubeconfig(path: str) -> ConfigurationLoader:
    """Returns a function that reads a kubeconfig file's current context: tokens, token files, certificates, exec
    plugins.

    If ``path`` is empty, the function reads the pod's service account instead.
    """

    def load(configuration: Configuration) -> None:
        if not Path(path).is_file():
            raise KubeConfigError(f"read kubeconfig {path}", "the file does not exist")
        try:
            # The loader is a coroutine that reads files, so it runs in its own event loop in this thread.
            asyncio.run(load_kube_config(path, client_configuration=configuration, persist_config=False))
        except _UNREADABLE as error:
            raise KubeConfigError(f"read kubeconfig {path}", _message(error)) from error

    return load if path else in_cluster()


def in_cluster(environ: Mapping[str, str] | None = None, folder: Path = SERVICE_ACCOUNT) -> ConfigurationLoader:
    """Returns a function that reads a pod's service account: the address from the environment, the CA and token from a
    directory.
    """
    more: dict[str, Any] = {} if environ is None else {"environ": dict(environ)}

    def load(configuration: Configuration) -> None:
        files = str(folder / "token"), str(folder / "ca.crt")
        try:
            InClusterConfigLoader(*files, try_refresh_token=False, **more).load_and_set(configuration)
        except _UNREADABLE as error:
            reason = _message(error).rstrip(".")
            remedy = f"mount the pod's service account token at {folder} (the chart's token volume), or set kubeconfig"
            raise KubeConfigError("read the pod's service account", f"{reason}; {remedy}") from error

    return load


def _message(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
