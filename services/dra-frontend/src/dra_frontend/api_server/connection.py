# SPDX-License-Identifier: Apache-2.0
"""A pool of connections to one API server. Every call is limited in time and size, and uses current credentials."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from numa_contract.errors import shown

from dra_frontend.api_server.credentials import ConfigurationLoader, read_configuration
from dra_frontend.api_server.errors import (
    InvalidError,
    KubeConfigError,
    TooLargeError,
    UnavailableError,
    UnreachableError,
)
from dra_frontend.api_server.library import ApiClient, Configuration
from dra_frontend.api_server.requests import Call
from dra_frontend.api_server.responses import MAX_BYTES, is_event, read_status, response_error

# The kubelet allows Prepare 45 s. A call that fails after 10 s leaves time to retry, or to report the reason.
CALL_SECONDS: Final = 10.0
# The kubelet renews a projected token at 80 % of its lifetime (which is at least 10 minutes). client-go also reads the
# token every minute.
TOKEN_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 2.0
# The server sends a bookmark about once a minute; a longer silence means that the server is dead or unreachable.
_SILENCE_SECONDS: Final = 90.0
WATCH_SECONDS: Final = 300
"""Minimum time after which the server is asked to end a watch."""
MAX_WATCH_SECONDS: Final = 2 * WATCH_SECONDS
_CALL_LIMITS: Final = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
_SKIPPED_BYTES: Final = 8 * MAX_BYTES
"""Maximum length of an event that is skipped; a longer event ends the watch. In JSON, each `<`, `>` and `&` in a 1.5
MiB object takes six bytes.
"""
_HEAD_BYTES: Final = 16 << 10
_BUFFERED_BYTES: Final = 1 << 18
"""Maximum number of response bytes that are read ahead."""
AGENT: Final = "dra-driver-numa"


class _Session:
    """A client session without aiohttp's browser-like defaults, which kubernetes-asyncio has no options to change.

    * Redirects are returned, not followed. aiohttp would repeat the request up to ten times, and would send the token
      again if the host is the same.
    * Cookies are dropped. aiohttp would keep every response's cookies without a limit, and send them again.
    * Responses are not decompressed. This client requests no compression, and a compressed response of a few kilobytes
      could expand a thousandfold before its size is checked against the limit.
    * The environment is read once. With ``trust_env``, aiohttp would read ``~/.netrc`` and the proxy variables for each
      request, each in a thread, which takes longer than the rest of the request.
    """

    def __init__(self, session: aiohttp.ClientSession, proxy: str | None) -> None:
        """Replaces a session and takes over its connections. All requests use ``proxy``; None means no proxy."""
        self._session = aiohttp.ClientSession(
            connector=session.connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            proxy=proxy,
            read_bufsize=_BUFFERED_BYTES,
        )
        session.detach()

    async def request(self, **options: Any) -> aiohttp.ClientResponse:
        """Sends one request."""
        return await self._session.request(**options, allow_redirects=False)

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()


class Connection:
    """Sends calls to the API server. Every failure raises a KubeError that names the call.

    ``load`` blocks, so it runs in a thread, at startup and whenever the token, CA bundle or certificate is renewed.
    """

    def __init__(
        self,
        load: ConfigurationLoader,
        call_seconds: float = CALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        watch_seconds: float = MAX_WATCH_SECONDS + _SILENCE_SECONDS,
    ) -> None:
        """``watch_seconds`` is the time after which this client ends a watch if the server has not ended it as
        requested.
        """
        self._load = load
        self._call_seconds = call_seconds
        self._watch_limits = aiohttp.ClientTimeout(
            total=watch_seconds, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS
        )
        self._clock = clock
        self._read_at = 0.0
        self._reading = asyncio.Lock()
        self._trust: object = None
        self._clients: list[ApiClient] = []
        """The current client and the previous one, which may still have open requests."""

    async def open(self) -> None:
        """Reads the address and credentials without connecting. Raises KubeConfigError, or OSError if a file is
        unreadable.
        """
        self._read_at = self._clock()
        configuration, trust = await asyncio.to_thread(read_configuration, self._load)
        if trust != self._trust:
            self._clients.insert(0, _client(configuration))
            self._trust = trust
            for oldest in self._clients[2:]:
                self._clients.remove(oldest)
                await oldest.close()
        self._clients[0].configuration = configuration

    async def close(self) -> None:
        """Closes all connections."""
        for client in self._clients:
            await client.close()

    async def execute(self, call: Call, seconds: float | None = None) -> bytes:
        """Sends a call and returns the body of the successful response. ``seconds`` may shorten the connection's time
        limit.
        """
        seconds = self._call_seconds if seconds is None else min(seconds, self._call_seconds)
        try:
            async with asyncio.timeout(seconds), self._response(call, _CALL_LIMITS) as response:
                return await _body(call, response)
        except TimeoutError as error:
            raise UnavailableError(call.operation, f"no response within {seconds:.3g} s") from error

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Yields the lines of an endless response. Drops an incomplete last line. Skips an event that is too long,
        since the object's author controls the event's length.
        """
        async with self._response(call, self._watch_limits) as response:
            # readline() would copy the incomplete line for each received chunk, and a chunk may be only a few bytes.
            line, skipped = bytearray(), 0
            async for piece in response.content.iter_any():
                end, *following = piece.split(b"\n")
                line += end
                for begun in following:
                    if line.strip() and not skipped:
                        yield bytes(line)
                    line, skipped = bytearray(begun), 0
                if len(line) > MAX_BYTES:
                    skipped += len(line)
                    if skipped > _SKIPPED_BYTES or (skipped == len(line) and not is_event(line)):
                        raise TooLargeError(call.operation, f"an event is larger than {MAX_BYTES} bytes")
                    line.clear()

    async def authorization(self, rejected: str | None = "") -> str | None:
        """Returns the Authorization header, or None if only client certificates are used.

        The header is read again if it is more than a minute old, or if it equals ``rejected``, the header that the
        server did not accept.
        """
        if self._is_due(rejected):  # one caller reads the token; other callers use the old token unless it was refused
            async with self._reading:
                if self._is_due(rejected):
                    # A read may fail while the kubelet replaces the token's symlink, or when only one of a
                    # certificate's two files has been replaced. A later call retries: after a minute, or earlier if the
                    # server refuses the token.
                    with suppress(KubeConfigError, OSError, ValueError):
                        await self.open()
        return self._token

    @property
    def _token(self) -> str | None:
        return self._clients[0].configuration.api_key.get("BearerToken")

    def _is_due(self, rejected: str | None) -> bool:
        return self._clock() - self._read_at >= TOKEN_SECONDS or self._token == rejected

    @asynccontextmanager
    async def _response(self, call: Call, limits: aiohttp.ClientTimeout) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields the response to a call. Raises KubeError if the response is unsuccessful or the connection breaks."""
        response = None
        try:
            token = await self.authorization()
            response = await self._send(call, limits)
            if response.status == 401 and await self.authorization(token) != token:
                response.release()
                response = await self._send(call, limits)
            if not 200 <= response.status < 300:
                raise response_error(call, response.status, read_status(await _body(call, response)), response.headers)
            if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
                raise UnavailableError(
                    call.operation, f"the response is compressed ({shown(coding)}), which was not requested"
                )
            yield response
        except UnicodeEncodeError as error:
            raise InvalidError(call.operation, f"the document cannot be sent ({error.reason})") from error
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            # The exception's text is the URL, which may contain the proxy's password.
            text = "the URL of the server or of its proxy is not valid: check server and proxy-url in the kubeconfig"
            raise UnreachableError(call.operation, text) from None
        # ValueError: the token is not valid as a header value
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UnreachableError(call.operation, str(error) or type(error).__name__) from error
        finally:
            if response is not None:
                response.release()

    async def _send(self, call: Call, limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await self._clients[0].call_api(
            call.path,
            call.method,
            query_params=call.query,
            header_params={"Content-Type": call.media_type},
            body=call.body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=limits,
        )
        return response


def _client(configuration: Configuration) -> ApiClient:
    """Returns a client that sends requests and returns responses unchanged."""
    client = ApiClient(configuration)
    session = _Session(client.rest_client.pool_manager, _proxy_for(configuration.host or ""))
    client.rest_client.pool_manager = session  # type: ignore[assignment]
    client.user_agent = AGENT
    client.set_default_header("Accept", "application/json")
    # No compression: a small response could expand beyond the limit, and the server would spend CPU time on it.
    client.set_default_header("Accept-Encoding", "identity")
    return client


def _proxy_for(server: str) -> str | None:
    """Returns the proxy for a server from HTTPS_PROXY and NO_PROXY, as kubectl does, or None if there is none."""
    with suppress(ValueError):  # If the URL is invalid, the first request reports the error.
        url = urlsplit(server)
        if url.hostname and not proxy_bypass(url.hostname):
            return getproxies().get(url.scheme)
    return None


async def _body(call: Call, response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > MAX_BYTES:
            raise TooLargeError(
                call.operation, f"the response is larger than {MAX_BYTES} bytes", bytes(data[:_HEAD_BYTES])
            )
    return bytes(data)
