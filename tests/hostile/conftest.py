# SPDX-License-Identifier: Apache-2.0
"""One stage for each actor, on a machine with two NUMA nodes of 16 CPUs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.trees import captured, write_tree
from tests.hostile.attack import SETTINGS, Actor
from tests.hostile.field import Field, commands
from tests.stage.settings import StageSettings
from tests.stage.stage import Stage

_MACHINE = "32intel64-2p8co2t+8ve"


@pytest.fixture(scope="module")
def shared_field(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    unused_tcp_port_factory: Callable[[], int],
) -> Iterator[Field]:
    """The node that an actor attacks; his attacks follow each other on it."""
    actor: Actor = request.param
    ports = unused_tcp_port_factory(), unused_tcp_port_factory()
    # Of its own: a rude host changes it.
    root: Path = write_tree(captured(_MACHINE), tmp_path_factory.mktemp("machine"))
    settings = StageSettings(host_root=root, **commands(ports), **SETTINGS.get(actor, {}))
    with Stage(settings) as stage:
        yield Field(settings, stage, ports)


@pytest.fixture
def field(shared_field: Field) -> Iterator[Field]:
    """The node, whose logs are shown with each attack that succeeds."""
    yield shared_field
    print(shared_field.stage.logs())
