# SPDX-License-Identifier: Apache-2.0
"""A broken or hostile runtime: it closes the connection, lists invalid containers, and mixes up its events."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from numa_contract.cpuset import format_cpu_list

from tests.hostile.attack import Actor, Attack, parametrized
from tests.hostile.field import Field
from tests.stage.pods import Box, StagePod, cpus
from tests.stage.wires import AnsweredError

_ENV = ["DRA_CPUSET_5f0d3a52-0000-4000-8000-0000000000ee=0-3"]
_UNKNOWN = {
    "id": "f" * 64,
    "podSandboxId": "no-such-pod",
    "name": "unknown-pod",
    "state": "CONTAINER_RUNNING",
    "env": _ENV,
}
Events = Callable[[Field, StagePod, Box], Sequence[tuple[str, Any, Any]]]


@parametrized
def sends(field: Field, *data: bytes) -> Iterator[str]:
    """Sends bytes to the plugin, and checks that it reconnects each time and that the containers are unchanged."""
    with field.victim():
        for one in data:
            assert field.stage.runtime("send_bytes", data=one.hex()) == 1
            time.sleep(0.1)
            field.ready()
    yield f"the plugin reconnected {len(data)} times"


@contextmanager
def _reconnects(field: Field) -> Iterator[str]:
    with field.victim():
        for _ in range(20):
            field.stage.runtime("restart", down_seconds=0.05)
        field.ready()
    yield "the plugin reconnected"


@parametrized
def lists(field: Field, *containers: Any) -> Iterator[str]:
    """Adds invalid containers to the next snapshot; one named VICTIM is listed twice."""
    with field.victim() as (_, box, given):
        named = [one | {"id": box.id} if one["id"] == "VICTIM" else one for one in containers]
        field.stage.runtime("list_also", containers=named)
        field.stage.runtime("restart")
        field.ready()
        box.wait_for_cpus(given)
        field.works()
        yield json.dumps(field.stage.state("/v1/containers"))
        field.stage.runtime("list_also", containers=[])
        field.stage.runtime("restart")
        field.ready()


@parametrized
def mixes(field: Field, events: Events) -> Iterator[str]:
    """Creates a container with a claim, sends events to the plugin, then starts the container and checks its CPUs."""
    with field.claim_pod(cpus(2)) as pod:
        field.patiently(pod.prepare)
        box, given = pod.create(), field.stage.held(pod.claim_uid)
        for method, container, sandbox in events(field, pod, box):
            try:
                field.stage.runtime("send_event", method=method, container=container, pod=sandbox)
            except AnsweredError as error:
                print(method, error)
        try:
            box.start()
        except AnsweredError as error:
            yield f"refused: {error}"
        else:
            box.wait_for_cpus(given)
            yield f"runs on {format_cpu_list(box.cpus())}"


def _of(pod: StagePod, box: Box, *methods: str) -> list[tuple[str, Any, Any]]:
    return [(method, {"id": box.id}, {"id": pod.sandbox["id"]}) for method in methods]


_MUX_TOO_LONG = b"\0\0\0\1\xff\xff\xff\xff"
_TTRPC_TOO_LONG = b"\0\0\0\1\0\0\0\x0a\xff\xff\xff\xff\0\0\0\1\1\0"
_ANSWERS = b"\0\0\0\2\0\0\0\x0a\0\0\0\0\0\0\0\x63\2\0" * 200
_NONSENSE = b"\0\0\0\1\0\0\0\x0e\0\0\0\4\0\0\x10\0\1\0\xff\xff\xff\xff"
_PINNED = r"runs on \d|refused"
_attack = partial(Attack, Actor.RUNTIME)

ATTACKS = [
    _attack(
        "bytes that are not frames", sends(b"\xff" * 5000, _MUX_TOO_LONG, _TTRPC_TOO_LONG), "reconnected 3 times", 2.0
    ),
    _attack(
        "unsolicited responses, unknown connections, unreadable calls",
        sends(_ANSWERS, b"\0\0\0\x09\0\0\0\0" * 500, _NONSENSE * 100),
        "reconnected 3 times",
        2.0,
    ),
    _attack("many reconnections in a short time", _reconnects, "reconnected", 3.0),
    _attack(
        "a container whose pod is not listed",
        lists(_UNKNOWN, _UNKNOWN | {"id": "e" * 64, "env": []}),
        "unknown-pod",
        3.0,
    ),
    _attack("two containers with the same ID", lists({"id": "VICTIM"}, _UNKNOWN, _UNKNOWN), "unknown-pod", 3.0),
    _attack(
        "invalid values in a container",
        lists(
            _UNKNOWN
            | {
                "name": "n" * 100_000,
                "state": 77,
                "linux": {"cgroupsPath": "../../../etc:x:y", "resources": {"cpu": {"cpus": "9-1"}}},
            }
        ),
        "ffff",
        3.0,
    ),
    _attack(
        "every event about a container that was never created",
        mixes(
            lambda _field, _pod, _box: [
                (method, _UNKNOWN, {"id": "no-such-pod"})
                for method in ("StartContainer", "UpdateContainer", "StopContainer", "RemoveContainer", "StopContainer")
            ]
        ),
        r"runs on \d",
        1.0,
    ),
    _attack(
        "a claim container that stops before it starts",
        mixes(lambda _field, pod, box: _of(pod, box, "StopContainer")),
        _PINNED,
        1.0,
    ),
    _attack(
        "a claim container that is removed before it starts",
        mixes(lambda _field, pod, box: _of(pod, box, "RemoveContainer", "StopContainer")),
        _PINNED,
        1.0,
    ),
    _attack(
        "a container that is created twice",
        mixes(lambda _field, pod, box: _of(pod, box, "CreateContainer", "CreateContainer")),
        _PINNED,
        1.0,
    ),
]
