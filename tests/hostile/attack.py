# SPDX-License-Identifier: Apache-2.0
"""What an attack is: who does it, what he does, and what he may hear and cost."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Concatenate, ParamSpec

from tests.hostile.field import Field
from tests.stage.settings import StageSettings


class Actor(StrEnum):
    """Who attacks (docs/security.md)."""

    POD_AUTHOR = "pod author"
    CLAIM_AUTHOR = "claim author"
    FILE = "file"
    HOST = "host"
    NETWORK_PEER = "network peer"
    API_SERVER = "API server"
    RUNTIME = "runtime"


Run = Callable[[Field], AbstractContextManager[str]]
"""Attacks, and gives what was heard. The block is run while the attack lasts, or when it is over: as it chooses."""

_P = ParamSpec("_P")


def taking(attack: Callable[Concatenate[Field, _P], Iterator[str]]) -> Callable[_P, Run]:
    """An attack that takes more than the field: it is called with that, and gives one that takes the field."""

    def made(*arguments: _P.args, **named: _P.kwargs) -> Run:
        return lambda field: contextmanager(attack)(field, *arguments, **named)

    return made


@dataclass(frozen=True, slots=True)
class Attack:
    """One row."""

    actor: Actor
    name: str
    run: Run = field(repr=False)
    expects: str
    """Pattern of what the attacker hears, or of what a person sees."""
    seconds: float = 0.5
    """CPU time that it may cost, in each of the two processes."""
    spoils_the_node: bool = False
    """Whether the next attack wants a fresh one: it takes long to come to rest."""


SETTINGS: dict[Actor, StageSettings] = {
    # Reserved CPUs make the shared pool a part of the machine, which is what a forger of the pool needs.
    Actor.POD_AUTHOR: StageSettings(reserved_cpus="0,16"),
    # Only here may a claim name its CPUs.
    Actor.CLAIM_AUTHOR: StageSettings(config={"groupBy": "machine"}),
}
"""What an actor's stage has of its own."""
