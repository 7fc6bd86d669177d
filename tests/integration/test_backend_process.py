# SPDX-License-Identifier: Apache-2.0
"""nri-backend as a process, between the stand-in runtime and a stand-in for the frontend's state endpoint."""

import asyncio
import contextlib
import json

import pytest
from numa_contract.names import CPU_DRIVER, cdi_file_name

from tests.fakes.runtime import running as running_runtime
from tests.fakes.state_server import state_server
from tests.fakes.waiting import eventually
from tests.rigs.backend_process import POD, UID, Node, backend, enforced, last, leave, plain, process


async def test_it_connects_tells_and_leaves(node: Node) -> None:
    """From exec to synchronised and told; a claim moves others away; SIGTERM ends it with 0, the lock file stays."""
    async with running_runtime(node.options) as runtime, state_server(node.state_socket("one")) as frontend:
        cpus = await plain(runtime, "web")
        async with backend(node, "one") as started:
            await frontend.until(lambda: bool(last(frontend, "complete") and last(frontend, "active")), 10)
            assert [report["name"] for report in frontend.containers.values()] == ["web"]
            assert (last(frontend, "synchronized"), last(frontend, "pool")) == (True, "0-7")
            await frontend.until(lambda: frontend.waiting == 1)
            device = node.claim("2-3")
            frontend.change_records()
            await eventually(lambda: cpus() == "0-1,4-7")
            pod = await runtime.run_pod_sandbox("db", uid=POD)
            container = await runtime.create_container(pod, "db", cdi_devices=[device])
            await runtime.start_container(container)
            assert container.cgroup_file("cpuset.cpus.effective") == "2-3"
            await frontend.until(lambda: any(r["name"] == "db" for r in frontend.containers.values()))
            assert await leave(started) == 0
        await runtime.wait_until(lambda runtime: not runtime.plugins)
        stamp = json.loads((node.root / "run/backend/active.lock").read_text())
        assert stamp["instance"].startswith("one/")
        assert stamp["serving"] is True


async def test_hand_over_within_a_second(node: Node) -> None:
    """kill -9 of the active instance: the standby, which knew everything and did nothing, acts within a second."""
    async with running_runtime(node.options) as runtime, contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(state_server(node.state_socket("one")))
        second = await stack.enter_async_context(state_server(node.state_socket("two")))
        old = await stack.enter_async_context(backend(node, "one"))
        await first.until(lambda: bool(last(first, "complete") and last(first, "active")), 10)
        await stack.enter_async_context(backend(node, "two"))
        await second.until(lambda: bool(last(second, "complete")), 10)
        assert last(second, "active") is False
        device = node.claim("2-3")
        pod = await runtime.run_pod_sandbox("db", uid=POD)
        # Two plugins that set the same field would fail this.
        container = await runtime.create_container(pod, "db", cdi_devices=[device])
        await runtime.start_container(container)
        assert container.cpus == "2-3"
        cpus = await plain(runtime, "web")
        assert cpus() == "0-1,4-7"
        old.kill()
        await second.until(lambda: last(second, "active") is True, seconds=1)
        (node.root / "cdi" / cdi_file_name(CPU_DRIVER, UID)).unlink()
        await runtime.remove_pod(pod)
        await eventually(lambda: cpus() == "0-7")


async def test_a_restarted_runtime_is_told_at_once(node: Node) -> None:
    """The runtime goes and comes: the lease says so each time, and what it lists then is what is told."""
    async with enforced(node) as (runtime, frontend, _):
        await plain(runtime, "web")
        before = len(frontend.leases)
        await runtime.restart(0.2)
        await frontend.until(lambda: any(not lease["synchronized"] for lease in frontend.leases[before:]))
        await frontend.until(lambda: bool(last(frontend, "complete")))
        assert len(frontend.containers) == 1


