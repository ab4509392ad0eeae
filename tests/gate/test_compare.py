"""``compare``: what is printed, the document, and the exit codes."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console

from affidavit.gate.render import plain_table

Document = Callable[..., dict[str, Any]]
Answer = Callable[..., tuple[int, dict[str, Any]]]
Run = Callable[..., Result]
Save = Callable[..., str]

WEAK = [{"name": "all", "clip_norm": 1, "noise_multiplier": 0.5}]


@pytest.fixture
def plans(save: Save, document: Document) -> Callable[..., tuple[str, str]]:
    """The quick plan, and the same with changes, as files."""
    return lambda **changes: (save(document(), "a.json"), save(document(**changes), "b.json"))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"steps": 12}, 0),
        ({"releases": WEAK}, 1),
        ({"sampling": {"scheme": "fixed_size", "lot_size": 10}}, 1),
        ({"adjacency": "zero_out"}, 3),
        ({"releases": WEAK, "adjacency": "zero_out"}, 1),
        ({"steps": 0}, 2),
        ({}, 0),
    ],
)
def test_exit_codes(
    plans: Callable[..., tuple[str, str]], run: Run, changes: dict[str, Any], code: int
) -> None:
    assert run("compare", *plans(**changes)).exit_code == code


def test_the_document_names_the_change_that_moved_epsilon(
    plans: Callable[..., tuple[str, str]], answer: Answer
) -> None:
    code, result = answer("compare", *plans(steps=12, name="longer"), "--json")
    assert (code, result["ranking"]) == (0, "first")
    assert result["strongest"] == {"epsilon": "/steps", "noise": None}
    steps = next(item for item in result["changes"] if item["pointer"] == "/steps")
    assert (steps["before"], steps["after"], steps["epsilon_moved"]) == (10, 12, "raised")
    assert steps["epsilon"] == result["second"]["epsilon"]


def test_the_text_says_why_guarantees_are_not_ranked(
    plans: Callable[..., tuple[str, str]], run: Run
) -> None:
    shown = run("compare", *plans(adjacency="zero_out")).stdout
    assert "not ranked" in shown
    assert "Set the same adjacency in both plans." in shown


def test_a_plan_that_cannot_be_read_is_named(save: Save, document: Document, run: Run) -> None:
    result = run("compare", save(document()), "missing.yaml")
    assert result.exit_code == 2
    assert "missing.yaml: unreadable" in result.stderr


def test_a_narrow_terminal_cuts_no_number_while_a_text_can_give_way() -> None:
    table = plain_table("", ("first", "second"), ("ε ≤", "σ"))
    table.add_row("e2e dp-muon published", "e2e dp-sgd published", "0.856243", "2.339512")
    console = Console(width=30, file=StringIO())
    console.print(table)
    assert {"0.856243", "2.339512"} <= set(console.file.getvalue().split())  # type: ignore[attr-defined]
