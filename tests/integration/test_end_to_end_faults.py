# SPDX-License-Identifier: Apache-2.0
"""Killing what can be killed, at bad moments, with the cgroupfs driver and an older NRI: nothing is lost."""

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.stage.pods import Box, StagePod, claim_pod, cpus, hugepages
from tests.stage.process import wait_for
from tests.stage.stage import Instance, OpenStage, Stage

ALL = set(range(32))
MIB = 1 << 20


class Rig:
    """A stage with one instance whose processes are killed and started again."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.instance: Instance = stage.add_instance()
        self.threads = ThreadPoolExecutor()
        self.ready()

    def ready(self) -> None:
        """Waits until the instance is ready again."""
        self.stage.wait_back(self.instance)

    def at_once(self, work: Any) -> "Future[Any]":
        """Begins something that will have to wait."""
        return self.threads.submit(work)


@pytest.fixture(scope="module")
def shared(open_shared_stage: OpenStage) -> Iterator[Rig]:
    rig = Rig(open_shared_stage(cgroup_driver="cgroupfs", nri_level="0.8"))
    yield rig
    rig.threads.shutdown()


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    for process in shared.instance.processes:
        if not process.alive:
            process.start()
    shared.ready()
    yield shared
    print(shared.stage.logs())


def test_a_killed_frontend_knows_every_claim_when_it_is_back(rig: Rig) -> None:
    """The CDI directory is the database: the new process holds the same CPUs and can take them back."""
    with StagePod(rig.stage, "web") as web, claim_pod(rig.stage, "db", cpus(4), hugepages(2 * MIB)) as pod:
        plain = web.run()
        pod.prepare()
        rig.instance.frontend.kill()
        # The backend needs nobody: a container of the prepared claim starts meanwhile, pinned.
        box = pod.run()
        given = box.cpus()
        assert len(given) == 4
        assert not plain.cpus() & given
        rig.instance.frontend.start()
        rig.ready()
        assert rig.stage.held(pod.claim_uid) == given
        with claim_pod(rig.stage, "other", cpus(8)) as other:
            other.prepare()
            assert not rig.stage.held(other.claim_uid) & given
        pod.end()
        plain.comes_to(ALL)


def test_no_claim_is_prepared_while_nobody_enforces(rig: Rig) -> None:
    """Prepare waits for the backend, and goes on as soon as it is back."""
    with claim_pod(rig.stage, "db", cpus(2)) as pod:
        rig.stage.kill_backend(rig.instance)
        wait_for("the lease to end", lambda: not rig.stage.state("/v1/backend")["live"], 15.0)
        waiting = rig.at_once(pod.prepare)
        with pytest.raises(TimeoutError):
            waiting.result(1)
        assert not list(rig.stage.paths.cdi_dir.glob("*.json"))
        rig.instance.backend.start()
        waiting.result(15)
        assert pod.run().cpus() == rig.stage.held(pod.claim_uid)


def test_a_backend_killed_inside_a_hook_repairs_what_went_on_without_it(rig: Rig) -> None:
    """The runtime goes on without a dead plugin, so the container starts unpinned; the audit pins it at the return."""
    with claim_pod(rig.stage, "db", cpus(4)) as pod:
        pod.prepare()
        pod.run_sandbox()
        claimed = rig.stage.held(pod.claim_uid)
        rig.instance.backend.ask_to_stop(signal.SIGSTOP)
        creating = rig.at_once(pod.create)
        rig.stage.kill_backend(rig.instance)
        box: Box = creating.result(10)
        box.start()
        assert box.cpus() == ALL
        rig.instance.backend.start()
        box.comes_to(claimed)


def test_files_lost_while_everybody_was_down_are_rebuilt(rig: Rig) -> None:
    """A running container's CPUs stay its own though the CDI directory was wiped: its record is made again."""
    with claim_pod(rig.stage, "db", cpus(4)) as pod:
        pod.prepare()
        box = pod.run()
        given = box.cpus()
        rig.instance.frontend.kill()
        rig.stage.kill_backend(rig.instance)
        for path in rig.stage.paths.cdi_dir.glob("*.json"):
            path.unlink()
        rig.instance.frontend.start()
        rig.instance.backend.start()
        rig.ready()
        with claim_pod(rig.stage, "next", cpus(12, numa_node=0)) as following:
            following.prepare()
            assert not rig.stage.held(following.claim_uid) & given
            assert rig.stage.held(pod.claim_uid) == given == box.cpus()
            assert len(list(rig.stage.paths.cdi_dir.glob("*.json"))) == 2
