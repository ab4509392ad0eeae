"""Plans with extreme numbers always get a verdict and never an exception.

What is only information beside a verdict is left out where no double holds it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.assessment.utility_estimates import figures_of
from affidavit.plan import plan_from

MOST = 2**53 - 1
PLAN: dict[str, Any] = {
    "version": 1,
    "dataset": {"size": 1000},
    "adjacency": "add_remove",
    "sampling": {"scheme": "poisson", "probability": 0.01},
    "steps": 10,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1, "dimension": 10}],
    "target": {"delta": 1e-5},
}
FULL: dict[str, Any] = {"scheme": "full_batch"}
LITTLE, LEAST = ({"scheme": "poisson", "probability": q} for q in (1e-160, 5e-324))
CYCLIC: dict[str, Any] = {
    "adjacency": "zero_out",
    "sampling": {"scheme": "cyclic", "lot_size": 10},
    "noise": {"kind": "bidiagonal", "lambda": 0.9},
}


def release(**changes: Any) -> dict[str, Any]:
    return {"releases": [{**PLAN["releases"][0], **changes}]}


def shared(allocation: str, *releases: dict[str, float]) -> dict[str, Any]:
    """Two releases whose noise is solved for."""
    return {
        "allocation": allocation,
        "releases": [
            {"name": name, "clip_norm": 1, **item}
            for name, item in zip("ab", releases, strict=True)
        ],
        "target": {"epsilon": 1, "delta": 1e-5},
    }


HUGE = release(clip_norm=1e100, noise_multiplier=1e60)
FAINT = release(clip_norm=1e-100, noise_multiplier=1e-100)
EXTREMES: list[dict[str, Any]] = [
    {"sampling": LITTLE},
    {"sampling": LEAST, "steps": MOST},
    {"sampling": {"scheme": "truncated_poisson", "probability": 1e-200, "max_lot_size": 5}},
    {"sampling": FULL, **HUGE},
    {"sampling": FULL, "steps": MOST, "dataset": {"size": 1}, **FAINT},
    {"sampling": LITTLE, **HUGE},
    {"sampling": FULL, **release(noise_multiplier=1e100, dimension=MOST)},
    {"releases": [{"name": "all", "clip_norm": 1e-100, "noise_std": 1e100, "dimension": 3}]},
    {"releases": [{"name": "all", "clip_norm": 1e100, "noise_std": 1e-100, "dimension": 3}]},
    {**CYCLIC, **HUGE},
    {**CYCLIC, "releases": [{"name": "all", "clip_norm": 1e-100, "noise_std": 1e100}]},
    {"optimizer": {"name": "dp_muon"}, "sampling": LITTLE, **HUGE},
    {"optimizer": {"name": "dp_muonbc", "momentum": 0.9999999999999999}, "sampling": LEAST},
    {"optimizer": {"name": "dp_muonbc", "momentum": 1e-300}, "sampling": FULL, **FAINT},
    shared("proportional", {"weight": 1e100}, {"weight": 1e-100}),
    shared("proportional", {"weight": 1e100, "dimension": 1}, {"weight": 1e-100, "dimension": 1}),
    shared(
        "optimal", {"clip_norm": 1e100, "dimension": MOST}, {"clip_norm": 1e-100, "dimension": 1}
    ),
    shared("uniform", {"clip_norm": 1e-100, "dimension": 1}, {"clip_norm": 1e-100, "dimension": 1}),
]
CLAIMED = [
    {"sampling": LEAST, "claim": 1e-9},
    {"sampling": LEAST, "claim": 1e-9, **HUGE},
    {"sampling": LEAST, "steps": MOST, "claim": 1.0, **FAINT},
    {"sampling": FULL, "steps": MOST, "claim": 1e9, **FAINT},
    {"sampling": FULL, "claim": 1.0, "target": {"delta": 5e-324}, **FAINT},
    {**CYCLIC, "claim": 1.0, **FAINT},
]


@pytest.mark.by_turns
@pytest.mark.ordinary(
    "not changes5", "not changes11", "not changes12", "not changes18", "not changes19"
)
@pytest.mark.parametrize("changes", [*EXTREMES, *CLAIMED])
def test_every_extreme_plan_gets_a_verdict(changes: dict[str, Any]) -> None:
    result = certify(plan_from({**PLAN, **changes}), second_opinion=False)
    assert result.verdict in {"certified", "refused", "under_noised", "unproved"}
    json.dumps(result.as_result(), allow_nan=False)


def test_only_the_figures_that_no_double_holds_are_left_out() -> None:
    (entry,) = figures_of(plan_from({**PLAN, "sampling": FULL, **HUGE}))
    assert entry["noise_std_of_mean"] == pytest.approx(1e157)
    assert "phi" not in entry
    assert entry["prefix_sum_std"] == pytest.approx(1e157 * 10**0.5)
    known = release(clip_norm=1e100, noise_multiplier=1e60, dimension=10)
    muon = {**PLAN, "sampling": LITTLE, "optimizer": {"name": "dp_muon"}, **known}
    (entry,) = figures_of(plan_from(muon))
    assert entry.keys() == {"release", "signal_to_noise_at_most", "noise_share_at_least"}
