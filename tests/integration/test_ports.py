# SPDX-License-Identifier: Apache-2.0
"""The open ports of both services serve probes and metrics, whatever else happens. tests/hostile floods them."""

import socket
from collections.abc import Callable

import pytest

from tests.stage.process import wait_for
from tests.stage.settings import OUR_BACKEND, OUR_FRONTEND
from tests.stage.stage import OpenStage
from tests.stage.wires import AnsweredError, ask_http


def probe(port: int, path: str) -> int:
    """Returns the HTTP status of a probe, or 0 while nothing listens on the port."""
    try:
        ask_http(f"http://127.0.0.1:{port}", path)
    except AnsweredError as error:
        return error.code
    except OSError:
        return 0
    return 200


def becomes(port: int, path: str, status: int) -> None:
    """Waits until a probe returns the given status."""
    wait_for(f"{path} to return {status}", lambda: probe(port, path) == status, 15)


def at(template: str, port: int) -> str:
    """Returns the command, modified so that it serves its probes on a port."""
    return template.replace("--bind-address=off", f"--bind-address=127.0.0.1:{port}")


def test_an_unregistered_frontend_is_live_and_reveals_nothing_else(open_stage: OpenStage, unused_tcp_port: int) -> None:
    """Without a backend, the frontend is live but not ready. Clients of the port learn nothing about claims."""
    stage = open_stage(backend="", frontend=at(OUR_FRONTEND, unused_tcp_port))
    frontend = stage.add_instance().frontend
    becomes(unused_tcp_port, "/healthz", 200)
    assert probe(unused_tcp_port, "/readyz") == 503
    assert probe(unused_tcp_port, "/metrics") == 200
    for path in ("/", "/v1/claims", "/v1/backend", "/openapi.json", "/docs"):
        assert probe(unused_tcp_port, path) == 404, path
    assert stage.kubelet("status")["endpoints"] == []
    assert frontend.alive


def test_the_status_page_port_is_opened_by_its_setting(open_stage: OpenStage, unused_tcp_port: int) -> None:
    """The port serves only the paths that the page needs, and does not wait for a backend."""
    stage = open_stage(backend="", config={"pagePort": unused_tcp_port})
    frontend = stage.add_instance().frontend
    becomes(unused_tcp_port, "/", 200)
    for path, status in {"/page.js": 200, "/v1/node": 200, "/v1/claims": 404, "/metrics": 404}.items():
        assert probe(unused_tcp_port, path) == status, path
    assert frontend.alive


def test_readiness_depends_on_the_runtime_and_liveness_does_not(
    open_stage: OpenStage, unused_tcp_port_factory: Callable[[], int]
) -> None:
    """The readiness probes of both services report that the connection to the runtime is lost. The liveness probes
    still succeed, because a restart would not restore the connection.
    """
    ports = unused_tcp_port_factory(), unused_tcp_port_factory()
    stage = open_stage(frontend=at(OUR_FRONTEND, ports[0]), backend=at(OUR_BACKEND, ports[1]))
    stage.add_instance()
    for port in ports:
        becomes(port, "/readyz", 200)
    next(process for process in stage.stand_ins if process.name == "runtime").kill()
    for port in ports:
        becomes(port, "/readyz", 503)
        assert probe(port, "/healthz") == 200


@pytest.mark.parametrize("service", ["frontend", "backend"])
def test_a_service_exits_if_its_port_is_in_use(open_stage: OpenStage, service: str) -> None:
    """A pod that cannot be probed must not look healthy; the log gives the cause in one line."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = at({"frontend": OUR_FRONTEND, "backend": OUR_BACKEND}[service], listening.getsockname()[1])
        stage = open_stage(**{"frontend": "", "backend": "", service: taken})
        process = stage.add_instance().programs[service]
        assert process.wait(15) == 1
        assert "ddress already in use" in process.tail()
        assert "Traceback" not in process.tail()


def test_the_backend_exits_if_the_node_is_not_set_up(open_stage: OpenStage) -> None:
    """The process exits before it creates anything, and prints one line without a traceback."""
    stage = open_stage(frontend="", backend=f"{OUR_BACKEND} --cgroup-root=/absent")
    backend = stage.add_instance().backend
    assert backend.wait(15) == 1
    assert "/absent is not a cgroup v2 hierarchy" in backend.tail()
    assert "Traceback" not in backend.tail()
