# SPDX-License-Identifier: Apache-2.0
"""The stand-in runtime as a process of its own, driven by JSON lines over a unix socket.

    python -m tests.fakes.runtime --socket nri.sock --control control.sock [--cdi-dir DIR] [--cgroup-root DIR] ...
    python -m tests.fakes.runtime_control --control control.sock create_container pod=web name=app env='["A=B"]'

A request is ``{"call": NAME, "args": {...}}``, an answer ``{"result": ...}`` or ``{"error": TEXT}``.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fakes.runtime_faults import RuntimeFaults
from tests.fakes.runtime_levels import LEVELS, RuntimeOptions
from tests.fakes.runtime_store import Container, OperationError, Pod

if TYPE_CHECKING:
    from tests.fakes.runtime import FakeRuntime

    Running = Callable[[RuntimeOptions], AbstractAsyncContextManager[FakeRuntime]]


_LONGEST_LINE = 64 << 20


class RuntimeControl:
    """The calls that may come over the control socket."""

    def __init__(self, runtime: "FakeRuntime") -> None:
        self._runtime = runtime
        self._clients: set[asyncio.StreamWriter] = set()
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            name: getattr(self, f"_{name}")
            for name in (
                "run_pod_sandbox",
                "create_container",
                "start_container",
                "update_container",
                "stop_container",
                "remove_container",
                "remove_pod",
                "containers",
                "hooks",
                "plugins",
                "wait_plugins",
                "restart",
            )
        }
        faults = RuntimeFaults(runtime)
        self._calls |= {name: getattr(faults, name) for name in ("send_bytes", "send_event", "list_also")}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one client until it hangs up."""
        self._clients.add(writer)
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await writer.drain()
            writer.close()
        self._clients.discard(writer)

    def hang_up(self) -> None:
        """Ends every client's connection."""
        for writer in self._clients:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"result": await self._calls[request["call"]](**request.get("args", {}))}
        except TimeoutError:
            return {"error": "timed out"}
        except (OperationError, ValueError, TypeError, KeyError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    async def _run_pod_sandbox(self, **wanted: Any) -> dict[str, Any]:
        pod = await self._runtime.run_pod_sandbox(**wanted)
        return {"id": pod.id, "uid": pod.uid, "cgroup_parent": pod.message.linux.cgroup_parent}

    async def _create_container(self, pod: str, **wanted: Any) -> dict[str, Any]:
        return _describe(await self._runtime.create_container(self._pod(pod), **wanted))

    async def _start_container(self, container: str) -> dict[str, Any]:
        found = self._container(container)
        await self._runtime.start_container(found)
        return _describe(found)

    async def _update_container(self, container: str, **wanted: Any) -> dict[str, Any]:
        found = self._container(container)
        await self._runtime.update_container(found, **wanted)
        return _describe(found)

    async def _stop_container(self, container: str) -> None:
        await self._runtime.stop_container(self._container(container))

    async def _remove_container(self, container: str) -> None:
        await self._runtime.remove_container(self._container(container))

    async def _remove_pod(self, pod: str) -> None:
        await self._runtime.remove_pod(self._pod(pod))

    async def _containers(self) -> list[dict[str, Any]]:
        return [_describe(container) for container in self._runtime.containers.values()]

    async def _hooks(self) -> list[dict[str, Any]]:
        return [asdict(call) for call in self._runtime.calls]

    async def _plugins(self) -> dict[str, Any]:
        return {"active": self._runtime.plugins, "log": self._runtime.log}

    async def _wait_plugins(self, count: int, seconds: float = 10.0) -> list[str]:
        await self._runtime.wait_until(lambda runtime: len(runtime.plugins) >= count, seconds)
        return self._runtime.plugins

    async def _restart(self, down_seconds: float = 0.0) -> None:
        await self._runtime.restart(down_seconds)

    def _pod(self, text: str) -> Pod:
        for pod in self._runtime.pods.values():
            if text in (pod.id, pod.uid, pod.message.name):
                return pod
        raise OperationError(f"there is no pod {text!r}")

    def _container(self, text: str) -> Container:
        # The newest of a name: a restarted container has the name of the one before it.
        for container in reversed(self._runtime.containers.values()):
            if text in (container.id, container.name):
                return container
        raise OperationError(f"there is no container {text!r}")


def _describe(container: Container) -> dict[str, Any]:
    resources = container.message.linux.resources
    return {
        "id": container.id,
        "name": container.name,
        "pod_uid": container.pod.uid,
        "running": container.running,
        "env": container.env,
        "mounts": [
            {"destination": m.destination, "type": m.type, "source": m.source, "options": list(m.options)}
            for m in container.message.mounts
        ],
        "cpus": container.cpus,
        "mems": container.mems,
        "memory_limit": resources.memory.limit.value,
        "hugepage_limits": {limit.page_size: limit.limit for limit in resources.hugepage_limits},
        "unified": dict(resources.unified),
        "cgroup": str(container.directory) if container.directory else None,
    }


async def serve(options: RuntimeOptions, control: Path, running: "Running") -> None:
    """Runs the stand-in and its control socket until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running(options) as runtime:
        served = RuntimeControl(runtime)
        server = await asyncio.start_unix_server(served.serve, control, limit=_LONGEST_LINE)
        await stop.wait()
        server.close()
        served.hang_up()


def main(running: "Running") -> None:
    """The command line of the stand-in."""
    parser = argparse.ArgumentParser(prog="tests.fakes.runtime", description="A stand-in for containerd's side of NRI.")
    parser.add_argument("--socket", type=Path, required=True, help="where plugins connect")
    parser.add_argument("--control", type=Path, required=True, help="where JSON lines are taken")
    parser.add_argument("--level", choices=sorted(LEVELS), default="0.12", help="NRI release")
    parser.add_argument("--cdi-dir", type=Path, action="append", default=[], help="later ones win")
    parser.add_argument("--cgroup-root", type=Path, help="make an imitated cgroup tree here")
    parser.add_argument("--cgroup-driver", choices=("systemd", "cgroupfs"), default="systemd")
    parser.add_argument("--machine-cpus", default="0-7", help="CPU list of the root cgroup")
    parser.add_argument("--machine-mems", default="0-1", help="node list of the root cgroup")
    parser.add_argument("--hugepage-size", action="append", default=[], help="as in hugetlb.<size>.max (2MB and 1GB)")
    parser.add_argument("--request-seconds", type=float, default=2.0, help="patience for one call of a plugin")
    given = parser.parse_args()
    options = RuntimeOptions(
        socket=given.socket,
        level=given.level,
        cdi_dirs=tuple(given.cdi_dir),
        cgroup_root=given.cgroup_root,
        cgroup_driver=given.cgroup_driver,
        machine_cpus=given.machine_cpus,
        machine_mems=given.machine_mems,
        hugepage_sizes=tuple(given.hugepage_size) or ("2MB", "1GB"),
        request_seconds=given.request_seconds,
    )
    given.control.unlink(missing_ok=True)
    try:
        asyncio.run(serve(options, given.control, running))
    finally:
        for path in (given.control, given.socket):
            path.unlink(missing_ok=True)


async def call(control: Path, name: str, /, **args: Any) -> Any:
    """One call over the control socket, for tests and scripts. Raises OperationError with the stand-in's text."""
    reader, writer = await asyncio.open_unix_connection(control, limit=_LONGEST_LINE)
    try:
        writer.write(json.dumps({"call": name, "args": args}).encode() + b"\n")
        answer = json.loads(await reader.readline())
    finally:
        writer.close()
    if "error" in answer:
        raise OperationError(answer["error"])
    return answer["result"]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def client() -> None:
    """The command line of the control socket: NAME key=value..., values as JSON or plain text."""
    parser = argparse.ArgumentParser(prog="tests.fakes.runtime_control")
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("call")
    parser.add_argument("args", nargs="*", metavar="key=value")
    given = parser.parse_args()
    args = {key: _value(text) for key, _, text in (arg.partition("=") for arg in given.args)}
    try:
        result = asyncio.run(call(given.control, given.call, **args))
    except (OperationError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    client()
