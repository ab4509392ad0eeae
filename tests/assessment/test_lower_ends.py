"""A lower end is attained by one record, whatever the upper end rests on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from affidavit.accountants import Bracket
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.accountants.random_allocation.composed import ComposedAllocationCurve
from affidavit.assessment import certify
from affidavit.mechanisms.strategies.tree import Tree
from affidavit.plan import (
    events,
    plan_from,
)

DELTA = 1e-6
PLAN: dict[str, Any] = {
    "version": 1,
    "adjacency": "zero_out",
    "dataset": {"name": "toy", "size": 30, "unit": "example"},
    "sampling": {"scheme": "cyclic", "lot_size": 10},
    "steps": 24,
    "noise": {"kind": "tree"},
    "optimizer": {"name": "dp_matrix_me"},
    "target": {"delta": DELTA},
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1}],
}
APART = {"schema": "min_separation", "participations": 8, "separation": 3}
BLT = {"kind": "blt", "decays": [0.9], "scales": [0.3]}


def bracket(**changes: Any) -> tuple[float, float]:
    epsilon = certify(plan_from({**PLAN, **changes}), second_opinion=False).epsilon
    assert epsilon is not None
    return epsilon.lower, epsilon.upper


def test_a_tree_is_certified_at_its_worst_pattern() -> None:
    truth = GaussianCurve(mu=88**0.5).epsilon(DELTA)
    lower, upper = bracket(participation=APART)
    assert upper == pytest.approx(truth.upper, rel=1e-9)
    assert lower <= truth.lower * (1 + 1e-12)


@pytest.mark.parametrize(
    ("target", "verdict"),
    [(88.5, "certified"), (87.79, "certified"), (80.0, "unproved"), (68.0, "under_noised")],
)
def test_a_target_above_the_truth_is_met(target: float, verdict: str) -> None:
    plan = {**PLAN, "participation": APART, "target": {"epsilon": target, "delta": DELTA}}
    assert certify(plan_from(plan)).verdict == verdict


def test_a_tree_too_long_for_its_patterns_is_bounded_by_its_levels() -> None:
    data = {"name": "toy", "size": 1000, "unit": "example"}
    apart = {"schema": "min_separation", "participations": 1800, "separation": 1}
    lower, upper = bracket(dataset=data, steps=180_000, participation=apart)
    assert GaussianCurve(mu=18**0.5).epsilon(DELTA).lower <= lower * (1 + 1e-9) < upper


def test_no_lower_end_of_a_tree_is_of_nodes_that_nobody_sees() -> None:
    """N⁻¹ has the rows of left children: two steps with the record show √5, not √6."""
    inverse = Tree.of(24).visible_matrix()
    norms = [np.linalg.norm(inverse[:, place::3].sum(axis=1)) for place in range(3)]
    truth = GaussianCurve(mu=float(max(norms)))
    lower, _ = bracket()
    assert lower == pytest.approx(truth.epsilon(DELTA).lower, rel=1e-9)
    bins = {"scheme": "balls_in_bins", "lot_size": 30}
    assert bracket(sampling=bins, steps=2)[0] <= GaussianCurve(mu=5**0.5).epsilon(DELTA).upper


def test_an_attack_that_surely_shows_less_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def epsilon(self: object, _: float) -> Bracket:
        raise AssertionError(self)

    monkeypatch.setattr(ComposedAllocationCurve, "epsilon", epsilon)
    shuffled = {"sampling": {"scheme": "shuffled", "lot_size": 10}, "optimizer": {"name": "dp_sgd"}}
    lower, upper = bracket(**shuffled, noise={"kind": "independent"})
    assert 0.7 * upper < lower


def test_a_claim_above_the_truth_holds() -> None:
    plan = {**PLAN, "participation": APART, "claim": {"epsilon": 88.5}}
    plan["target"] = {"epsilon": 100, "delta": DELTA}
    assert certify(plan_from(plan)).verdict == "certified"


def test_what_the_plan_allows_and_the_sampler_never_draws_is_no_lower_end() -> None:
    order = bracket()
    wider = bracket(participation={**APART, "separation": 1})
    assert wider[1] > order[1]
    assert wider[0] <= order[1] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("scheme", "probability"),
    [
        ({"scheme": "cyclic_poisson", "lot_size": 1, "groups": 3}, 0.1),
        ({"scheme": "balls_in_bins", "lot_size": 10}, 1 / 3),
    ],
    ids=["cyclic_poisson", "balls_in_bins"],
)
def test_lots_that_amplify_nothing_by_theorem_are_not_said_to_amplify_nothing(
    scheme: dict[str, Any], probability: float
) -> None:
    """One step is exactly a subsampled release, of which the certified Gaussian is a bound."""
    noise = {"kind": "bidiagonal", "lambda": -0.9}
    lower, upper = bracket(sampling=scheme, noise=noise, steps=1, optimizer={"name": "dp_sgd"})
    leaf = events.PoissonSubsampledGaussian(sampling_probability=probability, noise_multiplier=1.0)
    truth = FourierAccountant().curve(leaf).epsilon(DELTA)
    assert lower == pytest.approx(truth.lower, rel=1e-6)
    assert truth.upper <= upper * (1 + 1e-9)


def test_groups_are_amplified_by_the_columns_that_they_have() -> None:
    """Toeplitz columns grow shorter at the end; a lower end that takes all for long is false."""
    sampling = {"scheme": "cyclic_poisson", "lot_size": 1, "groups": 3}
    noise = {"kind": "toeplitz", "coefficients": [1, 0.9, 0.9]}
    plan = {"sampling": sampling, "noise": noise, "optimizer": {"name": "dp_sgd"}}
    lower, upper = bracket(**plan, steps=4)
    # Group 0 has the columns (1, .9, .9) and (1), group 1 the column (1, .9, .9) alone.
    long = (1 + 2 * 0.81) ** 0.5
    leaves = [
        events.PoissonSubsampledGaussian(sampling_probability=0.1, noise_multiplier=1 / norm)
        for norm in (long, 1.0)
    ]
    assert lower <= FourierAccountant().curve(_composed(leaves)).epsilon(DELTA).upper
    assert upper >= FourierAccountant().curve(_composed(2 * leaves[:1])).epsilon(DELTA).lower


def _composed(steps: list[events.PoissonSubsampledGaussian]) -> events.Composed:
    return events.Composed(events=tuple(steps))


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_an_error_state_costs_at_least_what_one_huge_gradient_does(adjacency: str) -> None:
    plan = {
        "adjacency": adjacency,
        "noise": {"kind": "independent"},
        "optimizer": {"name": "dp_dice", "error_clip_norm": 0.05},
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
    }
    lower, upper = bracket(**plan)
    plain = bracket(**{**plan, "optimizer": {"name": "dp_sgd"}})
    assert plain[1] < lower <= upper
    # Under replace_one the two gradients point in opposite directions, and the bound is attained.
    assert (lower == pytest.approx(upper, rel=1e-6)) == (adjacency == "replace_one")


@pytest.mark.ordinary("520000")
@pytest.mark.parametrize("largest", [525_000, 522_000, 520_000])
def test_cut_samples_cost_at_least_what_poisson_samples_do_at_the_rate_that_is_left(
    largest: int,
) -> None:
    """VaultGemma's size, lots and noise. Of others that contribute zero nobody sees a cut."""
    size, lot, steps, delta = 12_700_000_000, 517_989, 100_000, 1.1e-10
    truncated = {"scheme": "truncated_poisson", "lot_size": lot, "max_lot_size": largest}
    lower, upper = bracket(
        dataset={"name": "toy", "size": size, "unit": "example"},
        sampling=truncated,
        steps=steps,
        noise={"kind": "independent"},
        optimizer={"name": "dp_sgd"},
        target={"delta": delta},
        releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 0.614}],
        allow_large_delta={"reason": "as published"},
    )
    leaf = events.PoissonSubsampledGaussian(sampling_probability=lot / size, noise_multiplier=0.614)
    whole = FourierAccountant().curve(events.Repeated(event=leaf, count=steps)).epsilon(delta)
    # The cut takes less than 0.2 % of the rate at the least of these sizes.
    assert 0.998 * whole.lower <= lower <= upper
    # Where cuts are frequent, others that contribute show them.
    assert (lower > 1.4 * whole.upper) == (largest == 520_000)


