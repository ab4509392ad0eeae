"""The runner of ``make soak``: what it tells of, and that a failure is one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import PARTS, ROOMS, Part, soak
from tests.support.random_seeds import seeded

TESTS = Path(__file__).parent

GOOD = Part(name="good", of="nothings", module=("timeit", "-n1", "-r1", "pass"), draws=3)
BAD = Part(
    name="bad",
    of="failures",
    module=("timeit", "-n1", "-r1", "raise ValueError({seed})"),
    draws=1,
    environment={"WANTED": "two words"},
)


def test_a_failure_ends_with_false_and_its_command_fails_again(tmp_path: Path) -> None:
    report = tmp_path / "made" / "report.md"
    assert not soak([BAD], 0, 71, report)
    told = report.read_text()
    assert "ValueError: 71" in told
    again = next(line for line in told.splitlines() if line.startswith("AFFIDAVIT_SEED=71"))
    assert "WANTED='two words'" in again
    ended = subprocess.run(
        again.replace(".venv/bin/python", sys.executable),
        shell=True,
        check=False,
        text=True,
        capture_output=True,
    )
    assert ended.returncode != 0
    assert "ValueError: 71" in ended.stderr


def test_without_a_failure_it_ends_with_true_and_counts(tmp_path: Path) -> None:
    assert soak([GOOD], 0, 5, tmp_path / "report.md")
    told = (tmp_path / "report.md").read_text()
    assert "; 0 failures." in told
    assert "nothings | " in told


def test_each_part_says_its_seed_to_what_it_runs() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    marked = {
        path.relative_to(TESTS).parts[0]
        for path in TESTS.glob("*/**/test_*.py")
        if re.search(r"mark\.(soak|ordinary|by_turns)\b", path.read_text())
    }
    assert {*ROOMS} == marked
    for part in PARTS:
        words, variables = part.command(123)
        assert variables["AFFIDAVIT_SEED"] == "123"
        assert not any("{" in word for word in words)
        files = [word for word in words if word.startswith("tests/")]
        assert all(Path(__file__).parents[1].joinpath(file).exists() for file in files)


def test_seeds_are_new_in_each_round_and_differ_between_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AFFIDAVIT_SEED", raising=False)
    assert seeded(7) == 7
    monkeypatch.setenv("AFFIDAVIT_SEED", "123")
    assert seeded(7) != seeded(8)
    assert str(seeded(7)).startswith("123")
