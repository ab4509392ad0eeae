"""Charts are well-formed, safe and deterministic SVG, and show each mark at its position."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.support.random_seeds import examples

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
AXES = st.sampled_from([Axis(label="x"), Axis(label="x", scale="log")])
POINTS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6).map(tuple)


def chart(*marks: object, x: Axis | None = None, y: Axis | None = None, title: str = "t") -> Chart:
    return Chart(
        title=title,
        x=x or Axis(label="x"),
        y=y or Axis(label="y"),
        marks=marks,  # type: ignore[arg-type]
    )


def tree(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


@settings(max_examples=examples(60))
@given(x=AXES, y=AXES, line=POINTS, dots=POINTS, at=NUMBERS, name=st.text(max_size=12))
def test_whatever_is_drawn_is_well_formed_and_finite(
    x: Axis,
    y: Axis,
    line: tuple[tuple[float, float], ...],
    dots: tuple[tuple[float, float], ...],
    at: float,
    name: str,
) -> None:
    bands = tuple((a, min(b, a), max(b, a)) for a, b in line if not math.isnan(a + b))
    text = draw(
        chart(
            Line(name=name, points=line),
            Band(name=name, points=bands),
            Dots(name=name, points=dots, labels=(name,)),
            ReferenceLine(name=name, at=at),
            x=x,
            y=y,
            title=name,
        ),
        standalone=True,
    )
    assert tree(text).tag == SVG + "svg"
    assert not re.search(r"\b(nan|inf)\b", re.sub(r">[^<]*<", "><", text))


def test_labels_of_dots_side_by_side_or_in_one_place_stand_apart() -> None:
    points = ((1.0, 1.0), (1.0, 1.0), (1.05, 1.02), (9.0, 9.0), (9.0, 9.0))
    labels = tuple(f"mechanism {place}" for place in range(len(points)))
    root = tree(draw(chart(Dots(name="all", points=points, labels=labels))))
    placed = [
        (float(item.get("x", 0)), float(item.get("y", 0)))
        for item in root.iter(SVG + "text")
        if (item.text or "").startswith("mechanism")
    ]
    assert len(placed) == len(points)
    for place, (x, y) in enumerate(placed):
        for across, down in placed[:place]:
            assert abs(x - across) > 60 or abs(y - down) > 10


HOSTILE = "</text><script>alert(1)</script>&\"'\x00\x1b]8;;\ud800"


def test_text_is_escaped_wherever_it_stands() -> None:
    hostile = HOSTILE.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    text = draw(
        Chart(
            title=hostile,
            description=hostile,
            x=Axis(label=hostile),
            y=Axis(label=hostile),
            marks=(Dots(name=hostile, points=((1, 1),), labels=(hostile,)),),
        )
    )
    root = tree(text)
    assert not list(root.iter(SVG + "script"))
    assert "<script" not in text
    assert "\x00" not in text
    assert sum("alert(1)" in (item.text or "") for item in root.iter()) >= 6


def test_the_same_chart_is_the_same_bytes_and_another_has_other_identifiers() -> None:
    line = Line(name="a", points=((0, 0), (1, 1)))
    one, other = chart(line, title="one"), chart(line, title="other")
    assert draw(one) == draw(one)
    ids = [set(re.findall(r'id="([^"]+)"', draw(item))) for item in (one, other)]
    assert not ids[0] & ids[1]
    both = draw_panels("both", (one, other))
    result = re.findall(r'id="([^"]+)"', both)
    assert len(result) == len(set(result))
    assert set(re.findall(r"url\(#([^)]+)\)", both)) <= set(result)


def test_a_screen_reader_finds_title_and_description() -> None:
    root = tree(
        draw(Chart(title="t", description="falls", x=Axis(label="x"), y=Axis(label="y"), marks=()))
    )
    assert root.get("role") == "img"
    stated = {
        item.get("id"): item.text for item in root if item.tag in (SVG + "title", SVG + "desc")
    }
    assert [stated[entry] for entry in (root.get("aria-labelledby") or "").split()] == [
        "t",
        "t: falls",
    ]


def test_points_stand_where_the_axes_say() -> None:
    dots = Dots(name="d", points=((1.0, 1e-6), (10.0, 1e-3), (100.0, 1.0)))
    root = tree(
        draw(
            chart(
                dots,
                x=Axis(label="x", scale="log", low=1, high=100),
                y=Axis(label="y", scale="log", low=1e-6, high=1),
            )
        )
    )
    circles = [
        (float(item.get("cx", "")), float(item.get("cy", ""))) for item in root.iter(SVG + "circle")
    ][:3]
    (left, low), (middle, centre), (right, high) = circles
    assert middle == pytest.approx((left + right) / 2, abs=0.02)
    assert centre == pytest.approx((low + high) / 2, abs=0.02)
    assert left < right
    assert low > high  # upwards on the page


def test_dots_outside_the_axes_are_left_out_and_those_on_the_frame_are_whole() -> None:
    dots = Dots(name="", points=((0.0, 0.0), (1.0, 1.0), (2.0, 0.5)))
    text = draw(chart(dots, x=Axis(label="x", low=0, high=1), y=Axis(label="y", low=0, high=1)))
    assert text.count("<circle") == 2
    assert "<circle" not in re.findall(r"<g clip-path.*?</g>", text)[0]


def test_a_line_is_broken_where_it_cannot_be_shown() -> None:
    points = ((1.0, 1.0), (2.0, math.nan), (3.0, 1.0), (4.0, 2.0))
    (path,) = re.findall(r'<path d="([^"]+)" stroke="#', draw(chart(Line(name="", points=points))))
    assert [piece.count(",") for piece in path.split("M")[1:]] == [1, 2]


def test_only_a_file_of_its_own_carries_a_style() -> None:
    assert "<style>" not in draw(chart())
    assert "prefers-color-scheme:dark" in draw(chart(), standalone=True)


@pytest.mark.parametrize(
    ("axis", "values", "texts"),
    [
        (Axis(label="x"), (0.0, 1.0), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Axis(label="x"), (-3.0, 8.0), ["−4", "−2", "0", "2", "4", "6", "8"]),
        (Axis(label="x"), (5.0, 5.0), None),
        (Axis(label="x", scale="log"), (1.0, 1000.0), ["1", "10", "100", "1000"]),
        (Axis(label="x", scale="log"), (0.2, 0.4), ["0.1", "0.2", "0.5", "1"]),
        (
            Axis(label="x", scale="log"),
            (1e-12, 1.0),
            ["10⁻¹²", "10⁻¹⁰", "10⁻⁸", "10⁻⁶", "10⁻⁴", "10⁻²", "1"],
        ),
        (Axis(label="x", scale="log"), (7.0, 7.0), None),
    ],
)
def test_ticks_are_round_and_few(
    axis: Axis, values: tuple[float, float], texts: list[str] | None
) -> None:
    root = tree(draw(chart(Dots(name="", points=tuple((v, 1.0) for v in values)), x=axis)))
    result = [
        item.text
        for item in root.iter(SVG + "text")
        if item.get("text-anchor") == "middle" and item.get("font-size") is None
    ]
    assert 2 <= len(result) <= 8
    if texts is not None:
        assert result == texts
