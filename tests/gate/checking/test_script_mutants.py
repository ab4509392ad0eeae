"""No edit that makes a script spend more is certified, and harmless ones ask little or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.gate.checking.script_codes import questions
from tests.gate.checking.script_mutants import HARMLESS, harmless, mutants
from tests.support.random_seeds import seeded


def _is_read(data: Mapping[str, Any]) -> bool:
    """Whether what is read is the loop of the script that was changed."""
    return data.get("epochs") == 4


def _passing(random: Random, number: int) -> list[str]:
    return [text for text in mutants(random, number) if not questions(text, _is_read)]


def test_no_script_that_spends_more_is_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not _passing(Random(seeded(5)), 30)


def test_harmless_edits_ask_little_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    open_uses = [
        text for text in harmless(Random(seeded(6)), len(HARMLESS)) if questions(text, _is_read)
    ]
    assert len(open_uses) <= 3, open_uses


@pytest.mark.soak
def test_no_script_of_a_new_seed_that_spends_more_is_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not _passing(Random(seeded(7)), 400)
