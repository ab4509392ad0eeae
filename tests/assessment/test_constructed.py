"""A constructed strategy is certified by its actual numbers and constructed only once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from affidavit.assessment import certify
from affidavit.mechanisms import correlation
from affidavit.mechanisms.strategies import (
    Participation,
    Setting,
    build,
    coefficients_digest,
    registry,
)
from affidavit.mechanisms.strategies.store import Store, default_store
from affidavit.plan import Plan

Make = Callable[..., Plan]
STREAM: dict[str, Any] = {
    "adjacency": "zero_out",
    "sampling": {"scheme": "cyclic", "lot_size": 100},
    "steps": 30,
}
NOISES: list[dict[str, Any]] = [
    {"kind": "dense"},
    {"kind": "dense", "objective": "max"},
    {"kind": "dense", "convergence_aware": {"tau": 5}},
    {"kind": "banded", "bands": 4},
    {"kind": "banded_inverse", "bands": 4},
    {"kind": "blt", "buffers": 2},
]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of its own, and nothing remembered from other tests."""
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    correlation._built.cache_clear()
    return default_store()


@pytest.mark.parametrize("noise", NOISES, ids=str)
@pytest.mark.usefixtures("store")
def test_the_result_names_the_numbers_that_were_judged(
    plan_of: Make, noise: dict[str, Any]
) -> None:
    plan = plan_of(**STREAM, noise=noise)
    result = certify(plan).as_result()["strategy"]
    epochs = Participation.fixed_epoch(participations=3, separation=10)
    strategy = build(plan.phases[0].noise, Setting(steps=30, participation=epochs))
    assert result["digest"] == coefficients_digest(strategy.coefficients)
    assert result["sensitivity"] == strategy.sensitivity(epochs).value
    assert ("gap" in result) == (noise["kind"] == "dense")
    assert result.get("gap", 0) < 1e-3


def test_a_second_search_is_not_made(
    plan_of: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(**STREAM, noise={"kind": "dense"})
    first = certify(plan).as_result()["strategy"]
    assert len(list(store.directory.glob("*.npz"))) == 1
    correlation._built.cache_clear()
    monkeypatch.setattr(registry, "optimal_dense", pytest.fail)
    assert certify(plan).as_result()["strategy"] == first


def test_a_spoilt_store_costs_a_search_and_no_guarantee(plan_of: Make, store: Store) -> None:
    plan = plan_of(**STREAM, noise={"kind": "banded", "bands": 4})
    first = certify(plan).as_result()["strategy"]
    for path in store.directory.iterdir():
        path.write_bytes(b"spoilt")
    correlation._built.cache_clear()
    assert certify(plan).as_result()["strategy"] == first


def test_other_numbers_have_another_digest(plan_of: Make, store: Store) -> None:
    """Numbers put into the store by hand are certified as what they are, at their own cost."""
    plan = plan_of(**STREAM, noise={"kind": "banded", "bands": 4})
    first = certify(plan).as_result()["strategy"]
    request = {
        "kind": "banded",
        "bands": 4,
        "steps": 30,
        "participation": ["fixed_epoch", 3, 10],
        "momentum": 0.0,
        "learning_rates": None,
    }
    store.get_or_compute(request, pytest.fail)
    for path in store.directory.iterdir():
        path.unlink()
    store.get_or_compute(request, lambda: {"strategy": 2 * np.eye(30)})
    correlation._built.cache_clear()
    second = certify(plan).as_result()["strategy"]
    assert second["digest"] != first["digest"]
    assert second["sensitivity"] == pytest.approx(2 * np.sqrt(3))
