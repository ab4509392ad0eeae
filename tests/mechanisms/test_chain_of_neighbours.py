"""Replaced records, and users, where amplification is proved for one record alone.

Against what small runs release, enumerated: docs/theorems/group-privacy.md.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from affidavit import delta, epsilon
from affidavit.accountants.bracket import Bracket
from affidavit.accountants.bracketing_curves import MinimumCurve
from affidavit.accountants.chains import ChainedCurve
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.gaussian import GaussianCurve
from affidavit.mechanisms import lower
from affidavit.plan import (
    events,
    plan_from,
)

Patterns = list[tuple[float, tuple[int, ...]]]

USERS = {"size": 40, "unit": "user", "contributions_per_user": 2}
BINS = {"scheme": "balls_in_bins", "lot_size": 20}


def plan(**changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "adjacency": "replace_one",
        "dataset": {"size": 40},
        "sampling": BINS,
        "epochs": 1,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1.5}],
        "optimizer": {"name": "dp_sgd"},
        "target": {"delta": 1e-2},
        **changes,
    }


def mixture(centres: list[tuple[float, float]], sigma: float) -> np.ndarray:
    """What two bins release where their sums have each of ``centres`` as often, on a lattice."""
    line = np.linspace(-9, 9, 601) * sigma
    densities = [
        np.outer(*(np.exp(-((line - at) ** 2) / (2 * sigma**2)) for at in centre))
        for centre in centres
    ]
    total = sum(densities)
    return np.asarray(total / total.sum())


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("changes", "over", "under"),
    [
        ({}, [(1, 0), (0, 1)], [(-1, 0), (0, -1)]),
        ({"adjacency": "add_remove", "dataset": USERS}, [(2, 0), (1, 1), (1, 1), (0, 2)], [(0, 0)]),
        (
            {"dataset": USERS},
            [(2, 0), (1, 1), (1, 1), (0, 2)],
            [(-2, 0), (-1, -1), (-1, -1), (0, -2)],
        ),
    ],
    ids=["replaced", "user", "replaced user"],
)
def test_no_bound_is_below_what_two_bins_show(
    changes: dict[str, Any], over: list[tuple[float, float]], under: list[tuple[float, float]]
) -> None:
    for sigma, at in ((1.5, 0.5), (4.0, 0.1), (4.0, 0.5)):
        releases = [{"name": "all", "clip_norm": 1, "noise_multiplier": sigma}]
        p, q = mixture(over, sigma), mixture(under, sigma)
        truth = max(
            float(np.maximum(one - math.exp(at) * other, 0).sum())
            for one, other in ((p, q), (q, p))
        )
        bound = delta(plan(releases=releases, **changes), epsilon=at)
        assert bound.lower - 1e-4 <= truth <= bound + 1e-9


MEMORY = np.array([[0.8, 0, 0], [0.6, 0.8, 0], [0, 0.6, 0.8]])
"""The strategy of the noise of three steps, two bands."""


def three_steps(patterns: Patterns, sign: float, sigma: float) -> np.ndarray:
    """What they release where the record is in the steps of each pattern, by its chance."""
    line = np.linspace(-12, 12, 97)
    total = np.zeros((97, 97, 97))
    for chance, steps in patterns:
        means = sign * MEMORY @ np.array(steps)
        one, two, three = (np.exp(-((line - mean) ** 2) / (2 * sigma**2)) for mean in means)
        total += chance * one[:, None, None] * two[:, None] * three
    return total / total.sum()


def in_group(steps: tuple[int, ...]) -> Patterns:
    """A record that is in each of these steps with probability 0.4, independently."""
    return [
        (
            0.4 ** sum(drawn) * 0.6 ** (len(steps) - sum(drawn)),
            tuple(
                np.bincount(
                    [step for step, there in zip(steps, drawn, strict=True) if there], minlength=3
                )
            ),
        )
        for drawn in itertools.product((0, 1), repeat=len(steps))
    ]


def apart() -> Patterns:
    """In a step with probability 1/3 unless it was in the last one; a quarter begin so."""
    result: Patterns = []
    for steps in itertools.product((0, 1), repeat=3):
        for waits, first in ((0, 0.75), (1, 0.25)):
            chance, blocked = first, bool(waits)
            for step in steps:
                chance *= (0.0 if step else 1.0) if blocked else (1 / 3 if step else 2 / 3)
                blocked = not blocked and bool(step)
            result.append((chance, steps))
    return result


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("sampling", "draws"),
    [
        (
            {"scheme": "cyclic_poisson", "lot_size": 8, "groups": 2},
            [in_group((0, 2)), in_group((1,))],
        ),
        ({"scheme": "b_min_sep", "lot_size": 10, "separation": 2}, [apart()]),
    ],
    ids=["groups", "separated"],
)
def test_no_bound_is_below_what_three_steps_with_a_memory_show(
    sampling: dict[str, Any], draws: list[Patterns]
) -> None:
    """Of a record and its opposite, which a hash may put in another group."""
    for sigma, at in ((1.0, 0.7), (2.5, 0.2)):
        truth = max(
            float(
                np.maximum(
                    three_steps(one, sign, sigma) - math.exp(at) * three_steps(other, -sign, sigma),
                    0,
                ).sum()
            )
            for one, other in itertools.product(draws, repeat=2)
            for sign in (1.0, -1.0)
        )
        bound = delta(
            plan(
                sampling=sampling,
                steps=3,
                epochs=None,
                noise={"kind": "toeplitz", "coefficients": [0.8, 0.6]},
                releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": sigma}],
            ),
            epsilon=at,
        )
        assert bound.lower * (1 - 1e-3) <= truth <= bound


BEST = {"kind": "repeat_and_select", "name": "best", "distribution": "geometric", "mean": 2}


@pytest.mark.ordinary("one run")
@pytest.mark.parametrize("extra", [[], [BEST]], ids=["one run", "the best of several"])
def test_many_bins_hide_a_replaced_record(extra: list[dict[str, Any]]) -> None:
    sampling, large = {**BINS, "lot_size": 600}, {"size": 60_000}
    many = {"dataset": large, "sampling": sampling, "target": {"delta": 1e-7}, "extra": extra}
    one = epsilon(plan(**{**many, "adjacency": "zero_out"}))
    replaced = epsilon(plan(**many))
    assert replaced.lower >= one.lower
    # Beside a selection it is a chain of two neighbours.
    assert (2 if extra else 1) * one < replaced < (3 if extra else 2) * one


def test_the_rounds_of_a_group_show_a_replaced_record() -> None:
    """Columns of norm one, a group's orthogonal: 25 Poisson samples, x for -x."""
    whole = epsilon(
        plan(
            dataset={"size": 1000},
            sampling={"scheme": "cyclic_poisson", "lot_size": 50, "groups": 4},
            steps=100,
            epochs=None,
            noise={"kind": "toeplitz", "coefficients": [0.8, 0.6]},
            releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 4.0}],
            target={"delta": 1e-6},
        )
    )
    step = events.PoissonSubsampledGaussian(
        sampling_probability=0.2, noise_multiplier=4.0, pair="replace_one"
    )
    truth = FourierAccountant().curve(events.Repeated(event=step, count=25)).epsilon(1e-6)
    assert whole.lower == pytest.approx(truth.lower, rel=1e-3)
    assert truth.lower <= whole < 1.2 * truth.lower


