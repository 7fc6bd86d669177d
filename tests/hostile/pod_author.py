# SPDX-License-Identifier: Apache-2.0
"""Attacks by pod authors through a container's environment of up to 1.5 MB, the maximum size of an API object."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from numa_contract.cpuset import format_cpu_list

from tests.hostile.attack import Actor, Attack, parametrized
from tests.hostile.field import Field
from tests.stage.pods import StagePod, cpus
from tests.stage.wires import AnsweredError

_ANY = "5f0d3a52-0000-4000-8000-0000000000ee"
Environment = Callable[[Field], Sequence[str]]


def outcome_of(pod: StagePod, env: Sequence[str]) -> str:
    """Returns the outcome of starting a container in a pod."""
    try:
        box = pod.run("forger", env=list(env))
    except AnsweredError as error:
        return f"refused with {len(str(error))} characters: {error}"
    return f"runs on {format_cpu_list(box.cpus())}"


@parametrized
def with_environment(field: Field, make: Environment) -> Iterator[str]:
    """Starts a plain pod with an environment; the kubelet tries three times."""
    with field.pod() as pod:
        yield [outcome_of(pod, make(field)) for _ in range(3)][-1]


def _one(value: str, name: str = f"DRA_CPUSET_{_ANY}") -> Environment:
    return lambda _field: [f"{name}={value}"]


@contextmanager
def _many_beside_the_own_claim(field: Field) -> Iterator[str]:
    with field.claim_pod(cpus(1, "a"), cpus(1, "b")) as pod:
        field.patiently(pod.prepare)
        yield outcome_of(pod, [f"DRA_CPUSET_{pod.claim_uid}_r{number}={number}" for number in range(16_000)])


@contextmanager
def _claim_of_another_pod(field: Field) -> Iterator[str]:
    with field.victim() as (owner, _, given), field.pod() as pod:
        yield outcome_of(pod, [f"DRA_CPUSET_{owner.claim_uid}={format_cpu_list(given)}"])


@contextmanager
def _log_line(field: Field) -> Iterator[str]:
    with field.pod() as pod:
        heard = outcome_of(pod, [f"DRA_CPUSET_{_ANY}_\nERROR forged\x1b[31m\u202e\ufffe\u2028=0"])
        logs = "".join(process.log_file.read_text() for process in field.processes)
        assert "\nERROR forged" not in logs + heard
        assert "\x1b" not in logs + heard
        yield heard


@contextmanager
def _the_whole_pool(field: Field) -> Iterator[str]:
    """Starts a container while no instance is enforcing claims, so it runs on the whole pool. Its environment names the
    pool's CPUs.
    """
    with field.pod() as pod:
        field.kill_backend()
        box = pod.run(env=[f"DRA_CPUSET_{_ANY}={format_cpu_list(field.pool)}"])
        for _ in range(2):
            field.start_backend()
            field.stage.runtime("restart")
            field.ready()
            field.kill_backend()
        field.start_backend()
        with field.pod("plain") as web, field.victim():
            web.run().wait_for_cpus(field.pool - field.held())
        yield f"runs on {format_cpu_list(box.cpus())}"


@contextmanager
def _a_group_of_its_own(field: Field) -> Iterator[str]:
    """Starts a container that creates a sub-cgroup in its own cgroup, with the name that crun uses for a sub-cgroup."""
    with field.pod() as pod:
        box = pod.run()
        (box.directory / "container").mkdir()
        with field.victim(8):
            yield f"runs on {format_cpu_list(box.cpus())}"


_SHORT = r"refused with \d{1,4} characters"
_attack = partial(Attack, Actor.POD_AUTHOR)

ATTACKS = [
    _attack(
        "a variable name of 1 MB",
        with_environment(_one("0", f"DRA_CPUSET_{_ANY}" + "a" * (1 << 20))),
        r"refused with \d{1,4} characters",
    ),
    _attack("a variable name that forges a log line", _log_line, "refused"),
    _attack("variables of another pod's claim", _claim_of_another_pod, "refused .*not for this pod"),
    _attack(
        "a CPU list of 1.5 MB",
        with_environment(_one("0-65535," * (190 << 10))),
        _SHORT,
    ),
    _attack("16,000 variables in addition to the pod's own claim", _many_beside_the_own_claim, _SHORT),
    _attack("a variable that lists the whole pool", _the_whole_pool, r"runs on \d", 2.0),
    _attack("a cgroup with the name of crun's sub-cgroup", _a_group_of_its_own, r"runs on \d"),
]
