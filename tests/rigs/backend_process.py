# SPDX-License-Identifier: Apache-2.0
"""A made-up node, and nri-backend as a process on it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from numa_contract.records import AllocationRecord

from tests.fakes.runtime import FakeRuntime, running
from tests.fakes.runtime_levels import RuntimeOptions
from tests.fakes.state_server import StateServer, state_server
from tests.rigs.builders import cpu_record, memory_record, write_claim

UID = "5f0d3a52-0000-4000-8000-00000000000a"
POD = "pod-of-the-claim"


@dataclass(frozen=True)
class Node:
    """The directories of a made-up node: 8 CPUs, no hugepages."""

    root: Path

    @property
    def options(self) -> RuntimeOptions:
        return RuntimeOptions(
            socket=self.root / "nri.sock", cdi_dirs=(self.root / "cdi",), cgroup_root=self.root / "cgroup"
        )

    def state_socket(self, pod_uid: str) -> Path:
        return self.root / "run" / pod_uid / "state.sock"

    def claim(self, cpus: str) -> str:
        """Writes the file of a claim for CPUs, as the frontend does, and returns its CDI device."""
        return self._written(cpu_record(UID, f"part={cpus}", pods=[POD]))

    def memory_claim(self, size: int, **parameters: object) -> str:
        """Writes the file of a claim for so many bytes of NUMA node 1, and returns its CDI device."""
        return self._written(memory_record(UID, ("part", 1, size, 4096), pods=[POD], part=parameters))

    def _written(self, record: AllocationRecord) -> str:
        write_claim(self.root / "cdi", record)
        return record.cdi_id("part")


def made_up_node(root: Path) -> Node:
    """Makes a node without a runtime yet; ``root`` must be short enough for sockets."""
    for made in ("cdi", "host/proc/self", "host/sys/devices/system/cpu", "host/sys/kernel/mm/hugepages"):
        (root / made).mkdir(parents=True)
    (root / "host/sys/devices/system/cpu/online").write_text("0-7\n")
    return Node(root)


@contextlib.asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts the command; kills it if it is still there at the end."""
    environment = {key: value for key, value in os.environ.items() if key not in ("POD_UID", "NODE_NAME")}
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nri_backend", *arguments, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        _, log = await started.communicate()
        print(log.decode())


def backend(node: Node, pod_uid: str, *more: str) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    paths = {"run-dir": "run", "cdi-dir": "cdi", "nri-socket": "nri.sock", "cgroup-root": "cgroup", "host-root": "host"}
    arguments = [f"--{flag}={node.root / name}" for flag, name in paths.items()]
    return process(*arguments, f"--pod-uid={pod_uid}", *(more or ("--bind-address=off",)))


async def leave(started: asyncio.subprocess.Process) -> int:
    """Asks the process to leave; its exit code. TimeoutError after 2 s."""
    started.send_signal(signal.SIGTERM)
    async with asyncio.timeout(2):
        return await started.wait()


def last(server: StateServer, key: str) -> object:
    return server.leases[-1][key] if server.leases else None


async def plain(runtime: FakeRuntime, name: str) -> Callable[[], str]:
    """Runs a container without a claim; what the kernel shows of its CPUs."""
    pod = await runtime.run_pod_sandbox(name)
    container = await runtime.create_container(pod, name)
    await runtime.start_container(container)
    return lambda: container.cgroup_file("cpuset.cpus.effective")


@contextlib.asynccontextmanager
async def enforced(
    node: Node, level: str = "0.12"
) -> AsyncIterator[tuple[FakeRuntime, StateServer, asyncio.subprocess.Process]]:
    """A runtime of an NRI level, a frontend, and a backend between them that enforces."""
    async with (
        running(replace(node.options, level=level)) as runtime,
        state_server(node.state_socket("one")) as frontend,
        backend(node, "one") as started,
    ):
        await frontend.until(lambda: bool(last(frontend, "complete") and last(frontend, "active")), 10)
        yield runtime, frontend, started
