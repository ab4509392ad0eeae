"""Charts drawn as SVG text, without a plotting library: for files, pages and reports.

A ``Chart`` is data: two axes and the marks on them. Points are (x, y) in the units of the axes. A
point that an axis cannot show (not finite, or not positive on a logarithmic one) is left out, and a
line is broken there. ``draw`` renders a chart as one SVG element, ``draw_panels`` several charts in
a grid.

Text, axes and grid are drawn in ``currentColor``, so that an SVG inside a page follows the page's
colours, light or dark; a standalone file has a style that follows the reader's preference. Series
differ in colour and in dash, so that they are distinct without colour. Titles and descriptions
serve screen readers, every text is escaped, and identifiers are derived from the content: two
charts on a page do not clash, and equal charts give equal bytes.

>>> curve = Line(name="ε = 1/σ", points=((0.5, 2.0), (1.0, 1.0), (2.0, 0.5)))
>>> chart = Chart(title="Cost", x=Axis(label="σ"), y=Axis(label="ε (nats)"), marks=(curve,))
>>> draw(chart).startswith("<svg ")
True
>>> [tick.text for tick in Scale.over(Axis(label="ε"), [0.3, 9.7], start=0, end=100).ticks()]
['0', '2', '4', '6', '8', '10']
>>> [tick.text for tick in Scale.over(Axis(label="δ", scale="log"), [1e-6, 0.5], 0, 1).ticks()]
['10⁻⁶', '10⁻⁵', '10⁻⁴', '10⁻³', '10⁻²', '10⁻¹', '1']

References: SVG 1.1; WAI-ARIA Graphics Module (role img with a title and a description).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple, assert_never

CURVE_KINDS = ("profile", "trade-off", "attack", "renyi", "belief")
"""The charts of a plan's privacy curves (``privacy_curves``)."""
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis and its label with units. Ends that are None follow the marks."""

    label: str
    scale: Literal["linear", "log"] = "linear"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A polyline through ``points``; a faint one is a reference, such as a diagonal."""

    name: str
    points: tuple[Point, ...]
    faint: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The area between a lower and an upper end: ``points`` are (x, lower, upper)."""

    name: str
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dots:
    """Single points, each with a text if ``labels`` are given."""

    name: str
    points: tuple[Point, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceLine:
    """A line across the chart at one value of y, such as a budget."""

    name: str
    at: float


Mark = Line | Band | Dots | ReferenceLine


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A titled pair of axes with marks; ``description`` is the chart in words."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    description: str = ""


# ---- scales -------------------------------------------------------------------------

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MAX_TICKS = 7
MAX_SHOWN_VALUE = 1e200
"""The largest value shown; on a logarithmic axis its inverse is the smallest."""


class Tick(NamedTuple):
    """A labelled value of an axis."""

    value: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """``low`` to ``high`` of an axis, drawn from position ``start`` to ``end``."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, axis: Axis, values: Iterable[float], start: float, end: float) -> Scale:
        """Return the scale that shows ``values``, or the range of the axis, with round ends."""
        shown = [value for value in values if is_shown(axis, value)] or [1.0]
        low = min(shown) if axis.low is None else axis.low
        high = max(shown) if axis.high is None else axis.high
        if axis.scale == "log":
            low = low if axis.low is not None else 10.0 ** math.floor(math.log10(low))
            high = high if axis.high is not None else 10.0 ** math.ceil(math.log10(high))
            if not low < high:
                low, high = low / 10, high * 10
        else:
            min_span = 1e-9 * max(abs(low), abs(high), 1e-90)
            span = high - low
            if span <= min_span:
                span = max(abs(high), min_span) if high else 1.0
            step = _step(span)
            low = low if axis.low is not None else step * math.floor(low / step + 1e-9)
            high = high if axis.high is not None else step * math.ceil(high / step - 1e-9)
            if high - low <= min_span:
                low, high = low - step, high + step
        return cls(axis=axis, low=low, high=high, start=start, end=end)

    def position(self, value: float) -> float:
        """Return the position of ``value``, in pixels."""
        if self.axis.scale == "log":
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        # Values far outside are drawn just outside, which keeps the file small.
        return self.start + min(2.0, max(-1.0, share)) * (self.end - self.start)

    def contains(self, value: float) -> bool:
        """Whether ``value`` lies between the ends."""
        margin = 1e-9 * max(abs(self.low), abs(self.high))
        return self.low - margin <= value <= self.high + margin

    def ticks(self) -> list[Tick]:
        """Return round values from ``low`` to ``high``, few enough to be legible."""
        is_log = self.axis.scale == "log"
        values = self._decades() if is_log else self._round_steps()
        powers = is_log and (self.low < 1e-3 or self.high > 1e4)
        write = power_of_ten if powers else text_of
        return [Tick(value, write(value)) for value in values]

    def _round_steps(self) -> list[float]:
        step = _step(self.high - self.low)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        # A quotient of integers is nearer to the decimal than a multiple of the step.
        inverse = round(1 / step) if step < 1 else 0
        return [n / inverse if inverse else n * step for n in range(first, last + 1)]

    def _decades(self) -> list[float]:
        first = math.floor(math.log10(self.low) + 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        stride = max(1, math.ceil((last - first + 1) / _MAX_TICKS))
        result = [
            digit * 10.0**exponent
            for exponent in range(first, last + 1, stride)
            for digit in ((1, 2, 5) if last - first < 2 else (1,))
        ]
        return [v for v in result if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]


def is_shown(axis: Axis, value: float) -> bool:
    """Whether the axis can show ``value``."""
    within = abs(value) <= MAX_SHOWN_VALUE
    return within and (axis.scale == "linear" or value >= 1 / MAX_SHOWN_VALUE)


def text_of(value: float) -> str:
    """Return a tick's text: plain from 0.001 to 9999, else with a power of ten."""
    if value == 0:
        return "0"
    if 0.000999 <= abs(value) < 1e4:
        return f"{value:.6g}".replace("-", "−")
    return power_of_ten(value)


def power_of_ten(value: float) -> str:
    """Return ``value`` as a power of ten or a multiple of one; 1 and 10 stay plain."""
    if value in (1, 10):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    power = "10" + str(exponent).translate(_SUPERSCRIPTS)
    leading = value / 10.0**exponent
    if math.isclose(leading, 1, rel_tol=1e-9):
        return power
    return f"{leading:.3g}·{power}".replace("-", "−")


def _step(span: float) -> float:
    """Return the least of 1, 2 and 5 times a power of ten with at most six steps in ``span``."""
    approximate = span / (_MAX_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(approximate))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= approximate * (1 - 1e-9))


