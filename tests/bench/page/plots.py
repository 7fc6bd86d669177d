# SPDX-License-Identifier: Apache-2.0
"""Draws plots as SVG elements in a page whose style sheet defines their colours."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tests.bench.figures import Figure, shown

_WIDTH, _LEFT, _RIGHT = 540, 116, 92
_PLOT = _WIDTH - _LEFT - _RIGHT
_ROW, _GAP, _TOP, _AXIS = 17, 10, 6, 24
_TICKS = 4
_RATIO_WIDTH, _RATIO_HEIGHT = 128, 20


@dataclass(frozen=True, slots=True)
class Row:
    """One driver at one load."""

    load: str
    driver: str
    style: str
    """CSS class in the style sheet."""
    figure: Figure


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis that starts at zero and is shared by all rows of a quantity."""

    end: float
    unit: str

    def x(self, value: float) -> float:
        """Returns the position of a value, or of the right edge if the value is beyond the end."""
        return round(_LEFT + min(value / self.end, 1.0) * _PLOT, 1)

    def ticks(self) -> list[float]:
        """Returns round numbers, starting with zero."""
        rough = self.end / _TICKS
        power = 10 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
        return [number * step for number in range(int(self.end / step + 1e-9) + 1)]


def scale_for(figures: Iterable[Figure], unit: str) -> Scale:
    """Returns an axis that covers most of the samples. Much larger ones may lie beyond its end, since an axis that
    covered them would compress the rest of the plot.
    """
    ends = [0.0]
    for figure in figures:
        spread = figure.summary.q3 - figure.summary.q1
        ends.append(min(max(figure.samples), figure.summary.q3 + 1.5 * spread))
    return Scale(max(ends) * 1.04 or 1.0, unit)


def strips(rows: Sequence[Row], scale: Scale, title: str) -> Markup:
    """Draws, for each row, every sample, the middle half of the samples and the median. Rows are grouped by load."""
    parts: list[Markup] = []
    y = float(_TOP)
    loads = list(dict.fromkeys(row.load for row in rows))
    for load in loads:
        group = [row for row in rows if row.load == load]
        parts.append(_label(load, y + len(group) * _ROW / 2))
        for row in group:
            parts += _strip(row, scale, y + _ROW / 2)
            y += _ROW
        y += _GAP
    bottom = y - _GAP + 4
    return Markup('<svg viewBox="0 0 {width} {height}" role="img" aria-label="{text}">{axis}{parts}</svg>').format(
        width=_WIDTH,
        height=round(bottom + _AXIS),
        text=_description(rows, scale, title),
        axis=_join(_axis(scale, bottom)),
        parts=_join(parts),
    )


def _description(rows: Sequence[Row], scale: Scale, title: str) -> str:
    medians = (f"{row.load}, {row.driver}: {shown(row.figure.summary.median, scale.unit)}" for row in rows)
    return f"{title}. Medians: {'; '.join(medians)}."


def _join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def _label(load: str, middle: float) -> Markup:
    lines = load.split(", ")
    first = middle + 4 - (len(lines) - 1) * 7
    return _join(
        Markup('<text class="load" x="{x}" y="{y}">{line}</text>').format(
            x=_LEFT - 10, y=round(first + 14 * number, 1), line=line
        )
        for number, line in enumerate(lines)
    )


def _axis(scale: Scale, bottom: float) -> Iterator[Markup]:
    for value in scale.ticks():
        yield Markup('<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{y}"/>').format(
            x=scale.x(value), top=_TOP - 4, y=round(bottom, 1)
        )
        unit = scale.unit if value == scale.ticks()[-1] else ""
        yield Markup('<text class="tick" x="{x}" y="{y}">{text}</text>').format(
            x=scale.x(value), y=round(bottom + 14, 1), text=shown(value, unit) if value else "0"
        )


def _strip(row: Row, scale: Scale, y: float) -> Iterator[Markup]:
    summary = row.figure.summary
    yield Markup('<g class="{style}">').format(style=row.style)
    yield _rectangle("bar", scale.x(0), scale.x(summary.median), y, 3)
    if summary.count > 1:
        yield _rectangle("box", scale.x(summary.q1), scale.x(summary.q3), y, _ROW - 5)
    samples = row.figure.samples
    for number, value in enumerate(samples):
        if value <= scale.end:
            # The fractional parts of multiples of the golden ratio are spread evenly, so few dots overlap.
            offset = (number * 0.618 % 1 - 0.5) * (_ROW - 8) if len(samples) > 1 else 0.0
            yield Markup('<circle class="dot" cx="{x}" cy="{y}" r="1.8"/>').format(
                x=scale.x(value), y=round(y + offset, 1)
            )
    yield Markup('<line class="median" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>').format(
        x=scale.x(summary.median), top=y - _ROW / 2 + 2, bottom=y + _ROW / 2 - 2
    )
    beyond = sum(value > scale.end for value in samples)
    if beyond:
        yield Markup('<path class="beyond" d="M{x} {y}l-5 -4v8z"/>').format(x=_LEFT + _PLOT + 6, y=y)
    yield Markup('<text class="value" x="{x}" y="{y}">{text}</text>').format(
        x=_LEFT + _PLOT + 12, y=y + 4, text=shown(summary.median, scale.unit)
    )
    yield Markup("</g>")


def _rectangle(style: str, left: float, right: float, y: float, height: float) -> Markup:
    return Markup('<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="1.5"/>').format(
        style=style, x=left, y=y - height / 2, width=max(0.5, round(right - left, 1)), height=height
    )


@dataclass(frozen=True, slots=True)
class RatioScale:
    """A logarithmic axis around 1, on which 1/2 and 2 are equally far from 1."""

    limit: float

    def x(self, ratio: float) -> float:
        """Returns the position of a ratio, or of the edge if the ratio is beyond the limit."""
        share = math.log(max(ratio, 1e-9)) / math.log(self.limit)
        return round(_RATIO_WIDTH / 2 * (1 + max(-1.0, min(1.0, share)) * 0.94), 1)


def ratio_scale(ratios: Iterable[float]) -> RatioScale:
    """Returns an axis that covers all of the ratios, but at least 1/2 to 2 and at most 1/16 to 16."""
    farthest = max((abs(math.log2(max(ratio, 1e-9))) for ratio in ratios), default=1.0)
    return RatioScale(2 ** max(1.0, min(4.0, farthest)))


def ratio_plot(ratio: tuple[float, float, float], scale: RatioScale) -> Markup:
    """Draws the median ratio of the turns, and a line from the smallest to the largest one."""
    middle, low, high = ratio
    return Markup(
        '<svg class="ratio" viewBox="0 0 {width} {height}" aria-hidden="true">'
        '<line class="one" x1="{one}" x2="{one}" y1="1" y2="{end}"/>'
        '<line class="range" x1="{low}" x2="{high}" y1="{y}" y2="{y}"/>'
        '<circle class="point" cx="{x}" cy="{y}" r="4"/></svg>'
    ).format(
        width=_RATIO_WIDTH,
        height=_RATIO_HEIGHT,
        one=scale.x(1),
        end=_RATIO_HEIGHT - 1,
        low=scale.x(low),
        high=scale.x(high),
        x=scale.x(middle),
        y=_RATIO_HEIGHT / 2,
    )


def verdict(ratio: tuple[float, float, float], turns: int) -> str:
    """Returns the CSS class for a ratio: ``less`` or ``more`` if it is below or above 1 in each of several turns, else
    ``same``.
    """
    if turns == 1:
        return "same"
    return "less" if ratio[2] < 1 else "more" if ratio[1] > 1 else "same"
