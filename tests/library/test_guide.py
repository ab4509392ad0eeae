"""``docs/reference/library.md``: its blocks run, and both sides of each equivalent agree."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from dp_accounting.dp_event import (
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from dp_accounting.pld import PLDAccountant

from tests.support.document_blocks import DOCS, ROOT, blocks

PAGE = DOCS / "reference/library.md"
ROW = re.compile(r"^\| `([^|]+)` \| `([^|]+)` \|$", re.MULTILINE)
TABLE, _, OF_JAX = (
    PAGE.read_text(encoding="utf-8")
    .partition("## Equivalents\n")[2]
    .partition("## Equivalents of jax-privacy\n")
)
ROWS = ROW.findall(TABLE)
ANSWERS = json.loads((ROOT / "tests/vectors/jax_privacy.json").read_text())
"""What jax-privacy said, as ``python -m tests.peers.jax_privacy`` wrote it."""
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


@pytest.mark.by_turns
@pytest.mark.ordinary("not theirs11-*", "not theirs12-*", "not dp_accounting.calibrate*")
@pytest.mark.filterwarnings("ignore:Optimal order")
@pytest.mark.parametrize(("theirs", "ours"), ROWS)
def test_an_equivalent_gives_the_same_number(
    names: dict[str, Any], peers: Callable[[str], float], theirs: str, ours: str
) -> None:
    expected, result = peers(theirs), eval(ours, names)
    assert result == pytest.approx(expected, rel=AGREE)
    if hasattr(result, "lower"):
        assert result.lower <= expected * (1 + 1e-9)


@pytest.mark.parametrize(("theirs", "ours"), ROW.findall(OF_JAX))
def test_an_equivalent_gives_the_number_of_jax_privacy(
    names: dict[str, Any], theirs: str, ours: str
) -> None:
    expected, result = ANSWERS[theirs], eval(ours, names)
    assert result == pytest.approx(expected, rel=AGREE)
    assert getattr(result, "lower", 0.0) <= expected * (1 + 1e-9)


def test_every_answer_of_jax_privacy_stands_in_the_guide() -> None:
    assert [theirs for theirs, _ in ROW.findall(OF_JAX)] == list(ANSWERS)


@pytest.mark.ordinary("Poisson")
@pytest.mark.parametrize(
    ("call", "event"),
    [
        ("pld.compute_epsilon(1000, params)", PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))),
        (
            "pld.compute_epsilon(1000, dataclasses.replace(params, truncated_batch_size=750))",
            TruncatedSubsampledGaussianDpEvent(60_000, 0.01, 750, 1.1),
        ),
    ],
    ids=["Poisson", "truncated"],
)
def test_jax_privacy_answers_as_dp_accounting_does(call: str, event: DpEvent) -> None:
    expected = PLDAccountant().compose(event, 1000).get_epsilon(1e-5)
    assert ANSWERS[call] == pytest.approx(expected, rel=2e-9)