# ---- drawing ------------------------------------------------------------------------

COLOURS = ("#2f7ed8", "#d9722e", "#2e9e6b", "#a45bc9", "#c94f6d", "#8a7a2e")
"""Colours of the series, distinct on white and on black."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
_STYLE = (
    "<style>svg{color:#1b1f24;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6e9ec;background:#15181c}}</style>"
)
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 62.0, 16.0, 34.0, 46.0
_LEGEND_LETTER_WIDTH, _LABEL_LETTER_WIDTH = 6.1, 6.2
_LEGEND_ROW_HEIGHT = 16.0


def draw(chart: Chart, *, width: int = 480, height: int = 320, standalone: bool = False) -> str:
    """Return one SVG element; ``standalone`` gives it its own colours, for a file."""
    return draw_panels(
        chart.title, (chart,), width=width, height=height, columns=1, standalone=standalone
    )


def draw_panels(
    title: str,
    charts: Sequence[Chart],
    *,
    width: int = 480,
    height: int = 320,
    columns: int = 2,
    standalone: bool = False,
) -> str:
    """Return one SVG element with ``charts``, each of ``width`` by ``height``, in ``columns``.

    ``title`` is drawn above several charts; a single chart has its own.
    """
    several = len(charts) > 1
    head = 30 if several else 0
    columns = min(columns, len(charts))
    total_width = columns * width
    total_height = head + -(-len(charts) // max(1, columns)) * height
    body = "".join(
        _panel(chart, (index % columns) * width, head + (index // columns) * height, width, height)
        for index, chart in enumerate(charts)
    )
    heading = _text(total_width / 2, 21, title, size=15, anchor="middle", weight=600)
    description = " ".join(
        f"{chart.title}: {chart.description}" for chart in charts if chart.description
    )
    name = "c" + hashlib.sha256((title + description + body).encode()).hexdigest()[:10]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width}" height="{total_height}" '
        f'viewBox="0 0 {total_width} {total_height}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc" font-family="{_FONT}" font-size="11">'
        f'<title id="{name}-title">{_escape(title)}</title>'
        f'<desc id="{name}-desc">{_escape(description)}</desc>'
        f"{_STYLE if standalone else ''}{heading if several else ''}{body}</svg>\n"
    )


class Plot(NamedTuple):
    """The scales of a chart's inner frame."""

    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> str:
        """Return the position of a point as text."""
        return f"{_number(self.x.position(x))},{_number(self.y.position(y))}"

    def shows(self, x: float, y: float) -> bool:
        """Whether both axes can show a point."""
        return is_shown(self.x.axis, x) and is_shown(self.y.axis, y)


