# SPDX-License-Identifier: Apache-2.0
"""The results of one run as models. bench.json is a Report, from which the table and the page are generated."""

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict

TIMES: Final = "\N{MULTIPLICATION SIGN}"
"""Unit of a ratio."""
_MAX_SAMPLES = 200
"""Maximum number of samples per turn in a report. Statistics are computed from all samples."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Quantity(_Model):
    """A quantity that is measured, described for readers who do not know this project."""

    key: str
    section: str
    title: str
    unit: str
    how: str
    """One sentence that says what is measured, and when the measurement begins and ends."""
    plotted: bool = True
    """Whether the page shows a plot of the quantity; the page's table contains all quantities."""
    budget: float | None = None
    budgeted: Literal["median", "p99"] = "median"


class Summary(_Model):
    """Statistics of all samples of a figure."""

    count: int
    median: float
    q1: float
    q3: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Returns the statistics of the samples. There must be at least one sample."""
        ordered = sorted(samples)
        q1, median, q3 = (_quantile(ordered, share) for share in (0.25, 0.5, 0.75))
        p99 = ordered[math.ceil(len(ordered) * 0.99) - 1]
        return cls(count=len(ordered), median=median, q1=q1, q3=q3, p99=p99)


class Figure(_Model):
    """The samples of one quantity, for one driver at one load."""

    quantity: str
    """Key of the quantity."""
    mode: str
    """Key of the report's mode, or empty if the figure does not depend on the kernel."""
    load: str
    driver: str
    turns: list[list[float]]
    """Samples, grouped by turn."""
    summary: Summary

    @property
    def samples(self) -> list[float]:
        """The samples of all turns."""
        return [value for turn in self.turns for value in turn]


class ThreadRate(_Model):
    """Context switches per second, summed over all of a process's threads with the same name, while the driver is
    idle.
    """

    mode: str
    load: str
    driver: str
    process: str
    name: str
    threads: int
    wakeups: float
    """Voluntary context switches: the thread waited for an event and continued."""
    preemptions: float
    """Involuntary context switches: the kernel gave the CPU to another thread."""


class DriverUnderTest(_Model):
    """A driver that was measured."""

    name: str
    revision: str
    frontend: str
    """Command that starts the DRA driver."""
    backend: str
    """Command that starts the NRI plugin, or empty if the DRA driver contains the plugin."""


class Report(_Model):
    """All results of one run, and where it ran."""

    version: Literal[2] = 2
    when: str
    seconds: float
    """Duration of the run."""
    host: dict[str, str]
    """Facts about the machine that ran the benchmark, by name."""
    settings: dict[str, str]
    """Settings of the run, by name."""
    modes: dict[str, str]
    """Titles of the emulated kernels, by key."""
    drivers: list[DriverUnderTest]
    """The driver that was measured, and the one it is compared with, if any."""
    quantities: list[Quantity]
    figures: list[Figure]
    threads: list[ThreadRate]

    def find(self, quantity: str, mode: str, load: str, driver: str) -> Figure | None:
        """Returns the figure with these keys, or None if it was not measured."""
        wanted = (quantity, mode, load, driver)
        return next((one for one in self.figures if (one.quantity, one.mode, one.load, one.driver) == wanted), None)

    def missed(self) -> list[str]:
        """Returns the titles of the first driver's quantities that exceed their budgets."""
        budgets = {one.key: one for one in self.quantities if one.budget is not None}
        ours = [one for one in self.figures if one.driver == self.drivers[0].name and one.quantity in budgets]
        return list(dict.fromkeys(budgets[one.quantity].title for one in ours if not _kept(budgets[one.quantity], one)))


def _kept(quantity: Quantity, figure: Figure) -> bool:
    measured = figure.summary.median if quantity.budgeted == "median" else figure.summary.p99
    return quantity.budget is None or measured <= quantity.budget


class Collector:
    """Collects samples while a benchmark runs."""

    def __init__(self) -> None:
        self._quantities: dict[str, Quantity] = {}
        self._turns: dict[tuple[str, str, str, str], list[list[float]]] = {}
        self.threads: list[ThreadRate] = []

    def add(self, quantity: Quantity, mode: str, load: str, driver: str, samples: Sequence[float]) -> None:
        """Adds the samples from one turn; a turn without samples is ignored."""
        if samples:
            self._quantities.setdefault(quantity.key, quantity)
            self._turns.setdefault((quantity.key, mode, load, driver), []).append(list(samples))

    def quantities(self) -> list[Quantity]:
        """Returns every quantity that has samples, in the order in which their first samples were added."""
        return list(self._quantities.values())

    def figures(self) -> list[Figure]:
        """Returns a figure for each quantity, mode, load and driver."""
        return [
            Figure(
                quantity=key,
                mode=mode,
                load=load,
                driver=driver,
                turns=[[_rounded(value) for value in _thinned(turn)] for turn in turns],
                summary=Summary.of([value for turn in turns for value in turn]),
            )
            for (key, mode, load, driver), turns in self._turns.items()
        ]


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = (len(ordered) - 1) * share
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _thinned(samples: Sequence[float]) -> list[float]:
    """Returns all samples, or as many quantiles of them as a report may contain."""
    if len(samples) <= _MAX_SAMPLES:
        return list(samples)
    ordered = sorted(samples)
    return [_quantile(ordered, rank / (_MAX_SAMPLES - 1)) for rank in range(_MAX_SAMPLES)]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def median_ratio(ours: Figure, other: Figure) -> tuple[float, float, float] | None:
    """Divides two drivers' medians turn by turn, and returns the median, smallest and largest of these ratios.

    Returns None if the other driver's median is zero in every turn.
    """
    pairs = [
        (statistics.median(one), statistics.median(two)) for one, two in zip(ours.turns, other.turns, strict=False)
    ]
    found = [one / two for one, two in pairs if two]
    return (statistics.median(found), min(found), max(found)) if found else None


def shown_ratio(ratio: float) -> str:
    """Formats a ratio with two decimal places, or without any if it is at least 100. Ratios vary too much between turns
    for more digits to be meaningful.
    """
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def shown(value: float, unit: str = "") -> str:
    """Formats a value with three significant digits, and its unit."""
    if value == 0:
        return f"0{unit}" if unit in (TIMES, "/s") else f"0 {unit}".rstrip()
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.4f}"
    return digits + (unit if unit in (TIMES, "/s") else f" {unit}" if unit else "")
