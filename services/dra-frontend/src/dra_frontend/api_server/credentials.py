# SPDX-License-Identifier: Apache-2.0
"""Where the API server is and who we are: kubeconfig or service account, read again since tokens and CAs rotate."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from dra_frontend.api_server.errors import KubeConfigError
from dra_frontend.api_server.library import ConfigException, InClusterConfigLoader, load_kube_config

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The kubelet renews a projected token at 80 % of its life (10 minutes at least); client-go also reads it each minute.
TOKEN_SECONDS: Final = 60.0
_UNREADABLE: Final = (ConfigException, OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError)


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


class Access:
    """The settings of one API server. ``load`` blocks; it runs in a thread, at the start and for each renewal."""

    def __init__(self, load: Callable[[Settings], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._clock = clock
        self._read_at = 0.0
        self._reading = asyncio.Lock()
        self.settings = Settings()
        self.trust: tuple[object, ...] = ()
        """Changes with the server, its CA bundle and our client certificate."""

    @property
    def _token(self) -> str | None:
        return self.settings.api_key.get("BearerToken")

    async def open(self) -> None:
        """Reads everything for the first time. Raises KubeConfigError."""
        self._read_at = self._clock()
        self.settings, self.trust = await asyncio.to_thread(_loaded, self._load)

    async def authorization(self) -> str | None:
        """The value of the Authorization header, at most a minute old; None with client certificates only."""
        if self._clock() - self._read_at >= TOKEN_SECONDS:
            async with self._reading:
                if self._clock() - self._read_at >= TOKEN_SECONDS:
                    await self._read_again()
        return self._token

    async def has_newer(self, refused: str | None) -> bool:
        """True if there is another token than the one that the server did not accept; reads it where there was none."""
        async with self._reading:
            if self._token == refused:
                await self._read_again()
        return self._token != refused

    async def _read_again(self) -> None:
        # The kubelet swaps a symlink; what cannot be read between two swaps is read at the next call or minute.
        with suppress(KubeConfigError):
            await self.open()


def _loaded(load: Callable[[Settings], None]) -> tuple[Settings, tuple[object, ...]]:
    settings = Settings()
    load(settings)
    files = (settings.ssl_ca_cert, settings.cert_file, settings.key_file)
    return settings, (settings.host, settings.verify_ssl, *map(_stamp, files))


def _stamp(path: str | None) -> object:
    """Tells one content of a file from another, also behind a symbolic link that is swapped."""
    try:
        status = Path(path or "").stat()
    except OSError:
        return path
    return path, status.st_ino, status.st_size, status.st_mtime_ns


def kubeconfig(path: str) -> Callable[[Settings], None]:
    """Reads the current context of a kubeconfig file: tokens, token files, certificates, exec plugins."""

    def load(settings: Settings) -> None:
        if not Path(path).is_file():
            raise KubeConfigError(f"read kubeconfig {path}", "the file does not exist")
        try:
            # The loader is a coroutine that reads files; in this thread it has a loop of its own to block.
            asyncio.run(load_kube_config(path, client_configuration=settings, persist_config=False))
        except (*_UNREADABLE, yaml.YAMLError) as error:
            raise KubeConfigError(f"read kubeconfig {path}", _words(error)) from error
        _trim(settings)

    return load


def in_cluster(environ: Mapping[str, str] | None = None, folder: Path = SERVICE_ACCOUNT) -> Callable[[Settings], None]:
    """Reads what the kubelet gives to every pod: address in the environment, CA and token in a folder."""
    more: dict[str, Any] = {} if environ is None else {"environ": dict(environ)}

    def load(settings: Settings) -> None:
        try:
            InClusterConfigLoader(
                str(folder / "token"), str(folder / "ca.crt"), try_refresh_token=False, **more
            ).load_and_set(settings)
        except _UNREADABLE as error:
            remedy = "run in a pod with a service account token, or set kubeconfig"
            raise KubeConfigError("read the service account of the pod", f"{_words(error)} {remedy}") from error
        _trim(settings)

    return load


def _trim(settings: Settings) -> None:
    # A token file that ends in a newline is valid for kubectl; in a header the newline is an injection.
    settings.api_key = {key: value.strip() for key, value in settings.api_key.items()}


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