def scales(chart: Chart, width: float, height: float) -> Plot:
    """Return the scales by which ``draw`` draws a chart of this size."""
    rows = _legend_rows(chart, width - _LEFT_MARGIN - _RIGHT_MARGIN)
    bottom = height - len(rows) * _LEGEND_ROW_HEIGHT - _BOTTOM_MARGIN
    corners = list(_corners(chart))
    return Plot(
        x=Scale.over(chart.x, [x for x, _ in corners], _LEFT_MARGIN, width - _RIGHT_MARGIN),
        y=Scale.over(chart.y, [y for _, y in corners], bottom, _TOP_MARGIN),
    )


def _panel(chart: Chart, left: float, top: float, width: float, height: float) -> str:
    rows = _legend_rows(chart, width - _LEFT_MARGIN - _RIGHT_MARGIN)
    plot = scales(chart, width, height)
    drawn = [(mark, _mark(mark, index, plot)) for index, mark in enumerate(chart.marks)]
    marks = "".join(text for mark, text in drawn if not isinstance(mark, Dots))
    # Dots are drawn last and are not clipped by the frame.
    dots = "".join(text for mark, text in drawn if isinstance(mark, Dots))
    clip = "p" + hashlib.sha256(f"{left} {top} {chart!r}".encode()).hexdigest()[:10]
    frame = (
        f'x="{_number(plot.x.start)}" y="{_number(plot.y.end)}" '
        f'width="{_number(plot.x.end - plot.x.start)}" '
        f'height="{_number(plot.y.start - plot.y.end)}"'
    )
    return (
        f'<g transform="translate({_number(left)} {_number(top)})">'
        f'<clipPath id="{clip}"><rect {frame}/></clipPath>'
        f"{_text(width / 2, 20, chart.title, size=13, anchor='middle', weight=600)}"
        f"{_grid(plot)}"
        f'<g clip-path="url(#{clip})" fill="none" stroke-width="1.8">{marks}</g>'
        f'<rect {frame} fill="none" stroke="currentColor" stroke-opacity=".5"/>{dots}'
        f"{_labels(chart, plot)}{_legend(chart, rows, plot)}</g>"
    )


def _corners(chart: Chart) -> Iterator[Point]:
    """Yield the corners of the marks; nan for an axis that a mark does not use."""
    for mark in chart.marks:
        match mark:
            case Line(points=points) | Dots(points=points):
                yield from (
                    p for p in points if is_shown(chart.x, p[0]) and is_shown(chart.y, p[1])
                )
            case Band(points=triples):
                yield from ((x, end) for x, low, high in triples for end in (low, high))
            case ReferenceLine(at=at):
                yield math.nan, at
            case _:
                assert_never(mark)


