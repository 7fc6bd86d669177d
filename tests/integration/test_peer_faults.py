# SPDX-License-Identifier: Apache-2.0
"""What the CPU peer gets wrong, by the numbers of section 9 of its page of facts: what needs processes and sockets."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rigs.nri_rig import nri_rig
from tests.stage.pods import claim_pod, cpus
from tests.stage.process import wait_for
from tests.stage.settings import OUR_BACKEND, OUR_FRONTEND
from tests.stage.stage import OpenStage, Stage
from tests.stage.wires import AnsweredError, ask_http

# What a DRA driver needs of the API server: the claims it prepares, its slices, its Node; events tell of trouble.
_NEEDED = {
    ("get", "nodes"),
    ("get", "resourceclaims"),
    ("list", "resourceclaims"),
    ("list", "resourceslices"),
    ("watch", "resourceslices"),
    ("create", "resourceslices"),
    ("update", "resourceslices"),
    ("delete", "resourceslices"),
    ("create", "events"),
}


def probe(port: int, path: str) -> int:
    """The status of a probe over TCP; 0 while nobody listens."""
    try:
        ask_http(f"http://127.0.0.1:{port}", path)
    except AnsweredError as error:
        return error.code
    except OSError:
        return 0
    return 200


def becomes(port: int, path: str, status: int) -> None:
    """Waits until a probe answers with a status."""
    wait_for(f"{status} of {path}", lambda: probe(port, path) == status, 15)


def at(template: str, port: int) -> str:
    """A command that serves its probes on a port."""
    return template.replace("--bind-address=off", f"--bind-address=127.0.0.1:{port}")


@contextmanager
def taken_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.fault("cpu peer 9.2.5")
async def test_the_runtime_may_restart_any_number_of_times(tmp_path: Path) -> None:
    """There is no count of attempts that runs out: after each restart we are connected and synchronised again."""
    async with nri_rig(tmp_path) as rig:
        for epoch in range(2, 10):
            await rig.runtime.restart(0.02)
            await rig.synchronized(epoch)
        assert rig.hooks.names.count("synchronize") == 9


@pytest.mark.fault("cpu peer 9.3.6")
def test_liveness_does_not_wait_for_the_registration(open_stage: OpenStage, unused_tcp_port: int) -> None:
    """Without a backend nothing is registered for minutes; meanwhile the process is alive, and says what it lacks."""
    stage = open_stage(backend="", frontend=at(OUR_FRONTEND, unused_tcp_port))
    frontend = stage.add_instance().frontend
    assert frontend is not None
    becomes(unused_tcp_port, "/healthz", 200)
    assert probe(unused_tcp_port, "/readyz") == 503
    assert stage.kubelet("status")["endpoints"] == []
    assert frontend.alive


@pytest.mark.fault("cpu peer 9.4.6")
def test_readiness_follows_the_runtime_and_liveness_does_not(
    open_stage: OpenStage, unused_tcp_port_factory: Callable[[], int]
) -> None:
    """Both services say on their probes that the link to the runtime is gone; no restart would bring it back."""
    ports = unused_tcp_port_factory(), unused_tcp_port_factory()
    stage = open_stage(frontend=at(OUR_FRONTEND, ports[0]), backend=at(OUR_BACKEND, ports[1]))
    stage.add_instance()
    for port in ports:
        becomes(port, "/readyz", 200)
    next(process for process in stage.stand_ins if process.name == "runtime").kill()
    for port in ports:
        becomes(port, "/readyz", 503)
        assert probe(port, "/healthz") == 200


@pytest.mark.fault("cpu peer 9.4.6")
def test_a_taken_port_ends_the_process(open_stage: OpenStage) -> None:
    """A pod that nobody can probe must not look healthy; the log names the address."""
    with taken_port() as port:
        stage = open_stage(backend="", frontend=at(OUR_FRONTEND, port))
        frontend = stage.add_instance().frontend
        assert frontend is not None
        assert frontend.wait(15) == 1
        assert "ddress already in use" in frontend.tail()


def asked(stage: Stage) -> set[tuple[str, str]]:
    """Verb and resource of everything that the driver asked the API server for."""
    served = stage.api("/fake", "POST", {"served": True})["served"]
    return {(one["verb"], one["resource"]) for one in served if one["agent"] == "dra-driver-numa"}


@pytest.mark.fault("cpu peer 9.4.7")
def test_the_open_port_shows_probes_and_metrics_alone(open_stage: OpenStage, unused_tcp_port: int) -> None:
    """Whoever reaches a node's port learns nothing of its claims and changes nothing."""
    open_stage(backend="", frontend=at(OUR_FRONTEND, unused_tcp_port)).add_instance()
    becomes(unused_tcp_port, "/metrics", 200)
    for path in ("/", "/v1/claims", "/v1/backend", "/openapi.json", "/docs"):
        assert probe(unused_tcp_port, path) == 404, path


@pytest.mark.fault("cpu peer 9.4.7")
def test_few_permissions_are_used(open_stage: OpenStage) -> None:
    """Through a claim's whole life no pod is read, no status is written, and every slice is that of the own node."""
    stage = open_stage()
    instance = stage.add_instance()
    stage.wait_ready(instance)
    with claim_pod(stage, "db", cpus(2)) as pod:
        pod.prepare()
        pod.run()
    used = asked(stage)
    assert used <= _NEEDED
    assert {("get", "resourceclaims"), ("create", "resourceslices")} <= used
    assert {one["spec"]["nodeName"] for one in stage.slices()} == {stage.settings.node}