@pytest.mark.ordinary("not bins of which *")
@pytest.mark.parametrize(
    "changes",
    [
        {
            "sampling": {"scheme": "balls_in_bins", "lot_size": 5},
            "noise": {"kind": "bsr", "bands": 2},
            "steps": 3,
        },
        {
            "sampling": {"scheme": "poisson", "lot_size": 20},
            "noise": {"kind": "bisr", "bands": 4},
            "steps": 8,
            "target": {"delta": 1e-100},
        },
        {
            "sampling": {"scheme": "poisson", "lot_size": 10},
            "noise": {"kind": "independent"},
            "steps": 10_000,
            "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 2000}],
        },
    ],
    ids=["bins of which some are never reached", "δ below all grids", "noise above all grids"],
)
def test_a_lower_end_is_not_zero_where_an_attack_gives_more(changes: dict[str, Any]) -> None:
    lower, upper = bracket(optimizer={"name": "dp_sgd"}, **changes)
    assert 0.03 * upper < lower
    plan = {**PLAN, **changes, "optimizer": {"name": "dp_sgd"}, "target": {"epsilon": upper / 100}}
    plan["allow_large_delta"] = "δ is the answer"
    delta = certify(plan_from(plan), second_opinion=False).delta
    assert delta is not None
    assert delta.lower > 0


