# SPDX-License-Identifier: Apache-2.0
"""A failing API server, or a proxy in its place: claims are kept, and the driver does not increase the load."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tests.hostile.attack import Actor, Attack, Run, parametrized
from tests.hostile.field import AGENT, Field

_SECONDS = 2.0
_BOTH = 2
"""Number of requests into which each fault is injected: one request from each of the two publishers."""


def _asked(field: Field) -> int:
    served = field.stage.api("/fake", "POST", {"served": True})["served"]
    return sum(one["agent"].startswith(AGENT) for one in served)


@parametrized
def answers(field: Field, *faults: dict[str, Any]) -> Iterator[str]:
    """Breaks every watch and answers requests for slices with each of the faults in turn; yields the number of requests
    that the driver has sent.
    """
    before = _asked(field)
    for fault in faults:
        field.fail_next(**{"count": _BOTH, "resource": "resourceslices", **fault})
    field.stage.api("/fake", "POST", {"drop_watches": True})
    try:
        time.sleep(_SECONDS)
        yield f"{_asked(field) - before} requests"
    finally:
        field.stage.api("/fake", "POST", {"no_faults": True})


@contextmanager
def _claims(field: Field) -> Iterator[str]:
    for answer, body in ((500, None), (200, _DEEP), (200, '{"kind": "Pod"}'), (200, "<html>"), (404, "{}")):
        field.fail_next(1, answer, body=body, resource="resourceclaims", verb="get")
    yield "prepared in the end"


_EVENTS = '{"type": ["ADDED"], "object": {"metadata": {"resourceVersion": "7"}}}\n{"type": "ADDED"}\n[1]\n<html>\n'
_DEEP = "[" * 100_000
_LIST = json.dumps({"kind": "ResourceSliceList", "metadata": {}, "items": [None, 1, {"metadata": None}]})


_attack = partial(Attack, Actor.API_SERVER)


def _row(name: str, run: Run) -> Attack:
    # A publisher's delay grows with each failure and becomes longer than an attack, so the next attack needs a fresh
    # node.
    return _attack(name, run, r"\A[1-3]?\d requests", 1.0, spoils_the_node=True)


ATTACKS = [
    _attack("invalid responses to reads of claims", _claims, "in the end"),
    _row("410 for every list and watch", answers({"answer": 410, "count": 1_000_000})),
    _row(
        "500, unexpected JSON, 100,000 nested lists, dropped connections",
        answers(
            {"answer": 500},
            {"answer": 200, "body": '{"ok": true}'},
            {"answer": 200, "body": _DEEP},
            {"answer": "drop"},
        ),
    ),
    _row(
        "malformed events, 429, malformed lists, no response",
        answers(
            {"answer": 200, "body": _EVENTS, "verb": "watch"},
            {"answer": 429, "retry_after": 1},
            {"answer": 200, "body": _LIST, "verb": "list"},
            {"answer": "hang"},
        ),
    ),
]