def _mark(mark: Mark, index: int, plot: Plot) -> str:
    colour = COLOURS[index % len(COLOURS)]
    match mark:
        case Line(points=points, faint=True):
            return _path(
                points, plot, 'stroke="currentColor" stroke-opacity=".45" stroke-width="1"'
            )
        case Line(points=points):
            return _path(points, plot, f'stroke="{colour}"{_dash(index)}')
        case Band(points=triples):
            return _area(triples, plot, colour)
        case Dots(points=points, labels=labels):
            return _dots(points, labels, plot, colour)
        case ReferenceLine(at=at):
            if not is_shown(plot.y.axis, at):
                return ""
            y, left, right = map(_number, (plot.y.position(at), plot.x.start, plot.x.end))
            ends = f'x1="{left}" x2="{right}" y1="{y}" y2="{y}"'
            return f'<line {ends} stroke="{colour}" stroke-width="1.2" stroke-dasharray="5 4"/>'
        case _:
            assert_never(mark)


def _dash(index: int) -> str:
    dash = _DASHES[index % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _path(points: Sequence[Point], plot: Plot, style: str) -> str:
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if plot.shows(x, y):
            pieces[-1].append(plot.at(x, y))
        elif pieces[-1]:
            pieces.append([])
    data = " ".join("M" + " L".join(piece) for piece in pieces if piece)
    return f'<path d="{data}" {style} stroke-linejoin="round"/>' if data else ""


def _area(triples: Sequence[tuple[float, float, float]], plot: Plot, colour: str) -> str:
    """Return the area and its two edges; a lower end that cannot be shown is drawn at the frame."""
    upper = [(x, high) for x, _, high in triples if plot.shows(x, high)]
    lower = [
        (x, low if is_shown(plot.y.axis, low) else plot.y.low)
        for x, low, high in triples
        if plot.shows(x, high)
    ]
    if not upper:
        return ""
    outline = "M" + " L".join(plot.at(x, y) for x, y in (*upper, *reversed(lower))) + "Z"
    edges = _path(upper, plot, f'stroke="{colour}"') + _path(
        lower, plot, f'stroke="{colour}" stroke-width="1"'
    )
    return f'<path d="{outline}" fill="{colour}" fill-opacity=".22"/>{edges}'


def _dots(points: Sequence[Point], labels: Sequence[str], plot: Plot, colour: str) -> str:
    shown = {
        index: (plot.x.position(x), plot.y.position(y))
        for index, (x, y) in enumerate(points)
        if plot.shows(x, y) and plot.x.contains(x) and plot.y.contains(y)
    }
    taken = [_Box(x - 4, y - 4, x + 4, y + 4) for x, y in shown.values()]
    result = []
    for index, (x, y) in shown.items():
        result.append(_circle(x, y, colour))
        if index < len(labels):
            rightwards = x < (plot.x.start + plot.x.end) / 2
            side, anchor = (7, "start") if rightwards else (-7, "end")
            width = _LABEL_LETTER_WIDTH * len(labels[index])
            left = x + side if rightwards else x + side - width
            baseline = _free_baseline(left, y, width, taken, plot)
            result.append(_text(x + side, baseline, labels[index], anchor=anchor))
    return "".join(result)


def _circle(x: float, y: float, colour: str) -> str:
    return (
        f'<circle cx="{_number(x)}" cy="{_number(y)}" r="4" fill="{colour}" '
        'stroke="currentColor" stroke-width=".8"/>'
    )


class _Box(NamedTuple):
    """The bounding box of something drawn, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def _free_baseline(left: float, y: float, width: float, taken: list[_Box], plot: Plot) -> float:
    """Return a baseline in the frame at which a label overlaps nothing, and add it to ``taken``."""
    boxes = [
        _Box(left, y + offset - 10, left + width, y + offset + 2)
        for offset in (-6, 15, -19, 28, -32, 41, -45)
    ]
    inside = [box for box in boxes if plot.y.end <= box.top and box.bottom <= plot.y.start]
    free = (box for box in inside if not any(map(box.overlaps, taken)))
    result = next(free, boxes[0])
    taken.append(result)
    return result.bottom - 2


def _grid(plot: Plot) -> str:
    left, right, bottom, top = map(_number, (plot.x.start, plot.x.end, plot.y.start, plot.y.end))
    lines = [f"M{_number(plot.x.position(t.value))},{bottom}V{top}" for t in plot.x.ticks()]
    lines += [f"M{left},{_number(plot.y.position(t.value))}H{right}" for t in plot.y.ticks()]
    return f'<path d="{" ".join(lines)}" stroke="currentColor" stroke-opacity=".13"/>'


def _labels(chart: Chart, plot: Plot) -> str:
    bottom, middle = plot.y.start, (plot.y.start + plot.y.end) / 2
    result = [
        _text(plot.x.position(tick.value), bottom + 15, tick.text, anchor="middle")
        for tick in plot.x.ticks()
    ]
    result += [
        _text(_LEFT_MARGIN - 6, plot.y.position(tick.value) + 4, tick.text, anchor="end")
        for tick in plot.y.ticks()
    ]
    centre = (plot.x.start + plot.x.end) / 2
    result.append(_text(centre, bottom + 33, chart.x.label, size=12, anchor="middle"))
    turned = f' transform="rotate(-90 14 {_number(middle)})"'
    result.append(_text(14, middle, chart.y.label, size=12, anchor="middle", more=turned))
    return "".join(result)


def _legend_rows(chart: Chart, width: float) -> list[list[int]]:
    """Return the indices of the marks in each row of the legend."""
    rows: list[list[int]] = []
    used = math.inf
    for index, mark in enumerate(chart.marks):
        if not mark.name:
            continue
        if used + _entry_width(mark) > width:
            rows.append([])
            used = 0.0
        rows[-1].append(index)
        used += _entry_width(mark)
    return rows


def _entry_width(mark: Mark) -> float:
    return 34 + _LEGEND_LETTER_WIDTH * len(mark.name)


def _legend(chart: Chart, rows: list[list[int]], plot: Plot) -> str:
    result = []
    for row, indices in enumerate(rows):
        x, y = _LEFT_MARGIN, plot.y.start + _BOTTOM_MARGIN + row * _LEGEND_ROW_HEIGHT + 4
        for index in indices:
            mark = chart.marks[index]
            result.append(_legend_symbol(mark, index, x, y - 4))
            result.append(_text(x + 24, y, mark.name))
            x += _entry_width(mark)
    return "".join(result)


def _legend_symbol(mark: Mark, index: int, x: float, y: float) -> str:
    colour = COLOURS[index % len(COLOURS)]
    match mark:
        case Dots():
            return _circle(x + 9, y, colour)
        case Band():
            return (
                f'<rect x="{_number(x)}" y="{_number(y - 5)}" width="18" height="10" '
                f'fill="{colour}" fill-opacity=".4" stroke="{colour}"/>'
            )
        case Line(faint=True):
            style = 'stroke="currentColor" stroke-opacity=".45"'
        case Line():
            style = f'stroke="{colour}" stroke-width="1.8"{_dash(index)}'
        case ReferenceLine():
            style = f'stroke="{colour}" stroke-width="1.2" stroke-dasharray="5 4"'
        case _:
            assert_never(mark)
    return f'<path d="M{_number(x)},{_number(y)}h18" {style}/>'


def _text(
    x: float,
    y: float,
    content: str,
    *,
    size: int | None = None,
    anchor: str = "start",
    weight: int | None = None,
    more: str = "",
) -> str:
    attributes = f' font-size="{size}"' if size else ""
    attributes += f' font-weight="{weight}"' if weight else ""
    attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return (
        f'<text x="{_number(x)}" y="{_number(y)}"{attributes} '
        f'fill="currentColor" stroke="none"{more}>{_escape(content)}</text>'
    )


def _escape(content: str) -> str:
    """Escape ``content`` and replace the characters that XML cannot hold."""
    return escape(_NOT_XML.sub("�", content), quote=True)


def _number(value: float) -> str:
    """Format ``value`` with two decimals at most and no negative zero."""
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")
