# SPDX-License-Identifier: Apache-2.0
"""The fake runtime as a separate process, and the calls that its control socket accepts.

Usage:

    python -m tests.fakes.runtime --socket nri.sock --control control.sock [--cdi-dirs DIR...] [--cgroup-root DIR] ...
"""

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.json_format import ParseDict

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.control import Calls, serve, stopping
from tests.fakes.runtime_levels import LEVELS, RuntimeOptions
from tests.fakes.runtime_store import Container, OperationError, Pod
from tests.fakes.runtime_wire import TrunkClosedError

if TYPE_CHECKING:
    from tests.fakes.runtime import FakeRuntime

    Running = Callable[[RuntimeOptions], AbstractAsyncContextManager[FakeRuntime]]

_M = TypeVar("_M", pb.Container, pb.PodSandbox)
Given = Mapping[str, Any]
# Calls that are passed on to the runtime. A pod or a container is identified by id, UID or name.
_OPERATIONS = (
    *("run_pod_sandbox", "remove_pod", "restart", "create_container", "start_container", "update_container"),
    *("stop_container", "remove_container"),
)


class RuntimeControl:
    """The control socket's calls: operations, queries, and faults.

    A fault is input that a broken runtime, or another program in its place, may send to its plugins: bytes, events,
    snapshots. It does not change the fake's own state.
    """

    def __init__(self, runtime: "FakeRuntime") -> None:
        self._runtime = runtime

    def calls(self) -> Calls:
        """Returns the calls that the socket accepts, keyed by name."""
        others = ("hooks", "plugins", "wait_plugins", "send_bytes", "send_event", "list_also")
        return {name: self._operation(name) for name in _OPERATIONS} | {name: getattr(self, name) for name in others}

    def _operation(self, name: str) -> Any:
        async def carry_out(**args: Any) -> Any:
            if "pod" in args:
                args["pod"] = self._pod(args["pod"])
            if "container" in args:
                args["container"] = self._container(args["container"])
            made = await getattr(self._runtime, name)(**args)
            return _described(made or args.get("container"))

        return carry_out

    async def hooks(self) -> list[dict[str, Any]]:
        """Returns every call to a plugin so far."""
        return [asdict(call) for call in self._runtime.calls]

    async def plugins(self) -> dict[str, Any]:
        """Returns the active plugins, and the messages that containerd would log."""
        return {"active": self._runtime.plugins, "log": self._runtime.log}

    async def wait_plugins(self, count: int, seconds: float = 10.0) -> list[str]:
        """Waits until at least this many plugins are active."""
        await self._runtime.wait_until(lambda runtime: len(runtime.plugins) >= count, seconds)
        return self._runtime.plugins

    async def send_bytes(self, data: str) -> int:
        """Writes bytes, given as hexadecimal digits, to every plugin and returns the number of plugins."""
        plugins = list(self._runtime.host.plugins)
        for plugin in plugins:
            with suppress(TrunkClosedError):
                await plugin.trunk.write_bytes(bytes.fromhex(data))
        return len(plugins)

    async def send_event(self, method: str, container: Given, pod: Given | None = None) -> None:
        """Sends any event. The container and the pod are given as messages in JSON form, or as the ids of existing
        ones. Raises OperationError if a plugin rejects it.
        """
        request = getattr(pb, f"{method}Request")(pod=self._sandbox(pod or {}), container=self._message(container))
        async with self._runtime.host.node_lock:
            await self._runtime.host.relay(method, request)

    async def list_also(self, containers: Sequence[Given]) -> None:
        """Sets the containers that later snapshots list in addition to the existing ones."""
        self._runtime.phantom_containers = [self._message(container) for container in containers]

    def _message(self, given: Given) -> pb.Container:
        known = self._runtime.containers.get(given.get("id", ""))
        return _overlaid(pb.Container(), known.message if known else None, given)

    def _sandbox(self, given: Given) -> pb.PodSandbox:
        known = self._runtime.pods.get(given.get("id", ""))
        return _overlaid(pb.PodSandbox(), known.message if known else None, given)

    def _pod(self, text: str) -> Pod:
        for pod in self._runtime.pods.values():
            if text in (pod.id, pod.uid, pod.message.name):
                return pod
        raise OperationError(f"there is no pod {text!r}")

    def _container(self, text: str) -> Container:
        # The newest container is found first, because a restarted container has the same name as the previous one.
        for container in reversed(self._runtime.containers.values()):
            if text in (container.id, container.name):
                return container
        raise OperationError(f"there is no container {text!r}")


def _overlaid(message: _M, known: _M | None, given: Given) -> _M:
    if known is not None:
        message.CopyFrom(known)
    return ParseDict(dict(given), message)


def _described(made: Pod | Container | None) -> dict[str, Any] | None:
    if made is None:
        return None
    if isinstance(made, Pod):
        return {"id": made.id, "uid": made.uid, "cgroup_parent": made.message.linux.cgroup_parent}
    return {
        "id": made.id,
        "name": made.name,
        "env": made.env,
        "mounts": [
            {"destination": m.destination, "type": m.type, "source": m.source, "options": list(m.options)}
            for m in made.message.mounts
        ],
        "cpus": made.cpus,
        "cgroup": str(made.directory) if made.directory else None,
    }


async def _serve(options: RuntimeOptions, control: Path, running: "Running") -> None:
    stop = stopping()
    async with running(options) as runtime, serve(control, RuntimeControl(runtime).calls(), OperationError):
        await stop.wait()


def main(running: "Running") -> None:
    """Parses the fake's command line and runs the fake."""
    parser = argparse.ArgumentParser(prog="tests.fakes.runtime", description="A fake of containerd's side of NRI.")
    parser.add_argument("--socket", type=Path, required=True, help="socket for plugins")
    parser.add_argument("--control", type=Path, required=True, help="socket for calls as JSON lines")
    parser.add_argument("--level", choices=sorted(LEVELS), default="0.12", help="NRI release")
    parser.add_argument("--cdi-dirs", type=Path, nargs="*", default=[], help="later directories take precedence")
    parser.add_argument("--cgroup-root", type=Path, help="directory for a fake cgroup tree")
    parser.add_argument("--cgroup-driver", choices=("systemd", "cgroupfs"), default="systemd")
    parser.add_argument("--machine-cpus", default="0-7", help="CPU list of the root cgroup")
    parser.add_argument("--machine-mems", default="0-1", help="node list of the root cgroup")
    parser.add_argument(
        "--hugepage-sizes", nargs="*", default=["2MB", "1GB"], help="page sizes as in hugetlb.<size>.max"
    )
    parser.add_argument("--partitions", action="store_true", help="create the files of cpuset partitions in cgroups")
    parser.add_argument("--request-seconds", type=float, default=2.0, help="timeout for one plugin call")
    given = vars(parser.parse_args())
    control = given.pop("control")
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    options = RuntimeOptions(**fields)
    try:
        asyncio.run(_serve(options, control, running))
    finally:
        options.socket.unlink(missing_ok=True)
