"""Utility figures change neither verdict nor events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.plan import plan_from

MUON: dict[str, Any] = {
    "version": 1,
    "dataset": {"size": 42043},
    "adjacency": "add_remove",
    "sampling": {"scheme": "poisson", "lot_size": 1024},
    "steps": 400,
    "releases": [
        {"name": "hidden", "clip_norm": 1 / 7, "noise_multiplier": 0.8, "dimension": 768**2},
        {"name": "auxiliary", "clip_norm": 0.1, "noise_multiplier": 2, "dimension": 10000},
    ],
    "optimizer": {"name": "dp_muon"},
    "target": {"delta": 1e-6},
}
Result = dict[str, Any]


@pytest.fixture
def result_of() -> Callable[..., Result]:
    def make(**changes: Any) -> Result:
        return certify(plan_from({**MUON, **changes}), second_opinion=False).as_result()

    return make


def test_muon_is_warned_that_five_steps_hardly_orthogonalise(
    result_of: Callable[..., Result],
) -> None:
    result = result_of()
    hidden, auxiliary = result["planning"]
    assert hidden["momentum_norm"] == pytest.approx(0.2745, abs=1e-4)
    assert hidden["newton_schulz"] == {
        "start": "paper",
        "degree": 2,
        "steps": 5,
        "gain": pytest.approx(23.174, abs=1e-3),
        "singular_value": pytest.approx(0.228, abs=0.01),
    }
    assert "momentum_norm" not in auxiliary
    (warning,) = (w for w in result["warnings"] if w["code"] == "newton_schulz_start")
    assert "0.275" in warning["message"]
    assert "frobenius" in warning["message"]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "dp_muon", "newton_schulz_start": "frobenius"}},
        {"optimizer": {"name": "dp_muon", "momentum": 0.9999}},
        {"optimizer": {"name": "dp_sgd"}},
    ],
)
def test_and_not_where_it_starts_normalised(
    result_of: Callable[..., Result], changes: dict[str, Any]
) -> None:
    result = result_of(**changes)
    assert "newton_schulz_start" not in {w["code"] for w in result["warnings"]}
    assert result["epsilon"] == result_of()["epsilon"]


def test_the_bias_corrected_one_has_the_noise_of_its_probes(
    result_of: Callable[..., Result],
) -> None:
    hidden, _ = result_of(optimizer={"name": "dp_muonbc"})["planning"]
    nu = 0.8 / 7 / 1024
    assert hidden["probe_std"] == pytest.approx(nu * (0.05 / 1.95) ** 0.5, rel=1e-6)
    assert hidden["momentum_norm"] == pytest.approx(768 * hidden["probe_std"])


def test_what_is_not_known_is_left_out(result_of: Callable[..., Result]) -> None:
    plain = [{"name": "all", "clip_norm": 1, "noise_multiplier": 2}]
    (entry,) = result_of(releases=plain)["planning"]
    assert entry.keys() == {"release", "noise_std_of_mean", "phi", "prefix_sum_std"}
    assert entry["phi"] == pytest.approx((2 / 1024) ** 2)
    unknown = {"scheme": "poisson", "probability": 0.01}
    assert result_of(sampling=unknown, dataset={}, releases=plain)["planning"] == []


def test_correlated_noise_has_the_noise_that_is_injected(result_of: Callable[..., Result]) -> None:
    (entry,) = result_of(
        adjacency="zero_out",
        sampling={"scheme": "cyclic", "lot_size": 1000},
        releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 100, "dimension": 10}],
        noise={"kind": "bidiagonal", "lambda": 0.9},
        optimizer={"name": "dp_corrsgd"},
        steps=42,
    )["planning"]
    assert entry.keys() == {"release", "noise_std_of_mean", "prefix_sum_std"}
    assert entry["noise_std_of_mean"] == pytest.approx(0.1 * (1 + 0.81) ** 0.5)
    assert entry["prefix_sum_std"] == pytest.approx(0.1 * (1 + 0.01 * 41) ** 0.5)


def test_a_refused_plan_has_none(result_of: Callable[..., Result]) -> None:
    assert result_of(optimizer={"name": "dp_dice"})["planning"] == []
