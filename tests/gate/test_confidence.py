"""A certificate that rests on draws says so when it is issued, verified and recomputed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Run = Callable[..., Result]
Save = Callable[..., str]

BINNED: dict[str, Any] = {
    "dataset": {"name": "toy", "size": 80},
    "sampling": {"scheme": "balls_in_bins", "lot_size": 10},
    "steps": 16,
    "noise": {"kind": "toeplitz", "coefficients": [1.0, 0.5]},
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 3}],
    "target": {"delta": 1e-4},
}


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of draws does not depend on their number."""
    monkeypatch.setattr("affidavit.accountants.monte_carlo.pilot.MAX_DRAWS", 200_000)


@pytest.fixture
def issued(
    run: Run, save: Save, document: Callable[..., dict[str, Any]], tmp_path: Path
) -> tuple[str, Path, str]:
    """The plan, its bundle, and what was said while it was issued."""
    plan, bundle = save(document(**BINNED)), tmp_path / "bundle.json"
    assert run("keys", "new").exit_code == 0
    stated = run("certify", plan, "--out", str(bundle))
    assert stated.exit_code == 0
    return plan, bundle, stated.stdout


@pytest.mark.soak
def test_issued_verified_and_recomputed_to_the_same_numbers(
    run: Run, issued: tuple[str, Path, str]
) -> None:
    plan, bundle, stated = issued
    assert "with confidence 0.999999999" in stated.splitlines()[0]
    assert "seed" in stated
    verified = run("verify", str(bundle), "--plan", plan, "--recompute")
    assert verified.exit_code == 0, verified.output
    assert "the accountants give the same bounds again" in verified.stdout
    assert "with confidence 0.999999999" in verified.stdout.splitlines()[-1]


@pytest.mark.soak
def test_other_numbers_from_the_same_seed_are_found_out(
    run: Run, issued: tuple[str, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer draws stand for an engine that answers otherwise than it did."""
    _, bundle, _ = issued
    monkeypatch.setattr("affidavit.accountants.monte_carlo.pilot.MAX_DRAWS", 20_000)
    again = run("verify", str(bundle), "--recompute", "--json")
    result = json.loads(again.stdout)
    assert again.exit_code == 3
    assert result["recomputed"] is False
    assert "draws from its seed give" in result["reasons"][0]["message"]


@pytest.mark.soak
def test_the_gate_says_it_too(run: Run, save: Save, document: Callable[..., Any]) -> None:
    result = run("check", save(document(**BINNED | {"target": {"epsilon": 9, "delta": 1e-4}})))
    assert result.exit_code == 0
    assert "with confidence 0.999999999" in result.stdout
