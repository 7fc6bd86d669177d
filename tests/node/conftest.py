# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the node tests, which run as root, and only inside the virtual machine that run.sh starts."""

import json
import re
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.rig.cluster import Cluster
from tests.node.rig.node import CDI_DIRECTORY, MARKER, Node, Profile
from tests.node.rig.pod_cgroups import Driver
from tests.node.rig.services import LOGS, Services

IRQBALANCE = Path("/opt/irqbalance")  # installed by run.sh if its arguments name irqbalance
LAST_REPORT = pytest.StashKey[Callable[[], dict[str, str]]]()
"""Function that returns the logs of everything that a test has started."""


def pytest_configure(config: pytest.Config) -> None:
    if not MARKER.exists():
        pytest.exit("these tests modify the machine that they run on: use tests/node/run.sh", returncode=4)
    shutil.rmtree(LOGS, ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps only the tests for this machine, and sorts them so that few restarts are needed.

    The mark `profile` names the machines that a test is for; a test without the mark is for the default machine.

    Tests on a bare node come first, then those with the driver, grouped by the chart's values, and finally both kinds
    again with the other cgroup driver.
    """
    here = Profile.read().name
    marks = [(item, item.get_closest_marker("profile")) for item in items]
    wanted = [item for item, mark in marks if here in (mark.args if mark else ("default",))]
    if not IRQBALANCE.exists():
        wanted = [item for item in wanted if not item.get_closest_marker("irqbalance")]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = sorted(wanted, key=_place)


def _place(item: pytest.Item) -> tuple[bool, bool, str]:
    second = "[cgroupfs" in item.name
    wants_cluster = "cluster" in getattr(item, "fixturenames", ())
    values = [_lacking(item), *(_given(item, mark) for mark in ("configuration", "values"))]
    return second, second != wants_cluster, json.dumps(values, sort_keys=True) if any(values) else ""


def _given(item: pytest.Item, name: str) -> dict[str, Any]:
    mark = item.get_closest_marker(name)
    return dict(mark.kwargs) if mark else {}


def _lacking(item: pytest.Item) -> str:
    mark = item.get_closest_marker("lacking")
    return str(mark.args[0]) if mark else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the end of every log to the report of a failed test."""
    report = yield
    if report.failed and LAST_REPORT in item.stash:
        report.sections.extend((f"log of {name}", text) for name, text in item.stash[LAST_REPORT]().items())
    return report


@pytest.fixture(scope="session")
def machine() -> Iterator[Node]:
    """Returns the node, which all tests share; tests use the fixture `node`, which cleans it before and after each
    test.
    """
    machine = Node()
    machine.reset()
    machine.extend_timeouts()
    yield machine
    machine.runtime.close()


@pytest.fixture(scope="session")
def cgroup_driver(request: pytest.FixtureRequest, machine: Node, running_cluster: "RunningCluster") -> Driver:
    """Returns the active cgroup driver: systemd, or the one that @both_drivers requests (pytest groups the tests by
    it).
    """
    driver: Driver = getattr(request, "param", "systemd")
    if driver != machine.cgroups.driver:
        running_cluster.end()  # a node is drained before its cgroup driver changes
        machine.use_driver(driver)
    return driver


class RunningCluster:
    """The session's only cluster: started by the first test that needs it, and stopped by a test that needs a bare
    node.
    """

    def __init__(self, machine: Node) -> None:
        self._machine = machine
        self._cluster: Cluster | None = None

    def get(self, item: pytest.Item) -> Cluster:
        """Returns the cluster with the driver's pod that the test's marks request."""
        configuration, values, lacking = _given(item, "configuration"), _given(item, "values"), _lacking(item)
        if self._cluster is None:
            self._cluster = Cluster(self._machine)
            item.stash[LAST_REPORT] = self._cluster.logs
            self._cluster.start(configuration, values, lacking=lacking)
        item.stash[LAST_REPORT] = self._cluster.logs
        self._cluster.configure(configuration, values, lacking=lacking)
        return self._cluster

    def end(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


@pytest.fixture(scope="session")
def running_cluster(machine: Node) -> Iterator[RunningCluster]:
    """Yields the cluster to the fixtures `node` and `cluster`; tests do not use it directly."""
    running = RunningCluster(machine)
    yield running
    running.end()


@pytest.fixture
def node(
    request: pytest.FixtureRequest, machine: Node, cgroup_driver: Driver, running_cluster: RunningCluster
) -> Iterator[Node]:
    """Returns the node, which has no pods and no CDI files before and after the test, and no driver unless `cluster` is
    used.
    """
    if "cluster" not in request.fixturenames:
        running_cluster.end()
    CDI_DIRECTORY.mkdir(parents=True, exist_ok=True)
    yield machine
    machine.reset()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, node: Node, running_cluster: RunningCluster) -> Iterator[Cluster]:
    """Returns the node with the driver's pod and the fake cluster components. Before and after the test there are no
    claims and no other pods.
    """
    cluster = running_cluster.get(request.node)
    cluster.wait_ready()
    yield cluster
    try:
        cluster.clean()
    except BaseException:
        # The next test starts a new cluster.
        running_cluster.end()
        raise


@pytest.fixture
def services(request: pytest.FixtureRequest) -> Iterator[Services]:
    """Returns this test's programs. Those still running when the test ends are killed once the pods are gone."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.node.name).strip("-")
    with Services(name) as services:
        request.node.stash[LAST_REPORT] = services.logs
        yield services
