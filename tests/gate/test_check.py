"""``check`` is a gate: its exit code is the worst of its plans, and nothing checked is never 0."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import pytest

from affidavit.assessment.assessment import Verdict
from affidavit.gate.exit_codes import Exit, exit_of_verdict, worst

Make = Callable[..., dict[str, Any]]
UNDER_NOISED = {"target": {"epsilon": 0.1, "delta": 1e-5}}


@pytest.fixture
def files(document: Make, save: Any) -> dict[int, str]:
    """One plan for each exit code that a plan has by itself."""
    return {
        0: save(document(), "good.json"),
        1: save(document(**UNDER_NOISED), "weak.json"),
        2: save("version: one\n", "bad.yaml"),
    }


SEVERITY = (0, 1, 2)


@pytest.mark.parametrize("codes", [*product(SEVERITY, repeat=1), *product(SEVERITY, repeat=2)])
def test_the_exit_code_is_the_worst_of_all_plans(
    run: Any, files: dict[int, str], codes: tuple[int, ...]
) -> None:
    result = run("check", *(files[code] for code in codes))
    assert result.exit_code == max(codes)


def test_every_plan_is_told_even_after_a_bad_one(run: Any, files: dict[int, str]) -> None:
    result = run("check", files[2], "missing.yaml", files[1], files[0])
    assert result.exit_code == 2
    assert f"{files[2]}:1:1: wrong_type /version" in result.stderr
    assert "missing.yaml: unreadable" in result.stderr
    assert f"{files[1]}:1:" in result.stderr
    assert "under_noised /releases/0/noise_multiplier" in result.stderr
    assert f"{files[0]}: certified" in result.stdout
    assert len(result.stdout.splitlines()) == 1


def test_each_finding_is_one_line_with_its_remedy_above_its_place(
    run: Any, files: dict[int, str]
) -> None:
    result = run("check", files[1])
    line, *place = result.stderr.splitlines()
    assert line.startswith(files[1])
    assert len(place) == 3
    assert set(place[-1].strip(" |")) == {"^"}
    assert "Raise noise_multiplier of all from 20 to 97.2396" in line


def test_a_plan_comes_from_standard_input_too(run: Any) -> None:
    result = run("check", "-", stdin=b"[]")
    assert result.exit_code == 2
    assert "-:1:1: wrong_type" in result.stderr


@pytest.mark.parametrize("arguments", [(), ("check",), ("certify",), ("batch",), ("verify",)])
def test_nothing_to_check_is_a_mistake_of_use(run: Any, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("check", "--help")])
def test_being_asked_about_itself_is_no_mistake(run: Any, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 0


def test_the_worst_exit_is_the_one_that_needs_a_hand_first() -> None:
    assert worst([]) is Exit.USAGE
    assert worst([Exit.CERTIFIED]) is Exit.CERTIFIED
    assert worst([Exit.CERTIFIED, Exit.UNDECIDED]) is Exit.UNDECIDED
    assert worst([Exit.UNDECIDED, Exit.BLOCKED]) is Exit.BLOCKED
    assert worst(Exit) is Exit.USAGE


def test_only_certified_is_zero() -> None:
    assert {each for each in get_args(Verdict) if exit_of_verdict(each) == 0} == {"certified"}
