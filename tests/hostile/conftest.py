# SPDX-License-Identifier: Apache-2.0
"""Provides a separate test node for each actor. Each machine has two NUMA nodes of 16 CPUs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hostile.attack import SETTINGS, Actor, Attack
from tests.hostile.field import Field, commands
from tests.rigs.trees import captured, write_tree
from tests.stage.settings import StageSettings
from tests.stage.stage import Stage

_MACHINE = "32intel64-2p8co2t+8ve"


class Fields:
    """The nodes of all actors, of which only one exists at a time: each actor gets a fresh node."""

    def __init__(self, root: Callable[[], Path], port: Callable[[], int]) -> None:
        self._root = root
        self._port = port
        self._actor: Actor | None = None
        self._stack = ExitStack()

    def of(self, actor: Actor) -> Field:
        """Returns the node that an actor attacks. The actor's attacks run one after another on the same node, until
        one of them succeeds.
        """
        if self._actor is not actor:
            self.close()
            ports = self._port(), self._port()
            # The node has its own machine tree, because an attack may change it.
            frontend, backend = commands(ports)
            settings = SETTINGS.get(actor, StageSettings())
            settings = replace(settings, host_root=self._root(), frontend=frontend, backend=backend)
            self._field = Field(settings, self._stack.enter_context(Stage(settings)), ports)
            self._actor = actor
        return self._field

    def close(self) -> None:
        self._actor = None
        self._stack.close()


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory, unused_tcp_port_factory: Callable[[], int]) -> Iterator[Fields]:
    """Provides all actors' nodes, one at a time."""
    fields = Fields(lambda: write_tree(captured(_MACHINE), tmp_path_factory.mktemp("machine")), unused_tcp_port_factory)
    yield fields
    fields.close()


@pytest.fixture
def field(fields: Fields, attack: Attack) -> Iterator[Field]:
    """Returns the attacked node. If the attack succeeds, the node's logs are shown and the node is discarded."""
    field = fields.of(attack.actor)
    yield field
    print(field.stage.logs())
    if not field.unharmed:
        fields.close()
