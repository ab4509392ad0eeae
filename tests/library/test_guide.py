"""``docs/library.md``: its blocks run, and both sides of each equivalent agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.docs.pages import DOCS, blocks

PAGE = DOCS / "library.md"
ROW = re.compile(r"^\| `([^|]+)` \| `([^|]+)` \|$", re.MULTILINE)
TABLE = PAGE.read_text(encoding="utf-8").partition("## Equivalents")[2]
ROWS = ROW.findall(TABLE)
AGREE = 1e-2
"""Relative difference between two libraries' numbers; Opacus adds 0.01 to its ε."""


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page's blocks define."""
    result: dict[str, Any] = {}
    code = "\n".join(
        block.text for block in blocks(PAGE) if block.language == "python" and not block.excerpt
    )
    exec(compile(code, str(PAGE), "exec"), result)
    return result


def test_the_numbers_of_the_page(names: dict[str, Any]) -> None:
    assert names["bound"].lower < names["bound"] < 1.52
    assert names["sigma"] < 1.1
    assert names["most"] > 1000
    assert len(names["rows"]) == 6
    assert len(ROWS) == sum(line.startswith("| `") for line in TABLE.splitlines())


@pytest.fixture(scope="module")
def peers(names: dict[str, Any]) -> Callable[[str], float]:
    """The number of another library, computed once where several rows have it."""
    return cache(lambda code: float(eval(code, names)))


@pytest.mark.filterwarnings("ignore:Optimal order")
@pytest.mark.parametrize(("theirs", "ours"), ROWS)
def test_an_equivalent_gives_the_same_number(
    names: dict[str, Any], peers: Callable[[str], float], theirs: str, ours: str
) -> None:
    expected, result = peers(theirs), eval(ours, names)
    assert result == pytest.approx(expected, rel=AGREE)
    if hasattr(result, "lower"):
        assert result.lower <= expected * (1 + 1e-9)
