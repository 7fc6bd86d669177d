# SPDX-License-Identifier: Apache-2.0
"""A frontend in an incomplete pod waits, and reports the problem at /readyz, in its log, and through status and
doctor.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from dra_frontend.node.host_tree import BOOT_ID

from tests.rigs.trees import small_machine, write_tree
from tests.stage.process import wait_for

PROGRAM = [sys.executable, "-m", "numa_tools"]


def free_port() -> int:
    """Returns a port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def readyz(port: int) -> tuple[int, str]:
    """Returns the status and body of /readyz, or 0 and "" while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


@pytest.fixture
def base() -> Iterator[Path]:
    """Returns a node with an unusable kubelet directory and no kubeconfig. pytest's directory is not used, because
    socket paths must be short.
    """
    with tempfile.TemporaryDirectory(prefix="dn-") as name:
        path = Path(name)
        # The host root has this machine's boot id, so commands use the paths below as they are, as in a pod, and
        # do not look for them under the host root.
        boot = write_tree(small_machine(), path / "host") / BOOT_ID[1:]
        boot.parent.mkdir(parents=True, exist_ok=True)
        boot.write_text(Path(BOOT_ID).read_text())
        (path / "kubelet").mkdir()
        (path / "kubelet/plugins").write_text("in the way")
        keys = {"runDir": "run", "cdiDir": "cdi", "kubeletRootDir": "kubelet", "kubeconfig": "kubeconfig"}
        (path / "config.yaml").write_text(json.dumps({key: str(path / one) for key, one in keys.items()}))
        yield path


def test_a_frontend_that_cannot_start_reports_why_and_waits(base: Path) -> None:
    """If the process exited, neither /readyz nor kubectl exec would work. The frontend starts as soon as it can."""
    port = free_port()
    flags = ["--config", str(base / "config.yaml"), "--host-root", str(base / "host"), "--node", "n"]
    log = base / "log"
    with log.open("wb") as out:
        command = [*PROGRAM, *flags, "--pod-uid", "p", "--bind-address", f"127.0.0.1:{port}"]
        service = subprocess.Popen(command, stderr=out, env=os.environ)
        try:
            wait_for("an answer", lambda: readyz(port)[0], 60.0)
            status, text = readyz(port)
            assert status == 503
            wanted = (
                "the kubelet's plugin directory of dra.cpu",
                "is not a directory; remove it, or correct kubeletRootDir",
                f"the API server cannot be queried: read kubeconfig {base / 'kubeconfig'}: the file does not exist",
            )
            for words in wanted:
                assert words in text
                assert words in log.read_text()
            assert log.read_text().count("cannot start") == 1, "the reason is logged once and not at each check"
            doctor = subprocess.run([*PROGRAM, *flags, "doctor"], capture_output=True, text=True, check=False)
            assert "[driver.pod]" in doctor.stdout
            screen = subprocess.run([*PROGRAM, *flags, "status"], capture_output=True, text=True, check=False)
            assert screen.returncode == 1
            assert "PROBLEM  the service is down" in screen.stdout
            for words in wanted:
                assert words in screen.stdout
                assert words.partition("; ")[0].lower() in doctor.stdout.lower()
            assert "kubectl logs POD -c frontend (--previous if it has restarted)" in doctor.stdout
            (base / "kubelet/plugins").unlink()
            user = {"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}], "users": []}
            context = {"contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}], "current-context": "c"}
            (base / "kubeconfig").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **user, **context}))
            wait_for("the service", lambda: "not registered with the kubelet" in readyz(port)[1], 60.0)
        finally:
            service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
