"""No script passes with more noise, smaller lots or fewer steps than it runs with."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan
from tests.gate.checking.script_mutations import BASES, SIZE, run, script


def _read(text: str) -> dict[str, Any] | None:
    try:
        partial = importer.read(text.encode())
    except MalformedPlan:
        return None
    return None if partial is None else partial.data


def _passes(library: str, number: int, seed: int) -> int:
    random, read = Random(seed), 0
    for _ in range(number):
        text = script(random, library)
        data = _read(text)
        if data is None:
            continue
        truth = run(text)
        if truth is None or not truth.noise:
            continue
        read += 1
        (release,) = data["releases"]
        assert release["noise_multiplier"] <= min(truth.noise), text
        lot = data.get("sampling", {}).get("lot_size")
        assert lot is None or lot >= truth.lot_size, text
        if lot is not None and "epochs" in data:
            assert data["epochs"] * -(-SIZE // lot) >= len(truth.noise), text
        assert data.get("steps", len(truth.noise)) >= len(truth.noise), text
    return read


@pytest.mark.parametrize("library", BASES)
def test_a_hundred_mutated_scripts_are_never_passed_for_more_than_they_run(library: str) -> None:
    assert _passes(library, 100, seed=1) > 10


@pytest.mark.soak
@pytest.mark.parametrize("library", BASES)
def test_ten_thousand_mutated_scripts_are_never_passed_for_more_than_they_run(library: str) -> None:
    assert _passes(library, 10_000, seed=2) > 1000
