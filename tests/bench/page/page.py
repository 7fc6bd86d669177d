# SPDX-License-Identifier: Apache-2.0
"""Renders a report as a single page that needs no scripts, no network and no other files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tests.bench.figures import TIMES, Figure, Quantity, Report, median_ratio, shown, shown_ratio
from tests.bench.page.plots import RatioScale, Row, ratio_plot, ratio_scale, scale_for, strips, verdict

_HERE: Final = Path(__file__).parent
_STYLES: Final = ("first", "second")
"""CSS classes for the two drivers."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A quantity at one load, in the overview."""

    first: str
    second: str = ""
    ratio: str = ""
    spread: str = ""
    plot: Markup = field(default_factory=Markup)
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class _Card:
    """A quantity with a plot for each kernel."""

    quantity: Quantity
    plots: list[tuple[str, Markup]]
    """Pairs of a title and a plot."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A figure in the table of all figures."""

    title: str
    kernel: str
    load: str
    driver: str
    style: str
    numbers: Sequence[str]
    """Median, quartiles, 99th percentile and number of samples."""
    ratio: str


class _Pages:
    """The parts of a report's page."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.names = [driver.name for driver in report.drivers]
        self.plotted = [quantity for quantity in report.quantities if quantity.plotted]
        self._ratios = self._scale()

    def _scale(self) -> RatioScale:
        found = [self._ratio(figure) for figure in self.report.figures if figure.driver == self.names[0]]
        return ratio_scale(ratio[0] for ratio in found if ratio)

    def _other(self, figure: Figure) -> Figure | None:
        if len(self.names) == 1:
            return None
        return self.report.find(figure.quantity, figure.mode, figure.load, self.names[1])

    def _ratio(self, figure: Figure) -> tuple[float, float, float] | None:
        other = self._other(figure)
        return median_ratio(figure, other) if other else None

    def loads(self, mode: str) -> list[str]:
        """Returns a mode's loads in the order in which they were measured."""
        return list(dict.fromkeys(figure.load for figure in self.report.figures if figure.mode == mode))

    def overview(self, mode: str) -> Iterator[tuple[str, list[tuple[str, list[_Cell | None]]]]]:
        """Yields each section with a row for each plotted quantity: its title, and a cell for each load."""
        for name, quantities in self._by_section():
            rows = [(one.title, [self._cell(one, mode, load) for load in self.loads(mode)]) for one in quantities]
            if measured := [(title, cells) for title, cells in rows if any(cells)]:
                yield name, measured

    def _by_section(self) -> Iterator[tuple[str, list[Quantity]]]:
        for name in dict.fromkeys(quantity.section for quantity in self.plotted):
            yield name, [quantity for quantity in self.plotted if quantity.section == name]

    def _cell(self, quantity: Quantity, mode: str, load: str) -> _Cell | None:
        figure = self.report.find(quantity.key, mode, load, self.names[0])
        if figure is None:
            return None
        first, other = shown(figure.summary.median, quantity.unit), self._other(figure)
        if other is None:
            half = f"{shown(figure.summary.q1)} to {shown(figure.summary.q3)}" if figure.summary.count > 1 else ""
            return _Cell(first, spread=half)
        second, ratio = shown(other.summary.median, quantity.unit), self._ratio(figure)
        if ratio is None:
            return _Cell(first, second)
        spread = f"{shown_ratio(ratio[1])} to {shown_ratio(ratio[2])}" if len(figure.turns) > 1 else ""
        return _Cell(
            first,
            second,
            shown_ratio(ratio[0]) + TIMES,
            spread,
            ratio_plot(ratio, self._ratios),
            verdict(ratio, len(figure.turns)),
        )

    def sections(self) -> Iterator[tuple[str, list[_Card]]]:
        """Yields each section with the cards for its plotted quantities."""
        for name, quantities in self._by_section():
            yield name, [self._card(quantity) for quantity in quantities]

    def _card(self, quantity: Quantity) -> _Card:
        figures = [figure for figure in self.report.figures if figure.quantity == quantity.key]
        scale = scale_for(figures, quantity.unit)
        plots = []
        for mode in dict.fromkeys(figure.mode for figure in figures):
            rows = [
                Row(figure.load, figure.driver, _STYLES[self.names.index(figure.driver)], figure)
                for figure in sorted(figures, key=lambda one: self.names.index(one.driver))
                if figure.mode == mode
            ]
            title = self.report.modes.get(mode, "")
            plots.append((title, strips(rows, scale, ". ".join(filter(None, (quantity.title, title))))))
        return _Card(quantity, plots)

    def threads(self, mode: str) -> list[tuple[str, str, str, list[str]]]:
        """Returns each thread's driver, process and name, and its wake-ups and preemptions at each load."""
        rates = [rate for rate in self.report.threads if rate.mode == mode]
        rows = []
        for driver, process, name in dict.fromkeys((rate.driver, rate.process, rate.name) for rate in rates):
            by_load = {
                rate.load: rate for rate in rates if (rate.driver, rate.process, rate.name) == (driver, process, name)
            }
            cells = [
                f"{by_load[load].wakeups:.1f} + {by_load[load].preemptions:.1f}" if load in by_load else ""
                for load in self.thread_loads(mode)
            ]
            most = max(rate.threads for rate in by_load.values())
            rows.append((driver, process, f"{name}, {most} of them" if most > 1 else name, cells))
        return rows

    def thread_loads(self, mode: str) -> list[str]:
        """Returns the loads at which idle threads were observed."""
        return list(dict.fromkeys(rate.load for rate in self.report.threads if rate.mode == mode))

    def lines(self) -> Iterator[_Line]:
        """Yields every figure."""
        for quantity in self.report.quantities:
            for figure in self.report.figures:
                if figure.quantity == quantity.key:
                    yield self._line(quantity, figure)

    def _line(self, quantity: Quantity, figure: Figure) -> _Line:
        summary, ratio = figure.summary, self._ratio(figure) if figure.driver == self.names[0] else None
        return _Line(
            title=quantity.title,
            kernel={"partition": "with partitions", "pool": "without"}.get(figure.mode, figure.mode),
            load=figure.load,
            driver=figure.driver,
            style=_STYLES[self.names.index(figure.driver)],
            numbers=[
                shown(summary.median, quantity.unit),
                f"{shown(summary.q1)} to {shown(summary.q3)}",
                shown(summary.p99),
                str(summary.count),
            ],
            ratio=f"{shown_ratio(ratio[0])} ({shown_ratio(ratio[1])} to {shown_ratio(ratio[2])})" if ratio else "",
        )


def render(report: Report) -> str:
    """Returns the page for a report."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = Markup((_HERE / "page.css").read_text())
    return environment.get_template("page.html.j2").render(
        report=report, parts=_Pages(report), style=style, styles=_STYLES, minutes=max(1, round(report.seconds / 60))
    )
