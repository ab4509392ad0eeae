"""Charts on pages: SVG, and the data with which ``charts.js`` makes them interactive.

The SVG remains for print, screen readers and browsers without JavaScript.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from itertools import chain, pairwise
from typing import Any

from fastapi import Request, Response

from affidavit.assessment import recognition_chart, signed_bounds
from affidavit.assessment.charts import (
    Band,
    Chart,
    Dots,
    Line,
    ReferenceLine,
    draw,
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
    return f'<div class="chart" data-chart="{escape(data_of(chart))}">{svg}</div>'


def meaning_figure(guarantee: Mapping[str, Any] | None) -> str:
    """Return the chart of what a signed guarantee means; empty if there is none."""
    bounds = None if guarantee is None else signed_bounds(guarantee)
    return "" if bounds is None else recognition_figure(*bounds)


def recognition_figure(points: Sequence[tuple[float, float]], mu: float | None = None) -> str:
    """Return the chart of what a guarantee with these points (ε, δ) means."""
    return draw(recognition_chart(points, mu), width=360, height=230)


def chart_response(request: Request, chart: Chart, *, width: int, height: int) -> Response:
    """Return ``chart`` as an SVG file, or for htmx as the figure that replaces the image."""
    if is_fragment(request):
        figure = f"<figure>{figure_of(chart, width=width, height=height)}</figure>"
        return Response(figure, headers=PRIVATE, media_type="text/html; charset=utf-8")
    svg = draw(chart, width=width, height=height, standalone=True)
    return Response(svg, headers={**PRIVATE, **SVG_POLICY}, media_type="image/svg+xml")


def data_of(chart: Chart) -> str:
    """Return the data of ``chart`` as JSON, without points that are not finite."""
    series: list[dict[str, Any]] = []
    across: list[dict[str, Any]] = []
    for mark in chart.marks:
        match mark:
            case Line():
                series.append({"name": mark.name, **_series(mark.points), "faint": mark.faint})
            case Band():
                for end, name in ((1, "at least"), (2, "at most")):
                    points = [(point[0], point[end]) for point in mark.points]
                    series.append({"name": f"{mark.name}, {name}", **_series(points)})
            case Dots():
                series.append({"name": mark.name, **_series(mark.points), "dots": True})
            case ReferenceLine():
                across.append({"name": mark.name, "at": mark.at})
    return json.dumps(
        {
            "title": chart.title,
            "x": asdict(chart.x),
            "y": asdict(chart.y),
            "series": series,
            "across": across,
        },
        allow_nan=False,
        ensure_ascii=False,
        separators=(",", ":"),
    )


def _series(points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Sort points by x and keep one for each x: at a jump, the value after it."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    stepped = any(before[0] == after[0] for before, after in pairwise(finite))
    return {"points": sorted(dict(finite).items()), "stepped": stepped}


def step_points(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the points of a step function, each of whose values holds until the next x."""
    before = [(after[0], before[1]) for before, after in pairwise(points)]
    return (points[0], *chain.from_iterable(zip(before, points[1:], strict=True)))