@pytest.mark.fault("security S14")
async def test_it_writes_in_its_own_directory_alone(node: Node) -> None:
    """Below the run directory there is one that is the backend's; the rest, a lock of 0.1.0 too, may be read-only."""
    (node.root / "run").mkdir()
    (node.root / "run/active.lock").write_text("old/1\n")
    async with enforced(node) as (_, _, started):
        assert sorted(path.name for path in (node.root / "run").iterdir()) == ["active.lock", "backend", "one"]
        assert (node.root / "run/backend").stat().st_mode & 0o777 == 0o700
        assert [path.name for path in (node.root / "run/one").iterdir()] == ["state.sock"]
        assert await leave(started) == 0
    assert (node.root / "run/active.lock").read_text() == "old/1\n"


async def http(port: int, target: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {target} HTTP/1.0\r\n\r\n".encode())
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()


async def test_probes_follow_the_runtime(node: Node, unused_tcp_port: int) -> None:
    """Alive without a runtime, not ready; ready as soon as it is synchronised; what was counted is in the lease."""
    async with state_server(node.state_socket("one")) as frontend:
        (node.root / "cgroup").mkdir()
        (node.root / "cgroup/cgroup.controllers").write_text("cpuset\n")
        async with backend(node, "one", f"--bind-address=127.0.0.1:{unused_tcp_port}") as started:
            await frontend.until(lambda: bool(frontend.leases), 10)
            assert (await http(unused_tcp_port, "/healthz")).startswith("HTTP/1.1 200")
            assert (await http(unused_tcp_port, "/readyz")).startswith("HTTP/1.1 503")
            async with running_runtime(node.options):
                await frontend.until(lambda: bool(last(frontend, "synchronized")))
                assert (await http(unused_tcp_port, "/readyz")).startswith("HTTP/1.1 200")
                assert (await http(unused_tcp_port, "/metrics")).startswith("HTTP/1.1 404")
                metrics = {metric["name"]: metric["samples"] for metric in frontend.leases[-1]["metrics"]}
                assert metrics["synchronized"][0]["value"] == 1
                counted = {tuple(sample["labels"]): sample["value"] for sample in metrics["hooks"]}
                assert counted["Synchronize", "ok"] == 1
            await frontend.until(lambda: not last(frontend, "synchronized"))
            # A runtime that is away for a moment makes no pod unready.
            assert (await http(unused_tcp_port, "/readyz")).startswith("HTTP/1.1 200")
            assert await leave(started) == 0


async def test_a_removed_lock_file_ends_it(node: Node) -> None:
    """Whoever no longer holds the lock that others will take must stop acting: exit 1, and the log says why."""
    async with enforced(node) as (_, _, started):
        (node.root / "run/backend/active.lock").unlink()
        assert started.stderr is not None
        async with asyncio.timeout(5):
            log = (await started.stderr.read()).decode()
            assert await started.wait() == 1
    assert "replaced by another instance, or removed" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--colour"], 2, "unrecognized arguments"),
        (["--bind-address=off"], 2, "set POD_UID"),
        (["--pod-uid=a", "--cgroup-root=/absent"], 1, "/absent is no cgroup v2 hierarchy"),
        (["--pod-uid=a", f"--run-dir=/{'x' * 100}"], 1, "the kernel allows 107"),
    ],
)
async def test_a_bad_start_is_one_line(arguments: list[str], code: int, expected: str) -> None:
    """Wrongly told is exit 2, a node that is not set up is exit 1; never a traceback."""
    async with process(*arguments, "--log-level=error") as started:
        async with asyncio.timeout(30):
            _, log = await started.communicate()
        assert started.returncode == code
        (line,) = log.decode().splitlines()
        assert expected in line


async def test_a_taken_port_is_fatal(node: Node, unused_tcp_port: int) -> None:
    """Without its probes the pod would be restarted for no visible reason; so it does not start, and says why."""
    (node.root / "cgroup").mkdir()
    (node.root / "cgroup/cgroup.controllers").write_text("cpuset\n")
    taken = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", unused_tcp_port)
    async with taken, backend(node, "one", f"--bind-address=127.0.0.1:{unused_tcp_port}") as started:
        async with asyncio.timeout(30):
            _, log = await started.communicate()
        assert started.returncode == 1
        assert "choose another --bind-address" in log.decode()
