"""Charts on pages: SVG, and the values that ``charts.js`` shows under the pointer.

The server draws every chart; the script adds a line and a text to the drawing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import chain, pairwise
from typing import Any

from fastapi import Request, Response

from affidavit.assessment import chart_recognition, signed_bounds
from affidavit.assessment.charts import (
    Band,
    Chart,
    Dots,
    Line,
    Plot,
    ReferenceLine,
    draw,
    scales,
)
from affidavit.service.web.pages.response import PRIVATE, is_fragment

SVG_POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""A chart file contains a style and no scripts."""
TIME_UNITS = (("days", 86_400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
"""Time units of charts, with their seconds."""


def unit_of(span: float) -> tuple[str, int]:
    """Return the time unit for a chart over ``span`` seconds, with its seconds."""
    return next((unit for unit in TIME_UNITS if span >= unit[1]), TIME_UNITS[-1])


def figure_of(chart: Chart, *, width: int, height: int) -> str:
    """Return ``chart`` as SVG in an element with its data."""
    svg = draw(chart, width=width, height=height)
    data = data_of(chart, width=width, height=height)
    return f'<div class="chart" data-chart="{escape(data)}">{svg}</div>'


def meaning_figure(guarantee: Mapping[str, Any] | None) -> str:
    """Return the chart of what a signed guarantee means; empty if there is none."""
    bounds = None if guarantee is None else signed_bounds(guarantee)
    return "" if bounds is None else recognition_figure(*bounds)


def recognition_figure(
    points: Sequence[tuple[float, float]], mu: float | None = None, remainder: float = 0.0
) -> str:
    """Return the chart of what a guarantee with these points (ε, δ) means."""
    return draw(chart_recognition(points, mu, remainder), width=360, height=230)


def chart_response(request: Request, chart: Chart, *, width: int, height: int) -> Response:
    """Return ``chart`` as an SVG file, or for htmx as the figure that replaces the image."""
    if is_fragment(request):
        figure = f"<figure>{figure_of(chart, width=width, height=height)}</figure>"
        return Response(figure, headers=PRIVATE, media_type="text/html; charset=utf-8")
    svg = draw(chart, width=width, height=height, standalone=True)
    return Response(svg, headers={**PRIVATE, **SVG_POLICY}, media_type="image/svg+xml")


def data_of(chart: Chart, *, width: int, height: int) -> str:
    """Return the values of ``chart`` as JSON, with the position of each x in the drawing."""
    plot = scales(chart, width, height)
    series: list[dict[str, Any]] = []
    for mark in chart.marks:
        match mark:
            case Line() | Dots():
                series.append({"name": mark.name, **_series(mark.points, plot)})
            case Band():
                for end, name in ((1, "at least"), (2, "at most")):
                    points = [(point[0], point[end]) for point in mark.points]
                    series.append({"name": f"{mark.name}, {name}", **_series(points, plot)})
            case ReferenceLine():  # has one value, which its legend or its page states
                pass
    return json.dumps(
        {
            "title": chart.title,
            "x": chart.x.label,
            "width": width,
            "top": plot.y.end,
            "bottom": plot.y.start,
            "series": series,
        },
        allow_nan=False,
        ensure_ascii=False,
        separators=(",", ":"),
    )


def _series(points: Sequence[tuple[float, float]], plot: Plot) -> dict[str, Any]:
    """Return the shown points by x, one for each x: at a jump, the value after it."""
    shown = [(x, y) for x, y in points if plot.shows(x, y) and plot.x.contains(x)]
    stepped = any(before[0] == after[0] for before, after in pairwise(shown))
    by_x = sorted(dict(shown).items())
    return {"points": [(x, y, round(plot.x.position(x), 2)) for x, y in by_x], "stepped": stepped}


def step_points(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the points of a step function, each of whose values holds until the next x."""
    before = [(after[0], before[1]) for before, after in pairwise(points)]
    return (points[0], *chain.from_iterable(zip(before, points[1:], strict=True)))
