# SPDX-License-Identifier: Apache-2.0
"""The machine for the end-to-end tests: two NUMA nodes, each with 16 CPUs in 8 cores and 2048 hugepages of 2 MiB."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.trees import captured, write_tree
from tests.stage.machine import HostDirectory
from tests.stage.settings import StageSettings
from tests.stage.stage import OpenStage, Stage

_MACHINE = "32intel64-2p8co2t+8ve"


@pytest.fixture(scope="session")
def machine_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the captured machine as a host root with this machine's boot id, so commands use the same paths as in the
    pod.
    """
    root = write_tree(captured(_MACHINE), tmp_path_factory.mktemp("machine"))
    HostDirectory(root).copy_boot_id()
    return root


def _stages(machine_root: Path) -> Iterator[OpenStage]:
    with ExitStack() as stack:
        opened: list[Stage] = []

        def open_stage(**settings: Any) -> Stage:
            opened.append(stack.enter_context(Stage(StageSettings(host_root=machine_root, **settings))))
            return opened[-1]

        yield open_stage
        # pytest shows this output for a failed test.
        for stage in opened:
            print(stage.logs())


@pytest.fixture
def open_stage(machine_root: Path) -> Iterator[OpenStage]:
    """Yields a function that opens stages, which are closed at the end of the test."""
    yield from _stages(machine_root)


@pytest.fixture(scope="module")
def open_shared_stage(machine_root: Path) -> Iterator[OpenStage]:
    """Yields a function that opens stages, which are closed at the end of the module."""
    yield from _stages(machine_root)


@pytest.fixture(scope="module")
def shared(open_shared_stage: OpenStage) -> Stage:
    """Returns a stage with one ready instance."""
    stage = open_shared_stage()
    stage.add_ready_instance()
    return stage


@pytest.fixture
def stage(shared: Stage) -> Iterator[Stage]:
    """Returns the module's stage, whose logs are shown with each failed test."""
    yield shared
    print(shared.logs())
