"""Each attack of the threat model names a test that exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL, ATTACKS = ROOT / "docs/explanation/threat-model.md", ROOT / "contributing/attacks.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(page: Path) -> list[str]:
    heads = ("| Stolen", "| Attack", "| Row")
    lines = page.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(heads)]


@cache
def functions_of(file: str) -> set[str]:
    """The names of a module's functions."""
    return set(re.findall(r"^def (\w+)\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_attack_has_a_test_and_every_test_that_is_named_exists() -> None:
    assert len(rows(ATTACKS)) > 30
    for row in rows(ATTACKS):
        named = NAMED.search(row)
        assert named, row
        assert named[2] in functions_of(named[1]), row


def test_every_theft_of_the_model_is_among_the_attacks() -> None:
    thefts = {row.split(" | ")[0] for row in rows(MODEL)}
    assert len(thefts) > 10
    assert thefts <= {row.split(" | ")[0] for row in rows(ATTACKS)}
