"""No edit that makes a script spend more is certified, and harmless ones ask little or nothing."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan
from tests.gate.checking.script_mutants import HARMLESS, harmless, mutants
from tests.support.random_seeds import seeded


def _questions(text: str) -> int:
    """How many things keep a script from being certified."""
    try:
        partial = importer.read(text.encode(), Path(), name="train.py")
    except MalformedPlan as error:
        return len(error.reasons)
    assert partial is not None
    faults = [item for item in partial.broken if item.adjacencies is None]
    # What is read is the loop of the script that was changed.
    as_read = partial.data.get("epochs") == 4
    return len(faults) + len(partial.open_uses) + (not as_read)


def _passing(random: Random, number: int) -> list[str]:
    return [text for text in mutants(random, number) if not _questions(text)]


def test_no_script_that_spends_more_is_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not _passing(Random(seeded(5)), 30)


def test_harmless_edits_ask_little_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    open_uses = [text for text in harmless(Random(seeded(6)), len(HARMLESS)) if _questions(text)]
    assert len(open_uses) <= 3, open_uses


@pytest.mark.soak
def test_no_script_of_a_new_seed_that_spends_more_is_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not _passing(Random(seeded(7)), 400)
