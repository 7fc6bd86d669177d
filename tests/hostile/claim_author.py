# SPDX-License-Identifier: Apache-2.0
"""Attacks by claim authors: opaque parameters up to the API's limits, and amounts that no scheduler allocates."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tests.hostile.attack import Actor, Attack, parametrized
from tests.hostile.field import Field
from tests.stage.pods import StagePod, cpus, memory, opaque
from tests.stage.wires import AnsweredError

_TEN_KB = 10 << 10
Document = dict[str, Any]


def outcome_of(pod: StagePod) -> str:
    """Returns the last response to the simulated kubelet, which calls Prepare up to three times."""
    for _ in range(3):
        try:
            pod.prepare()
        except AnsweredError as error:
            heard = f"refused with {len(str(error))} characters: {error}"
        else:
            return "prepared"
    return heard


@parametrized
def with_parameters(field: Field, *config: Document, request: Document | None = None) -> Iterator[str]:
    """Prepares a claim with opaque parameters and yields the response."""
    with field.claim_pod(request or cpus(1), config=config) as pod:
        yield outcome_of(pod)


def _nested(depth: int) -> Document:
    value: Document = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@contextmanager
def _odd_amounts(field: Field, amounts: Sequence[object]) -> Iterator[str]:
    heard = []
    with field.claim_pod(cpus(1)) as pod:
        assert pod.claim is not None
        (result,) = pod.claim["status"]["allocation"]["devices"]["results"]
        for amount in amounts:
            # The fake API server would reject a claim with an invalid amount, so the claim is not stored. The server
            # only returns it to the driver.
            result["consumedCapacity"] = {"dra.cpu/cpu": amount}
            field.fail_next(3, 200, verb="get", resource="resourceclaims", body=json.dumps(pod.claim))
            heard.append(f"{amount!s:.9} {outcome_of(pod)}")
    yield "\n".join(heard)


_mount = partial(opaque, "dra.memory", "memoryConfig")
_cpu = partial(opaque, "dra.cpu", "cpuConfig")
_CPUSET = ",".join(str(cpu) for cpu in range(0, 4200, 2))[: _TEN_KB - 100].rpartition(",")[0]
_SHORT = r"refused with \d{1,4} characters"
_attack = partial(Attack, Actor.CLAIM_AUTHOR)

ATTACKS = [
    _attack(
        "32 entries with CPU lists of 10 KB",
        with_parameters(*[_cpu({"cpuset": _CPUSET}) for _ in range(32)]),
        f"{_SHORT}.*cpuset",
    ),
    _attack(
        "parameters nested 200 levels deep",
        with_parameters(_cpu(_nested(200))),
        f"{_SHORT}.*nested more than 64 levels deep",
    ),
    _attack(
        "keys of 9 KB",
        with_parameters(*[_cpu({f"{number}" + "k" * 9000: number}) for number in range(32)]),
        f"{_SHORT}.*unknown field",
    ),
    _attack(
        "a value that forges a log line",
        with_parameters(_cpu({"strategy": "x\n2026-01-01 ERROR forged\x1b[31m"})),
        r"refused.*x\\n2026",
    ),
    _attack(
        "hugepages mounted over the container's own directories",
        with_parameters(_mount({"mount": {"path": "/x/../proc/self"}}), request=memory("64Mi")),
        f"{_SHORT}.*absolute path without",
    ),
    _attack(
        "invalid amounts",
        partial(_odd_amounts, amounts=["0", "-1", "1500m", "1e18", "1e400", "1e999999999", "9" * 400, "9" * 60_000]),
        r"(?s)\A(?!.*prepared).*9999.*refused",
        seconds=1.0,
    ),
]
