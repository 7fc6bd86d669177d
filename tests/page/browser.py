# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, controlled through its DevTools protocol: https://chromedevtools.github.io/devtools-protocol/."""

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.fakes.waiting import eventually

_PROGRAM: Final = "chromium"
_FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",  # required for root in a CI container, and safe, because the page is the project's own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--force-color-profile=srgb",
)


class PageError(Exception):
    """The page or the browser has reported an error."""


class Tab:
    """One page in the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        """Errors of the page: exceptions, console errors, and violations of its Content-Security-Policy."""

    async def call(self, method: str, **parameters: Any) -> Any:
        """Calls a protocol method and returns its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(30):
            while True:
                message = json.loads((await self._socket.receive()).data)
                self._note(message)
                if message.get("id") == number:
                    if "error" in message:
                        raise PageError(f"{method}: {message['error']}")
                    return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        match message:
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.errors.append(str(details.get("exception", details).get("description", details)))
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error" | "warning", "text": text}}}:
                self.errors.append(text)

    async def open(self, url: str) -> None:
        """Opens a page and waits until it has drawn the node."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.querySelectorAll('button[data-cpu]').length > 0")

    async def evaluate(self, code: str) -> Any:
        """Evaluates a JavaScript expression in the page and returns its JSON value."""
        answer = await self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise PageError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Waits until a JavaScript expression is true."""
        async with asyncio.timeout(20):
            while not await self.evaluate(condition):  # noqa: ASYNC110 - a page tells nobody
                await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        """Presses a key by its DOM name."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **more)

    async def screen(self, width: int, height: int, scheme: str) -> None:
        """Sets the window size in pixels, and the colour scheme: ``light`` or ``dark``."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self, *, whole: bool = True) -> bytes:
        """Returns a PNG of the whole page, or of the window."""
        data = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(data["data"])


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Tab]:
    """Runs the browser with its own profile directory and yields its only tab."""
    program = shutil.which(_PROGRAM)
    if program is None:
        raise PageError("chromium is not installed; make page-check installs it")
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        program, *_FLAGS, f"--user-data-dir={profile}", "about:blank", stdout=quiet, stderr=quiet
    )
    try:
        port = await _port(profile / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                [target] = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.wait()


async def _port(path: Path, process: asyncio.subprocess.Process) -> int:
    """Waits for the file that the browser writes its port to."""
    await eventually(lambda: process.returncode is not None or (path.exists() and path.read_text()), 60)
    if process.returncode is not None:
        raise PageError(f"chromium ended with status {process.returncode}")
    return int(path.read_text().split()[0])  # noqa: ASYNC240 - one line
