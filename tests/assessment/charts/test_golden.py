"""Charts that were reviewed, compared byte by byte.

A change of drawing fails here: look at the new pictures, and then write them with

    AFFIDAVIT_DRAW=1 pytest tests/assessment/charts/test_golden.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from affidavit.assessment.charts import (
    Axis,
    Band,
    Chart,
    Dots,
    Line,
    ReferenceLine,
    draw,
    draw_panels,
)

GOLDEN = Path(__file__).parent / "golden"

CURVE = Chart(
    title="ε against δ",
    x=Axis(label="δ", scale="log"),
    y=Axis(label="ε (nats)"),
    marks=(
        Band(name="bracket", points=((1e-9, 3.1, 3.4), (1e-6, 2.0, 2.3), (1e-3, 0.9, 1.3))),
        Line(name="certified", points=((1e-9, 3.4), (1e-6, 2.3), (1e-3, 1.3), (1e-1, 0.2))),
        Line(name="claimed by the plan & its paper", points=((1e-9, 1.7), (1e-3, 0.6))),
        Line(name="Rényi", points=((1e-8, 3.9), (1e-5, 2.4), (1e-4, float("nan")), (1e-2, 1.1))),
        ReferenceLine(name="target", at=1.5),
        ReferenceLine(name="cap", at=3.0),
    ),
)
DOTS = Chart(
    title="Utility <noise>",
    x=Axis(label="steps", scale="log"),
    y=Axis(label="error", scale="log"),
    marks=(
        Dots(
            name="mechanisms",
            points=((10.0, 0.1), (10.0, 0.1), (11.0, 0.11), (900.0, 4.0), (950.0, 4.1)),
            labels=("dense", "banded", "BLT", "identity", "a mechanism with a long name"),
        ),
        Line(name="reference", points=((10.0, 0.1), (1000.0, 10.0)), faint=True),
    ),
    description="Five mechanisms, of which two lie in one place.",
)
NOTHING = Chart(title="Nothing", x=Axis(label="x"), y=Axis(label="y"), marks=())

PICTURES = {
    "curve": lambda: draw(CURVE, standalone=True),
    "dots": lambda: draw(DOTS, width=300, height=240),
    "panels": lambda: draw_panels(
        "Three at once", (CURVE, DOTS, NOTHING), width=400, height=260, standalone=True
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_chart_is_drawn_as_it_was(name: str) -> None:
    drawn, stored = PICTURES[name](), GOLDEN / f"{name}.svg"
    if os.environ.get("AFFIDAVIT_DRAW"):
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(drawn, encoding="utf-8")
    assert _without_ids(drawn) == _without_ids(stored.read_text(encoding="utf-8"))


def _without_ids(svg: str) -> str:
    """``svg`` with one name for all ids, which are hashes of the content."""
    return re.sub(r"\b[cp][0-9a-f]{10}\b", "id", svg)
