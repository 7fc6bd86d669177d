# SPDX-License-Identifier: Apache-2.0
"""Inputs for a target: what its strategy draws, what is worst, and both with faults."""

from collections.abc import Iterator
from random import Random

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import mutate
from tests.fuzz.target import Target

SHORT = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""What every change is tried with: the same inputs each time, so that a red build is about the change."""


class Shown(bytes):
    """An input of which a report shows the beginning."""

    def __repr__(self) -> str:
        return f"{self[:2000]!r} ({len(self)} bytes)"


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """Draws inputs of a target: one half as its strategy makes them, the other with faults in their bytes."""
    spoilt = st.builds(
        lambda data, number: mutate(data, Random(number), target.most_bytes),
        target.seeds,
        st.integers(0, (1 << 32) - 1),
    )
    return st.one_of(target.seeds, spoilt).map(lambda data: Shown(data[: target.most_bytes]))


def _drawn(target: Target, count: int, number: int) -> list[bytes]:
    found: list[bytes] = []

    @seed(number)
    @settings(SHORT, max_examples=count, derandomize=False)
    @given(target.seeds)
    def keep(data: bytes) -> None:
        found.append(data[: target.most_bytes])

    keep()
    return found


def endless(target: Target, number: int, drawn: int = 60, mutants: int = 20) -> Iterator[bytes]:
    """Yields inputs for ever, the same for the same number: the worst that is known, then drawn ones with faults."""
    yield from target.bombs
    random = Random(number)
    while True:
        seeds = _drawn(target, drawn, random.getrandbits(32))
        yield from seeds
        others = [*seeds, *target.bombs]
        for _ in range(mutants * len(seeds)):
            yield mutate(random.choice(seeds), random, target.most_bytes, others)
