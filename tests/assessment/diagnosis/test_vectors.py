"""Every known mistake from its source: the number, the mistake's name, and the corrected plan."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from affidavit.assessment.diagnose import Diagnosis, diagnose
from affidavit.assessment.diagnosis import CATALOGUE
from affidavit.plan import Claim, plan_from

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "mistakes.json").read_text())
ROUNDED_NOISE = 1e-4
"""What four digits of a published noise multiplier leave open in its ε, relatively."""

every_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda item: item["name"])


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The curve of one Gaussian mechanism, solved by a general root finder."""

    def excess(epsilon: float) -> float:
        second = math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return float(norm.cdf(mu / 2 - epsilon / mu)) - second - delta

    return float(brentq(excess, 0, mu**2 + 50 * mu + 50, xtol=1e-12))


def oracle(question: dict[str, Any]) -> float:
    """What the mistaken derivation gives, by another library or a closed form."""
    match question["kind"]:
        case "gaussian":
            return gaussian_epsilon(question["mu"], question["delta"])
        case "clt":
            root = math.sqrt(question["steps"] * math.expm1(question["sigma"] ** -2))
            return gaussian_epsilon(question["q"] * root, question["delta"])
        case "rdp":
            ledger: Any = RdpAccountant()
        case "pld":
            ledger = PLDAccountant(value_discretization_interval=1e-4)
    event = PoissonSampledDpEvent(question["q"], GaussianDpEvent(question["sigma"]))
    ledger.compose(event, question["steps"])
    return float(ledger.get_epsilon(question["delta"]))


def found_in(vector: dict[str, Any], **changes: Any) -> Diagnosis:
    return _found(json.dumps({**vector["plan"], **changes}), vector["claim"])


@cache
def _found(plan: str, claim: str) -> Diagnosis:
    return diagnose(plan_from(json.loads(plan)), Claim(epsilon=claim))


def test_every_mistake_has_a_vector() -> None:
    assert {code for vector in VECTORS for code in vector["mistakes"]} == set(CATALOGUE)


@pytest.mark.by_turns
@pytest.mark.ordinary(
    "not last-of-ten-rounds",
    "not another-delta",
    "not one-step-lost",
    "not delta-of-one-record",
    "not twelve-clipped*",
)
@every_vector
def test_the_claim_is_what_its_source_computes(vector: dict[str, Any]) -> None:
    assert float(vector["claim"]) == pytest.approx(oracle(vector["oracle"]), rel=ROUNDED_NOISE)


@pytest.mark.by_turns
@pytest.mark.ordinary(
    "not disk-combined-late",
    "not *-as-it-was-sampled",
    "not fixed-lots-at-half-distance",
    "not corrmom-amplified",
    "not best-of-ten*",
    "not five-records-a-m*",
    "not twelve-clipped*",
    "not accuracy-*",
)
@every_vector
def test_the_mistake_is_named_first(vector: dict[str, Any]) -> None:
    first, *_ = found_in(vector).explanations
    assert sorted(first.mistakes) == sorted(vector["mistakes"])
    if "accountant" in vector:
        assert first.reading.accountant == vector["accountant"]


@pytest.mark.by_turns
@pytest.mark.ordinary(
    "not fixed-lots-*", "not *-as-it-was-sampled", "not best-of-ten*", "not twelve-clipped*"
)
@every_vector
def test_the_corrected_plan_is_right(vector: dict[str, Any]) -> None:
    """What is refused is first put right as its fix says; then the noise is raised."""
    repaired = {**vector["plan"], **vector.get("repaired", {})}
    result = found_in(vector, **vector.get("repaired", {}))
    if not result.holds:
        assert result.corrected is not None
        required = {item.name: item.given for item in result.corrected.releases}
        repaired["releases"] = [
            {key: value for key, value in release.items() if key != "noise_std"}
            | {"noise_multiplier": required[release["name"]]}
            for release in repaired["releases"]
        ]
    right = found_in(vector, **repaired)
    assert right.as_result()["explanations"] == [{"mistakes": ["none"]}]


@pytest.mark.parametrize("row", ["e2e-dp-muon", "dart-dp-muon"])
def test_nothing_else_explains_the_published_rows(row: str) -> None:
    (vector,) = [item for item in VECTORS if item["name"] == row]
    result = found_in(vector)
    assert [explanation.mistakes for explanation in result.explanations] == [
        ("independent_blocks",)
    ]
    assert result.explanations[0].differs_by == pytest.approx(
        oracle(vector["oracle"]) - float(vector["claim"]), abs=1e-6
    )


@pytest.mark.parametrize(
    ("size", "steps", "delta", "sigma", "claim"),
    [(42043, 410, 8e-6, 0.7189, "8.0000"), (60591, 885, 1e-5, 0.7094, "7.9611")],
)
def test_the_dp_sgd_rows_of_the_same_table_are_right(
    size: int, steps: int, delta: float, sigma: float, claim: str
) -> None:
    plan = plan_from(
        {
            "version": 1,
            "dataset": {"size": size},
            "adjacency": "add_remove",
            "sampling": {"scheme": "poisson", "lot_size": 1024},
            "steps": steps,
            "releases": [{"name": "all", "clip_norm": 0.1, "noise_multiplier": sigma}],
            "target": {"epsilon": 8, "delta": delta},
        }
    )
    for stated in (
        Claim(epsilon=claim),
        Claim(epsilon="7.979"),
        Claim(noise_multiplier=str(sigma)),
    ):
        assert diagnose(plan, stated).as_result()["explanations"] == [{"mistakes": ["none"]}]