def independent(scheme: str, size: int, lot_size: int, noise: float, **changes: Any) -> Bracket:
    """ε at 1e-5 of one epoch with independent noise."""
    document: dict[str, Any] = {
        "version": 1,
        "adjacency": "zero_out",
        "dataset": {"size": size, **changes.pop("dataset", {})},
        "sampling": {"scheme": scheme, "lot_size": lot_size},
        "steps": size // lot_size,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": noise}],
        "target": {"delta": changes.pop("delta", 1e-5)},
        "allow_large_delta": "a made-up data set",
        **changes,
    }
    epsilon = certify(plan_from(document), second_opinion=False).epsilon
    assert epsilon is not None
    return epsilon


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_a_lower_end_of_two_shuffled_lots_is_that_of_a_pair_of_data_sets(
    adjacency: str, size: int, noise: float
) -> None:
    """All others contribute the opposite, or nothing: both pairs, on a grid of both sums."""
    line = np.arange(-8.0, 8.0 + 2 / noise, 0.02)
    drawn = 2 * (size // 2) / size

    def law(shift: float) -> np.ndarray:
        near, far = norm.pdf(line), norm.pdf(line - shift / noise)
        both = (np.outer(far, near) + np.outer(near, far)) / 2
        return drawn * both + (1 - drawn) * np.outer(near, near)

    found = independent("shuffled", size, size // 2, noise, adjacency=adjacency)
    pairs = [(2, 0)] if adjacency == "replace_one" else [(2, 1), (1, 0)]
    deltas = [
        np.maximum(p - math.exp(found.lower) * q, 0).sum() * 0.02**2
        for first, second in pairs
        for p, q in [(law(first), law(second)), (law(second), law(first))]
    ]
    assert max(deltas) > 1e-5 * (1 - 1e-3)
    assert 0.3 * found.upper < found.lower < found.upper


def test_shuffled_lots_of_one_record_are_not_said_to_cost_more_than_was_proved() -> None:
    """Theorem 3.8 of Feldman, McMillan and Talwar, arXiv:2012.12803."""
    size, mu, local, allowed = 10**5, 0.1, 0.75, 1e-13
    ratio = math.exp(local)
    assert norm.sf(local / mu - mu / 2) < allowed
    spread = 8 * math.sqrt(ratio * math.log(4 / 9e-6) / size) + 8 * ratio / size
    proved = math.log1p((ratio - 1) / (ratio + 1) * spread)
    assert 9e-6 + (math.exp(proved) + 1) * (1 + 1 / ratio / 2) * size * allowed < 1e-5
    assert independent("shuffled", size, 1, 1 / mu).lower < proved


@pytest.mark.parametrize(
    ("changes", "records"),
    [
        ({"adjacency": "replace_one"}, 2),
        ({"dataset": {"unit": "user", "contributions_per_user": 3}}, 3),
    ],
)
def test_bins_without_a_theorem_cost_at_least_one_record_and_no_more_than_several(
    changes: dict[str, Any], records: int
) -> None:
    one = independent("balls_in_bins", 10_000, 10, 5)
    least = independent("balls_in_bins", 10_000, 10, 5, **changes).lower
    assert one.lower * (1 - 1e-3) < least
    # Along a chain of so many neighbours ε adds up, and δ to less than four times as much.
    assert least < records * independent("balls_in_bins", 10_000, 10, 5, delta=1e-5 / 4).upper
