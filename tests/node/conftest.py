# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the node tests. They run as root inside the virtual machine of run.sh and nowhere else."""

import json
import re
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.rig.cluster import Cluster
from tests.node.rig.image_cluster import ARCHIVES, ImageCluster
from tests.node.rig.node import CDI_DIRECTORY, MARKER, Node, Profile
from tests.node.rig.pod_cgroups import Driver
from tests.node.rig.services import LOGS, Services

IRQBALANCE = Path("/opt/irqbalance")  # put in by run.sh when its arguments speak of irqbalance
LAST_REPORT = pytest.StashKey[Services]()


def pytest_configure(config: pytest.Config) -> None:
    if not MARKER.exists():
        pytest.exit("these tests change the machine they run on: use tests/node/run.sh", returncode=4)
    shutil.rmtree(LOGS, ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves only the tests for this machine (mark `profile`; without: default), in an order that restarts little.

    First what wants a bare node, then what wants our services, by their configuration, then both again with the other
    cgroup driver.
    """
    here = Profile.read().name
    marks = [(item, item.get_closest_marker("profile")) for item in items]
    wanted = [item for item, mark in marks if here in (mark.args if mark else ("default",))]
    if not ARCHIVES.exists():
        # run.sh puts them in when its arguments speak of images: unpacking them takes an emulated processor minutes.
        wanted = [item for item in wanted if not item.get_closest_marker("images")]
    if not IRQBALANCE.exists():
        wanted = [item for item in wanted if not item.get_closest_marker("irqbalance")]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = sorted(wanted, key=_place)


def _place(item: pytest.Item) -> tuple[bool, bool, bool, str]:
    second = "[cgroupfs" in item.name
    settings = _settings(item)
    wants_cluster = "cluster" in getattr(item, "fixturenames", ())
    images = item.get_closest_marker("images") is not None
    return second, second != wants_cluster, images, json.dumps(settings, sort_keys=True) if settings else ""


def _settings(item: pytest.Item) -> dict[str, Any]:
    mark = item.get_closest_marker("configuration")
    return dict(mark.kwargs) if mark else {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the end of every service's log to the report of a failed test."""
    report = yield
    if report.failed and LAST_REPORT in item.stash:
        report.sections.extend((f"log of {name}", text) for name, text in item.stash[LAST_REPORT].logs().items())
    return report


@pytest.fixture(scope="session")
def machine() -> Iterator[Node]:
    """The node itself, once for all tests; tests use `node`, which is clean."""
    machine = Node()
    machine.reset()
    machine.be_patient()
    yield machine
    machine.runtime.close()


@pytest.fixture(scope="session")
def cgroup_driver(request: pytest.FixtureRequest, machine: Node) -> Driver:
    """The cgroup driver in force: systemd, or what @both_drivers asks for (pytest groups the tests by it)."""
    driver: Driver = getattr(request, "param", "systemd")
    machine.use_driver(driver)
    return driver


class RunningCluster:
    """The one cluster of the session: started by the first test that wants it, ended by one that wants a bare node."""

    def __init__(self, machine: Node) -> None:
        self._machine = machine
        self._cluster: Cluster | None = None

    def get(self, item: pytest.Item, kind: type[Cluster] = Cluster) -> Cluster:
        if type(self._cluster) is not kind:
            self.end()
        if self._cluster is None:
            self._cluster = kind(self._machine)
            item.stash[LAST_REPORT] = self._cluster.services
            self._cluster.start()
        item.stash[LAST_REPORT] = self._cluster.services
        return self._cluster

    def end(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


@pytest.fixture(scope="session")
def running_cluster(machine: Node) -> Iterator[RunningCluster]:
    """Use `cluster`."""
    running = RunningCluster(machine)
    yield running
    running.end()


@pytest.fixture
def node(
    request: pytest.FixtureRequest, machine: Node, cgroup_driver: Driver, running_cluster: RunningCluster
) -> Iterator[Node]:
    """The node with no pod and no CDI file on it, before and after; without our services unless `cluster` is used."""
    if "cluster" not in request.fixturenames:
        running_cluster.end()
    CDI_DIRECTORY.mkdir(parents=True, exist_ok=True)
    yield machine
    machine.reset()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, node: Node, running_cluster: RunningCluster) -> Iterator[Cluster]:
    """The node with both services and the stand-ins of a cluster; no claim and no pod on it, before and after."""
    kind = ImageCluster if request.node.get_closest_marker("images") else Cluster
    cluster = running_cluster.get(request.node, kind)
    cluster.configure(_settings(request.node))
    cluster.wait_ready()
    yield cluster
    try:
        cluster.clean()
    except BaseException:
        # The next test begins with a new one.
        running_cluster.end()
        raise


@pytest.fixture
def services(request: pytest.FixtureRequest) -> Iterator[Services]:
    """Programs of this test; whatever still runs at its end is killed, after the pods are gone."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.node.name).strip("-")
    with Services(name) as services:
        request.node.stash[LAST_REPORT] = services
        yield services
