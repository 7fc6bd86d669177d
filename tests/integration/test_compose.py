# SPDX-License-Identifier: Apache-2.0
"""docker-compose.yaml without a container engine: its commands run with directories in place of its volumes."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stage.process import Process, python, wait_for

ROOT = Path(__file__).parents[2]
ENTRYPOINTS = {
    "dra-frontend": ["-m", "numa_tools"],
    "nri-backend": ["-m", "nri_backend"],
    "stand-ins": ["-m", "tests.demo.compose"],
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())
    return document


def volumes(service: dict[str, Any]) -> dict[str, str]:
    """Returns each volume's path in the container, by the volume's name."""
    return dict(one.split(":")[:2] for one in service["volumes"])


def test_the_two_services_share_only_the_cdi_and_the_run_directory(compose: dict[str, Any]) -> None:
    """The two services share the CDI directory and the run directory, which contains the state socket, and nothing
    else.
    """
    services = compose["services"]
    frontend, backend = volumes(services["dra-frontend"]), volumes(services["nri-backend"])
    assert set(frontend) & set(backend) == {"cdi", "state"}
    assert services["nri-backend"]["network_mode"] == "none"
    assert "cdi:/var/run/cdi:ro" in services["nri-backend"]["volumes"]
    for name in ("dra-frontend", "nri-backend"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["read_only"] is True
        assert "privileged" not in services[name]
    assert set(compose["volumes"]) == set(volumes(services["stand-ins"]))


def test_targets_and_modules_match_the_dockerfile(compose: dict[str, Any]) -> None:
    """Each service is built from an existing target whose entry point this test starts."""
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    for name, service in compose["services"].items():
        (stage,) = [one for one in stages if one.split("\n")[0].endswith(f" AS {service['build']['target']}")]
        entry = f'"{ENTRYPOINTS[name][1]}"]' if name == "stand-ins" else f'["/opt/app/bin/{name}"]'
        assert f"ENTRYPOINT {entry}" in stage or stage.rstrip().endswith(entry)


class Project:
    """Runs all services in the compose file as processes, with their files under one directory."""

    def __init__(self, compose: dict[str, Any], base: Path) -> None:
        self._compose = compose
        self.base = base
        self.running: dict[str, Process] = {}

    def start(self, name: str) -> None:
        service = self._compose["services"][name]
        places = {inside: self.base / volume for volume, inside in volumes(service).items()}
        for place in places.values():
            place.mkdir(exist_ok=True)
        command = python(*ENTRYPOINTS[name], *(self._translated(word, places) for word in service["command"]))
        process = Process(name, command, self.base / f"{name}.log", service.get("environment", {}))
        self.running[name] = process.start()

    @staticmethod
    def _translated(word: str, places: dict[str, Path]) -> str:
        option, _, value = word.partition("=")
        if option == "--bind-address":
            return f"{option}=off"  # these ports may be in use here
        for inside, place in places.items():
            if value == inside or value.startswith(f"{inside}/"):
                return f"{option}={place}{value.removeprefix(inside)}"
        assert not value.startswith("/"), f"{word} is not in any volume"
        return word

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        def happened() -> bool:
            for process in self.running.values():
                process.check()
            return condition()

        wait_for(what, happened, seconds)


@pytest.fixture
def project(compose: dict[str, Any], short_root: Path) -> Iterator[Project]:
    project = Project(compose, short_root)
    yield project
    for process in project.running.values():
        print(process.tail())
        process.kill()


def test_the_demo_can_be_repeated(project: Project, compose: dict[str, Any]) -> None:
    """The three commands find each other through the volumes, and the demo passes twice. Every command exits with
    status 0.
    """
    project.start("stand-ins")
    check = compose["services"]["stand-ins"]["healthcheck"]["test"]
    # The directories that replace the volumes are under the base. They are named after the volumes' mount points in
    # this container.
    program = check[-1].replace("stat('/", f"stat('{project.base}/")
    healthy = python("-c", program)
    project.wait("health", lambda: subprocess.run(healthy, stderr=subprocess.DEVNULL, check=False).returncode == 0, 60)
    project.start("dra-frontend")
    project.start("nri-backend")
    shown = project.running["stand-ins"].log_file
    project.wait("two rounds", lambda: shown.read_text().count("\nShown: ") == 2, 90)
    for process in project.running.values():
        process.ask_to_stop()
    assert {process.wait(20) for process in project.running.values()} == {0}
