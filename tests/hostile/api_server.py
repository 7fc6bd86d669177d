# SPDX-License-Identifier: Apache-2.0
"""An API server in trouble, or a proxy in its place: claims stay, and nobody makes its trouble worse."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tests.hostile.attack import Actor, Attack
from tests.hostile.field import Field
from tests.stage.process import wait_for

_AGENT = "dra-driver-numa"
_SECONDS = 1.5
_FOR_EVER = 1_000_000


def _asked(field: Field) -> int:
    served = field.stage.api("/fake", "POST", {"served": True})["served"]
    return sum(one["agent"].startswith(_AGENT) for one in served)


def answers(answer: int | str, count: int = _FOR_EVER, **fault: Any) -> Callable[[Field], AbstractContextManager[str]]:
    """Lets requests fail, also those that a broken watch makes; hears how many came."""

    @contextmanager
    def attack(field: Field) -> Iterator[str]:
        # One of each publisher: those of the attack before must be at peace again.
        wait_for("the watches", lambda: field.stage.api("/fake", "POST", {"watches": True})["watches"] >= 2, 30)
        before = _asked(field)
        field.stage.api(
            "/fake",
            "POST",
            {"fail_next": {"count": count, "answer": answer, "agent": _AGENT, **fault}, "drop_watches": True},
        )
        try:
            time.sleep(_SECONDS)
            yield f"{_asked(field) - before} requests"
        finally:
            field.stage.api("/fake", "POST", {"no_faults": True})
        field.stage.wait_ready(field.instance)

    return attack


_SLICES: dict[str, Any] = {"resource": "resourceslices"}
_CLAIMS: dict[str, Any] = {"resource": "resourceclaims", "verb": "get"}
# Of two publishers, each with a list and a watch, and a little for what else happens.
_FEW = r"\A([1-3]?\d) requests"
_EVENTS = '{"type": ["ADDED"], "object": {"metadata": {"resourceVersion": "7"}}}\n{"type": "ADDED"}\n[1]\n<html>\n'
_DEEP = "[" * 100_000


def _row(name: str, run: Callable[[Field], AbstractContextManager[str]], *findings: str, expects: str = _FEW) -> Attack:
    return Attack(Actor.API_SERVER, name, run, expects, 1.0, findings)


ATTACKS = [
    _row("410 for every watch", answers(410, verb="watch"), "frontend A10"),
    _row("410 for every watch and every list", answers(410, **_SLICES), "frontend A10"),
    _row("429 for everything about slices", answers(429, retry_after=1, **_SLICES)),
    _row("500 for everything about slices", answers(500, **_SLICES)),
    _row("connections that are dropped", answers("drop", **_SLICES)),
    _row("no answer", answers("hang", **_SLICES)),
    _row("other JSON", answers(200, body='{"ok": true}', **_SLICES), "frontend A12"),
    _row("JSON nested 100,000 deep", answers(200, body=_DEEP, **_SLICES), "security S13"),
    _row("events of another shape", answers(200, verb="watch", body=_EVENTS), "frontend A12"),
    _row("a list of other things", answers(200, body=json.dumps({"items": [None, 1, {"metadata": None}]}), **_SLICES)),
    _row("500 for three reads of a claim", answers(500, 3, **_CLAIMS)),
    _row("JSON nested deep for three reads of a claim", answers(200, 3, body=_DEEP, **_CLAIMS), "security S13"),
    _row(
        "another object for three reads of a claim", answers(200, 3, body='{"kind": "Pod"}', **_CLAIMS), "frontend A12"
    ),
]
