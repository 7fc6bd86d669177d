# SPDX-License-Identifier: Apache-2.0
"""The frontend's TCP port under attack by a peer on the network: claims, lease and probes go on."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.stage.pods import claim_pod, cpus
from tests.stage.settings import OUR_FRONTEND
from tests.stage.stage import OpenStage
from tests.stage.wires import ask_http

# Keeps 2,000 connections and opens new ones without a pause: idle, with half a header, with many requests at once, and
# with one answer that is never read.
_FLOOD = r"""
import itertools, socket, sys
address, held = ("127.0.0.1", int(sys.argv[1])), []
sent = (b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-a: ", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
for data in itertools.cycle(sent):
    peer = socket.socket()
    peer.settimeout(0.05)
    try:
        peer.connect(address)
        peer.send(data)
    except OSError:
        continue
    held = [*held[-1999:], peer]
"""


@contextmanager
def flood(port: int) -> Iterator[None]:
    """An attacker of a port; he has had a second when the block begins."""
    command = ["sh", "-c", 'ulimit -n 4096; exec "$0" "$@"', sys.executable, "-c", _FLOOD, str(port)]
    with subprocess.Popen(command) as attacker:
        try:
            time.sleep(1.0)
            yield
        finally:
            attacker.kill()


@pytest.mark.fault("frontend A7", "security S5")
def test_a_flood_delays_no_claim_no_lease_and_no_probe(open_stage: OpenStage, unused_tcp_port: int) -> None:
    """With a soft limit of 1024 files, as systemd leaves it, and more connections than that: all goes on in time."""
    bound = OUR_FRONTEND.replace("--bind-address=off", f"--bind-address=127.0.0.1:{unused_tcp_port}")
    stage = open_stage(frontend=f"bash -c 'ulimit -Sn 1024; exec {bound}'")
    instance = stage.add_ready_instance()
    assert instance.frontend is not None
    with flood(unused_tcp_port):
        began = time.monotonic()
        for number in range(3):
            with claim_pod(stage, f"db-{number}", cpus(2)) as pod:
                pod.prepare()
                assert pod.run().cpus() == stage.held(pod.claim_uid)
            assert ask_http(f"http://127.0.0.1:{unused_tcp_port}", "/healthz") == "ok\n"
            assert stage.state("/v1/backend", instance)["live"]
            assert len(list(Path(f"/proc/{instance.frontend.pid}/fd").iterdir())) < 200
        assert time.monotonic() - began < 20
    assert stage.unready(instance) == ""
    assert "dra_numa_backend_synchronized 1.0" in ask_http(f"http://127.0.0.1:{unused_tcp_port}", "/metrics")
