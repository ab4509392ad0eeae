"""Claims about plans with releases outside training are diagnosed."""

from __future__ import annotations

from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.assessment.diagnose import diagnose
from affidavit.assessment.diagnosis import ClaimedEpsilon
from affidavit.assessment.diagnosis.claims import search
from affidavit.assessment.diagnosis.mistake import Case
from affidavit.plan import Claim, Plan, plan_from

GAUSSIAN = {"kind": "gaussian", "name": "metric", "noise_multiplier": 5}
LAPLACE = {"kind": "laplace", "name": "counts", "noise_multiplier": 5}
SELECTION = {"kind": "repeat_and_select", "name": "best", "distribution": "geometric", "mean": 3}
EXTRAS: dict[str, list[dict[str, Any]]] = {
    "gaussian": [GAUSSIAN],
    "sampled": [{**GAUSSIAN, "sampling_probability": 0.1}],
    "laplace": [LAPLACE],
    "quantile": [{"kind": "adaptive_clipping_quantile", "name": "clip", "noise_std": 10}],
    "selection": [SELECTION],
    "all": [GAUSSIAN, {**LAPLACE, "each_repetition": True}, SELECTION],
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "truncated_poisson": {"max_lot_size": 40},
    "fixed_size": {},
    "balls_in_bins": {},
    "shuffled": {},
    "cyclic": {},
    "cyclic_poisson": {"groups": 5},
    "b_min_sep": {"separation": 5},
}
CLAIM = Claim(epsilon="1.0")


def plan_with(extra: str, scheme: str, adjacency: str) -> Plan:
    return plan_from(
        {
            "version": 1,
            "dataset": {"size": 1000},
            "adjacency": adjacency,
            "sampling": {"scheme": scheme, "lot_size": 20, **SAMPLERS[scheme]},
            "steps": 60,
            "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 0.8123}],
            "extra": EXTRAS[extra],
            "target": {"epsilon": 1, "delta": 1e-5},
        }
    )


@pytest.mark.by_turns
@pytest.mark.ordinary("poisson-*", "*-gaussian")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("scheme", SAMPLERS)
def test_every_kind_is_searched_under_every_sampler(extra: str, scheme: str) -> None:
    """Each kind and each sampler under every adjacency, not each pair of them."""
    turn = list(EXTRAS).index(extra) + list(SAMPLERS).index(scheme)
    plan = plan_with(extra, scheme, ("add_remove", "replace_one", "zero_out")[turn % 3])
    for result in search(Case.of(plan, 1e-5), ClaimedEpsilon.of(CLAIM, plan)):
        assert result.reading.epsilon >= 0


@pytest.mark.by_turns
@pytest.mark.ordinary("gaussian", "sampled", "quantile")
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_claim_beside_a_target_that_is_missed_is_answered(extra: str) -> None:
    plan = plan_with(extra, "poisson", "add_remove")
    result = certify(plan.model_copy(update={"claim": CLAIM}), second_opinion=False)
    codes = {reason.code for reason in result.reasons}
    assert {"claim_below_certified", "under_noised"} <= codes
    assert result.verdict == "under_noised"
    assert not diagnose(plan, CLAIM).holds


@pytest.mark.parametrize("extra", ["laplace", "selection", "all"])
@pytest.mark.parametrize("scheme", ["poisson", "shuffled"])
def test_what_leaves_a_release_out_is_named(extra: str, scheme: str) -> None:
    plan = plan_with(extra, scheme, "zero_out")
    case = Case.of(plan, 1e-5)
    assert case.account.parts() is None
    found = search(case, ClaimedEpsilon(value=1.0, unit=1e6, noise_uncertainty=0.0))
    assert found
    for result in found:
        assert {"uncounted_release", "uncounted_selection"} & set(result.mistakes)


@pytest.mark.ordinary("not selection-*")
@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("gaussian", "uncounted_release"),
        ("laplace", "uncounted_release"),
        ("selection", "uncounted_selection"),
    ],
)
def test_training_alone_is_recognised(extra: str, code: str) -> None:
    plan = plan_with(extra, "poisson", "add_remove")
    alone = certify(plan.model_copy(update={"extra": ()}), second_opinion=False).epsilon
    assert alone is not None
    first, *_ = diagnose(plan, Claim(epsilon=f"{alone.upper:.5g}")).explanations
    assert first.mistakes == (code,)
