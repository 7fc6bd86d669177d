# SPDX-License-Identifier: Apache-2.0
"""The description of an attack: the attacker, the action, and the permitted output and cost."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Concatenate, ParamSpec

from tests.hostile.field import Field
from tests.stage.settings import StageSettings


class Actor(StrEnum):
    """The attackers that docs/security.md describes."""

    POD_AUTHOR = "pod author"
    CLAIM_AUTHOR = "claim author"
    FILE = "file"
    HOST = "host"
    NETWORK_PEER = "network peer"
    API_SERVER = "API server"
    RUNTIME = "runtime"


Run = Callable[[Field], AbstractContextManager[str]]
"""Function that runs the attack and yields the output that the attacker sees. The ``with`` block runs during the attack
or after it.
"""

_P = ParamSpec("_P")


def parametrized(attack: Callable[Concatenate[Field, _P], Iterator[str]]) -> Callable[_P, Run]:
    """Turns an attack with additional parameters into a function that accepts the parameters and returns a ``Run``."""

    def made(*arguments: _P.args, **named: _P.kwargs) -> Run:
        return lambda field: contextmanager(attack)(field, *arguments, **named)

    return made


@dataclass(frozen=True, slots=True)
class Attack:
    """A row in a table of attacks."""

    actor: Actor
    name: str
    run: Run = field(repr=False)
    expects: str
    """Pattern that the output must match."""
    seconds: float = 0.5
    """Permitted CPU time for each of the two processes."""
    spoils_the_node: bool = False
    """Whether the next attack needs a fresh node, because the node takes a long time to recover from this attack."""


SETTINGS: dict[Actor, StageSettings] = {
    # Reserved CPUs make the shared pool smaller than the machine; an attack that forges the pool depends on this.
    Actor.POD_AUTHOR: StageSettings(reserved_cpus="0,16"),
    # All CPUs belong to one device, so a claim may name any of them (``cpuConfig.cpuset``).
    Actor.CLAIM_AUTHOR: StageSettings(config={"groupBy": "machine"}),
}
"""The stage's settings for each actor."""
