"""No script passes with more noise, smaller lots or fewer steps than it runs with."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from affidavit.importers.scripts import importer
from affidavit.importers.scripts.syntax import Script, parse_script
from affidavit.plan import MalformedPlan
from tests.gate.checking.script_mutations import BASES, SIZE, run, script


def _read(text: str) -> list[dict[str, Any]]:
    """Return the plans of the private calls of a script without code that is an open question."""
    try:
        partial = importer.read(text.encode())
    except MalformedPlan:
        return []
    parts = [] if partial is None else [partial, *partial.others]
    open_lines = {use.line for part in parts for use in part.open_uses}
    dynamic = Script(parse_script(text)).dynamic
    return (
        []
        if open_lines & {getattr(node, "lineno", 0) for node in dynamic}
        else [part.data for part in parts]
    )


def _passes(library: str, number: int, seed: int) -> int:
    random, read = Random(seed), 0
    for _ in range(number):
        text = script(random, library)
        plans = _read(text)
        if not plans:
            continue
        truth = run(text)
        if truth is None or not truth.noise:
            continue
        read += 1
        noise = [release["noise_multiplier"] for plan in plans for release in plan["releases"]]
        assert min(noise) <= min(truth.noise), text
        lots = [plan.get("sampling", {}).get("lot_size") for plan in plans]
        assert None in lots or max(lots) >= truth.lot_size, text
        if None not in lots and all("epochs" in plan for plan in plans):
            steps = (
                plan["epochs"] * -(-SIZE // lot) for plan, lot in zip(plans, lots, strict=True)
            )
            assert sum(steps) >= len(truth.noise), text
        most = (plan.get("steps", len(truth.noise)) for plan in plans)
        assert sum(most) >= len(truth.noise), text
    return read


@pytest.mark.by_turns
@pytest.mark.parametrize("library", BASES)
def test_a_hundred_mutated_scripts_are_never_passed_for_more_than_they_run(library: str) -> None:
    assert _passes(library, 100, seed=1) > 10


@pytest.mark.soak
@pytest.mark.parametrize("library", BASES)
def test_ten_thousand_mutated_scripts_are_never_passed_for_more_than_they_run(library: str) -> None:
    assert _passes(library, 10_000, seed=2) > 1000