@pytest.mark.parametrize(("adjacency", "chained"), [("add_remove", False), ("zero_out", True)])
def test_no_chain_adds_records_to_lots_that_are_cut(adjacency: str, chained: bool) -> None:
    """The bound of one record is for data sets of at most one more than the plan's."""
    document = plan(
        adjacency=adjacency,
        dataset=USERS,
        sampling={"scheme": "truncated_poisson", "lot_size": 10, "max_lot_size": 14},
        epochs=None,
        steps=4,
        noise={"kind": "bsr", "bands": 2},
    )
    bounds = events.alternatives(lower(plan_from(document)).event())
    assert any(isinstance(bound, events.ChainOfNeighbours) for bound in bounds) == chained


def test_what_is_beside_a_chain_is_inside_it() -> None:
    chain = events.ChainOfNeighbours(event=events.Gaussian(noise_multiplier=2.0), links=2)
    beside = events.Gaussian(noise_multiplier=5.0)
    either = events.EitherBound(events=(events.Gaussian(noise_multiplier=1.0), chain))
    own, around = events.alternatives(events.Composed(events=(either, beside)))
    assert own == events.Composed(events=(events.Gaussian(noise_multiplier=1.0), beside))
    assert around == events.ChainOfNeighbours(
        event=events.Composed(events=(events.Gaussian(noise_multiplier=2.0), beside)), links=2
    )


def test_links_of_bins_cost_no_more_where_noise_has_one_sign() -> None:
    """A link that is told most bins depends on the sizes of C alone."""
    links = []
    for rate in (0.5, -0.5):
        event = lower(
            plan_from(
                plan(
                    adjacency="zero_out",
                    dataset={"size": 400, "unit": "user", "contributions_per_user": 3},
                    noise={"kind": "bidiagonal", "lambda": rate},
                    releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 9.0}],
                )
            )
        ).event()
        *_, told = events.alternatives(event)
        assert isinstance(told, events.ChainOfNeighbours)
        links.append(told)
    assert links[0] == links[1]


@dataclass
class Counted:
    """Upper bounds of a Gaussian that count how often they are computed."""

    curve: GaussianCurve
    answers: int = 0

    def epsilon(self, delta: float) -> Bracket:
        self.answers += 1
        return Bracket(lower=0.0, upper=self.curve.epsilon(delta).upper)

    def delta(self, epsilon: float) -> Bracket:
        return self.curve.delta(epsilon)


def test_a_bound_far_above_another_is_not_computed_for_every_link() -> None:
    near, far = (Counted(GaussianCurve(mu=mu)) for mu in (1.0, 3.0))
    links = [MinimumCurve(curves) for curves in ((near,), (near, far))]
    alone, both = (
        ChainedCurve(above=(), below=(), neighbours=one, links=4).epsilon(1e-6) for one in links
    )
    assert both == alone
    assert far.answers == 1
