"""From a chart to SVG text.

Text, axes and grid are drawn in ``currentColor``, so that an SVG inside a page follows the
page's colours, light or dark; a standalone file has a style that follows the reader's
preference. Series differ in colour and in dash, so that they are distinct without colour.
Titles and descriptions serve screen readers, every text is escaped, and identifiers
are derived from the content, so that two charts on a page do not clash and equal charts give
equal bytes.

References: SVG 1.1; WAI-ARIA Graphics Module (role img with a title and a description).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple, assert_never

from affidavit.certificate.charts.chart import (
    Band,
    Chart,
    Dots,
    Line,
    Mark,
    ReferenceLine,
    Scale,
    is_shown,
)

COLOURS = ("#2f7ed8", "#d9722e", "#2e9e6b", "#a45bc9", "#c94f6d", "#8a7a2e")
"""Told apart on white and on black alike."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
_STYLE = (
    "<style>svg{color:#1b1f24;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6e9ec;background:#15181c}}</style>"
)
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 16.0, 34.0, 46.0
_LETTER = 6.1
"""About the width of a letter of the legend."""
_ROW = 16.0


def draw(chart: Chart, *, width: int = 480, height: int = 320, standalone: bool = False) -> str:
    """One SVG element; ``standalone`` gives it its own colours, for a file."""
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
    """One SVG element with ``charts``, each of ``width`` by ``height``, in rows of ``columns``.

    The title is drawn where there are several charts; of one, the chart's own is.
    """
    several = len(charts) > 1
    head = 30 if several else 0
    across = min(columns, len(charts))
    whole = across * width, head + -(-len(charts) // max(1, across)) * height
    body = "".join(
        _panel(chart, (index % across) * width, head + (index // across) * height, width, height)
        for index, chart in enumerate(charts)
    )
    heading = _text(whole[0] / 2, 21, title, size=15, anchor="middle", weight=600)
    stated = " ".join(
        f"{chart.title}: {chart.description}" for chart in charts if chart.description
    )
    name = "c" + hashlib.sha256((title + stated + body).encode()).hexdigest()[:10]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole[0]}" height="{whole[1]}" '
        f'viewBox="0 0 {whole[0]} {whole[1]}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc" font-family="{_FONT}" font-size="11">'
        f'<title id="{name}-title">{_clean(title)}</title>'
        f'<desc id="{name}-desc">{_clean(stated)}</desc>'
        f"{_STYLE if standalone else ''}{heading if several else ''}{body}</svg>\n"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plot:
    """The inner frame of a chart, with its scales."""

    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> str:
        return f"{_number(self.x.position(x))},{_number(self.y.position(y))}"

    def shows(self, x: float, *ys: float) -> bool:
        return is_shown(self.x.axis, x) and all(is_shown(self.y.axis, y) for y in ys)


def _panel(chart: Chart, left: float, top: float, width: float, height: float) -> str:
    rows = _legend_rows(chart, width - _LEFT - _RIGHT)
    plot = _plot(chart, width, height - len(rows) * _ROW)
    drawn = [(mark, _mark(mark, index, plot)) for index, mark in enumerate(chart.marks)]
    marks = "".join(text for mark, text in drawn if not isinstance(mark, Dots))
    # Dots stand on top, and whole where they stand on the frame.
    dots = "".join(text for mark, text in drawn if isinstance(mark, Dots))
    clip = "p" + hashlib.sha256(f"{left} {top} {chart!r}".encode()).hexdigest()[:10]
    frame = _box(plot)
    return (
        f'<g transform="translate({_number(left)} {_number(top)})">'
        f'<clipPath id="{clip}"><rect {frame}/></clipPath>'
        f"{_text(width / 2, 20, chart.title, size=13, anchor='middle', weight=600)}"
        f"{_grid(plot)}"
        f'<g clip-path="url(#{clip})" fill="none" stroke-width="1.8">{marks}</g>'
        f'<rect {frame} fill="none" stroke="currentColor" stroke-opacity=".5"/>{dots}'
        f"{_labels(chart, plot)}{_legend(chart, rows, plot)}</g>"
    )


def _plot(chart: Chart, width: float, height: float) -> _Plot:
    corners = list(_extent(chart))
    xs, ys = zip(*corners, strict=True) if corners else ((), ())
    return _Plot(
        x=Scale.over(chart.x, xs, _LEFT, width - _RIGHT),
        y=Scale.over(chart.y, ys, height - _BOTTOM, _TOP),
    )


def _extent(chart: Chart) -> Iterator[tuple[float, float]]:
    """Corners of the marks; nan for an axis that a mark does not use."""
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


# ---- marks --------------------------------------------------------------------------


def _mark(mark: Mark, index: int, plot: _Plot) -> str:
    colour = COLOURS[index % len(COLOURS)]
    match mark:
        case Line(points=points, faint=True):
            return _path(
                points, plot, 'stroke="currentColor" stroke-opacity=".45" stroke-width="1"'
            )
        case Line(points=points):
            dash = _DASHES[index % len(_DASHES)]
            dashed = f' stroke-dasharray="{dash}"' if dash else ""
            return _path(points, plot, f'stroke="{colour}"{dashed}')
        case Band(points=triples):
            return _area(triples, plot, colour)
        case Dots(points=points, labels=labels):
            return _dots(points, labels, plot, colour)
        case ReferenceLine():
            return _rule(mark, plot, colour)
        case _:
            assert_never(mark)


def _path(points: Sequence[tuple[float, float]], plot: _Plot, style: str) -> str:
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if plot.shows(x, y):
            pieces[-1].append(plot.at(x, y))
        elif pieces[-1]:
            pieces.append([])
    data = " ".join("M" + " L".join(piece) for piece in pieces if piece)
    return f'<path d="{data}" {style} stroke-linejoin="round"/>' if data else ""


def _area(triples: Sequence[tuple[float, float, float]], plot: _Plot, colour: str) -> str:
    """The area and its two edges; an end that cannot be shown is at the frame's edge."""
    floor = plot.y.low
    shown = [
        (x, low if is_shown(plot.y.axis, low) else floor, high)
        for x, low, high in triples
        if plot.shows(x, high)
    ]
    if not shown:
        return ""
    upper = [plot.at(x, high) for x, _, high in shown]
    lower = [plot.at(x, low) for x, low, _ in shown]
    outline = "M" + " L".join(upper + lower[::-1]) + "Z"
    edges = _path([(x, high) for x, _, high in shown], plot, f'stroke="{colour}"') + _path(
        [(x, low) for x, low, _ in shown], plot, f'stroke="{colour}" stroke-width="1"'
    )
    return f'<path d="{outline}" fill="{colour}" fill-opacity=".22"/>{edges}'


def _dots(
    points: Sequence[tuple[float, float]], labels: Sequence[str], plot: _Plot, colour: str
) -> str:
    shown = {
        index: (plot.x.position(x), plot.y.position(y))
        for index, (x, y) in enumerate(points)
        if plot.shows(x, y) and plot.x.holds(x) and plot.y.holds(y)
    }
    taken = [_Box(across - 4, down - 4, across + 4, down + 4) for across, down in shown.values()]
    result = []
    for index, (across, down) in shown.items():
        result.append(
            f'<circle cx="{_number(across)}" cy="{_number(down)}" r="4" fill="{colour}" '
            'stroke="currentColor" stroke-width=".8"/>'
        )
        if index < len(labels):
            right = across < (plot.x.start + plot.x.end) / 2
            side, anchor = (7, "start") if right else (-7, "end")
            base = _free_base(across + side, down, len(labels[index]), right, taken, plot)
            result.append(_text(across + side, base, labels[index], anchor=anchor))
    return "".join(result)


class _Box(NamedTuple):
    """The place of something drawn, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        """Whether the two boxes overlap."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def _free_base(
    x: float, y: float, letters: int, right: bool, taken: list[_Box], plot: _Plot
) -> float:
    """The base of a text beside a dot, in the frame, where it meets nothing of ``taken``.

    It is then added to what is taken.
    """
    top, bottom = sorted((plot.y.start, plot.y.end))
    width = 6.2 * letters
    begin = x if right else x - width
    boxes = [
        _Box(begin, y + rise - 10, begin + width, y + rise + 2)
        for rise in (-6, 15, -19, 28, -32, 41, -45)
    ]
    inside = [item for item in boxes if top <= item.top and item.bottom <= bottom]
    box = next((entry for entry in inside if not any(map(entry.meets, taken))), boxes[0])
    taken.append(box)
    return box.bottom - 2


def _rule(rule: ReferenceLine, plot: _Plot, colour: str) -> str:
    if not is_shown(plot.y.axis, rule.at):
        return ""
    at, left, right = map(_number, (plot.y.position(rule.at), plot.x.start, plot.x.end))
    ends = f'x1="{left}" x2="{right}" y1="{at}" y2="{at}"'
    return f'<line {ends} stroke="{colour}" stroke-width="1.2" stroke-dasharray="5 4"/>'


# ---- frame --------------------------------------------------------------------------


def _grid(plot: _Plot) -> str:
    left, right, bottom, top = (
        _number(item) for item in (plot.x.start, plot.x.end, plot.y.start, plot.y.end)
    )
    lines = []
    for tick in plot.x.ticks():
        at = _number(plot.x.position(tick.value))
        lines.append(f"M{at},{bottom}V{top}")
    for tick in plot.y.ticks():
        at = _number(plot.y.position(tick.value))
        lines.append(f"M{left},{at}H{right}")
    return f'<path d="{" ".join(lines)}" stroke="currentColor" stroke-opacity=".13"/>'


def _labels(chart: Chart, plot: _Plot) -> str:
    bottom, middle = plot.y.start, (plot.y.start + plot.y.end) / 2
    result = []
    for tick in plot.x.ticks():
        result.append(_text(plot.x.position(tick.value), bottom + 15, tick.text, anchor="middle"))
    for tick in plot.y.ticks():
        result.append(_text(_LEFT - 6, plot.y.position(tick.value) + 4, tick.text, anchor="end"))
    across = (plot.x.start + plot.x.end) / 2
    result.append(_text(across, bottom + 33, chart.x.label, size=12, anchor="middle"))
    turned = f' transform="rotate(-90 14 {_number(middle)})"'
    result.append(_text(14, middle, chart.y.label, size=12, anchor="middle", more=turned))
    return "".join(result)


def _legend_rows(chart: Chart, width: float) -> list[list[int]]:
    """The marks of each row of the legend."""
    rows: list[list[int]] = []
    used = math.inf
    for index, mark in enumerate(chart.marks):
        if not mark.name:
            continue
        length = _entry_width(mark)
        if used + length > width:
            rows.append([])
            used = 0.0
        rows[-1].append(index)
        used += length
    return rows


def _entry_width(mark: Mark) -> float:
    return 34 + _LETTER * len(mark.name)


def _legend(chart: Chart, rows: list[list[int]], plot: _Plot) -> str:
    result = []
    for row, indices in enumerate(rows):
        down, across = plot.y.start + _BOTTOM + row * _ROW + 4, _LEFT
        for index in indices:
            mark = chart.marks[index]
            result.append(_key(mark, index, across, down - 4))
            result.append(_text(across + 24, down, mark.name))
            across += _entry_width(mark)
    return "".join(result)


def _key(mark: Mark, index: int, across: float, down: float) -> str:
    colour = COLOURS[index % len(COLOURS)]
    x, y = _number(across), _number(down)
    match mark:
        case Dots():
            return (
                f'<circle cx="{_number(across + 9)}" cy="{y}" r="4" fill="{colour}" '
                'stroke="currentColor" stroke-width=".8"/>'
            )
        case Band():
            return (
                f'<rect x="{x}" y="{_number(down - 5)}" width="18" height="10" fill="{colour}" '
                f'fill-opacity=".4" stroke="{colour}"/>'
            )
        case Line(faint=True):
            style = 'stroke="currentColor" stroke-opacity=".45"'
        case Line():
            dash = _DASHES[index % len(_DASHES)]
            style = f'stroke="{colour}" stroke-width="1.8"' + (
                f' stroke-dasharray="{dash}"' if dash else ""
            )
        case ReferenceLine():
            style = f'stroke="{colour}" stroke-width="1.2" stroke-dasharray="5 4"'
        case _:
            assert_never(mark)
    return f'<path d="M{x},{y}h18" {style}/>'


def _box(plot: _Plot) -> str:
    return (
        f'x="{_number(plot.x.start)}" y="{_number(plot.y.end)}" '
        f'width="{_number(plot.x.end - plot.x.start)}" '
        f'height="{_number(plot.y.start - plot.y.end)}"'
    )


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
    sized = f' font-size="{size}"' if size else ""
    heavy = f' font-weight="{weight}"' if weight else ""
    anchored = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return (
        f'<text x="{_number(x)}" y="{_number(y)}"{sized}{heavy}{anchored} '
        f'fill="currentColor" stroke="none"{more}>{_clean(content)}</text>'
    )


def _clean(content: str) -> str:
    """``content`` escaped, without what XML cannot hold."""
    return escape(_NOT_XML.sub("�", content), quote=True)


def _number(value: float) -> str:
    """Two decimals at most, and no negative zero."""
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")
