# SPDX-License-Identifier: Apache-2.0
"""Where the API server is and who we are: kubeconfig or service account."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from dra_frontend.api_server.errors import KubeConfigError
from dra_frontend.api_server.library import ConfigException, InClusterConfigLoader, load_kube_config

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_UNREADABLE: Final = (
    *(ConfigException, yaml.YAMLError),
    *(OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError),
)


@dataclass(slots=True)
class Settings:
    """What the loaders fill in and the REST client reads: the library's ``Configuration`` without urllib3 (1 MB)."""

    host: str = ""
    api_key: dict[str, str] = field(default_factory=dict)
    ssl_ca_cert: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify_ssl: bool = True
    disable_strict_ssl_verification: bool = False
    tls_server_name: str | None = None
    proxy: str | None = None
    proxy_headers: dict[str, str] | None = None
    connection_pool_maxsize: int = 16


Load = Callable[[Settings], None]
"""Fills in address and credentials; blocks. Raises KubeConfigError."""


def read_settings(load: Load) -> tuple[Settings, object]:
    """Returns the settings, and a value that changes with the server, its CA bundle and our client certificate."""
    settings = Settings()
    load(settings)
    # A token file that ends in a newline is valid for kubectl; in a header the newline is an injection.
    settings.api_key = {key: value.strip() for key, value in settings.api_key.items()}
    files = (settings.ssl_ca_cert, settings.cert_file, settings.key_file)
    return settings, (settings.host, settings.verify_ssl, *map(_stamp, files))


def _stamp(path: str | None) -> object:
    """Tells one content of a file from another, also behind a symbolic link that is swapped."""
    try:
        status = Path(path or "").stat()
    except OSError:
        return path
    return path, status.st_ino, status.st_size, status.st_mtime_ns


def kubeconfig(path: str) -> Load:
    """Reads the current context of a kubeconfig file: tokens, token files, certificates, exec plugins.

    Without a file, what the kubelet gives to the pod.
    """

    def load(settings: Settings) -> None:
        if not Path(path).is_file():
            raise KubeConfigError(f"read kubeconfig {path}", "the file does not exist")
        try:
            # The loader is a coroutine that reads files; in this thread it has a loop of its own to block.
            asyncio.run(load_kube_config(path, client_configuration=settings, persist_config=False))
        except _UNREADABLE as error:
            raise KubeConfigError(f"read kubeconfig {path}", _words(error)) from error

    return load if path else in_cluster()


def in_cluster(environ: Mapping[str, str] | None = None, folder: Path = SERVICE_ACCOUNT) -> Load:
    """Reads what the kubelet gives to every pod: address in the environment, CA and token in a folder."""
    more: dict[str, Any] = {} if environ is None else {"environ": dict(environ)}

    def load(settings: Settings) -> None:
        files = str(folder / "token"), str(folder / "ca.crt")
        try:
            InClusterConfigLoader(*files, try_refresh_token=False, **more).load_and_set(settings)
        except _UNREADABLE as error:
            why = _words(error).rstrip(".")
            remedy = f"mount the pod's service account token at {folder} (the chart's volume token), or set kubeconfig"
            raise KubeConfigError("read the service account of the pod", f"{why}; {remedy}") from error

    return load


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
