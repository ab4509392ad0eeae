"""dp-accounting's own tests of accountants, run on ours, and its numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest
from dp_accounting import NeighboringRelation, dp_event, pld, privacy_accountant_test, rdp

import affidavit

ZERO_OUT = NeighboringRelation.REPLACE_SPECIAL


class TestOurs(privacy_accountant_test.PrivacyAccountantTest):  # type: ignore[misc]
    """Ours, under every relation."""

    def _make_test_accountants(self) -> Collection[affidavit.PrivacyAccountant]:
        return [affidavit.PrivacyAccountant(relation) for relation in NeighboringRelation]


GAUSSIAN, LAPLACE = dp_event.GaussianDpEvent(2.0), dp_event.LaplaceDpEvent(3.0)
SAMPLE = dp_event.PoissonSampledDpEvent(0.05, GAUSSIAN)
SEVERAL = dp_event.ComposedDpEvent([GAUSSIAN, dp_event.SelfComposedDpEvent(GAUSSIAN, 3)])
TREES = dp_event.SingleEpochTreeAggregationDpEvent(4.0, [3, 9, 16])
CUT = dp_event.TruncatedSubsampledGaussianDpEvent(50, 0.1, 9, 1.5)


@pytest.mark.by_turns
@pytest.mark.ordinary("not TruncatedSubsampled*", "not RepeatAndSelectDpEvent0")
@pytest.mark.parametrize(
    "event",
    [
        LAPLACE,
        dp_event.ComposedDpEvent([LAPLACE, SAMPLE]),
        dp_event.PoissonSampledDpEvent(0.05, SEVERAL),
        TREES,
        CUT,
        dp_event.RepeatAndSelectDpEvent(dp_event.SelfComposedDpEvent(SAMPLE, 9), 5.0, math.inf),
        dp_event.RepeatAndSelectDpEvent(GAUSSIAN, 3.0, 1.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_no_event_costs_more_than_dp_accounting_proves(event: Any) -> None:
    """Its bounds are upper ones: none lies below our lower end, or far below our upper one."""
    ours = affidavit.PrivacyAccountant(ZERO_OUT).compose(event, 4)
    bound = ours.get_epsilon(1e-6)
    theirs = []
    for peer in (pld.PLDAccountant(ZERO_OUT), rdp.RdpAccountant(neighboring_relation=ZERO_OUT)):
        if peer.supports(event):
            theirs.append(peer.compose(event, 4).get_epsilon(1e-6))
    assert 0 < bound.lower <= min(theirs) * (1 + 1e-6)
    assert bound <= min(theirs) * (1 + 2e-4)
    assert ours.get_delta(bound.upper).lower <= 1e-6 * (1 + 1e-6)


@pytest.mark.ordinary("not Truncated*")
@pytest.mark.parametrize("event", [GAUSSIAN, SAMPLE, CUT], ids=lambda event: type(event).__name__)
def test_a_replacement_moves_a_release_by_twice_the_clip_norm(event: Any) -> None:
    relation = NeighboringRelation.REPLACE_ONE
    bound = affidavit.PrivacyAccountant(relation).compose(event, 4).get_epsilon(1e-6)
    theirs = pld.PLDAccountant(relation).compose(event, 4).get_epsilon(1e-6)
    assert bound.lower <= theirs * (1 + 1e-6)
    assert bound <= theirs * (1 + 2e-4)


def test_samples_of_fixed_size_cost_what_a_plan_of_them_does() -> None:
    event = dp_event.SampledWithoutReplacementDpEvent(1000, 100, GAUSSIAN)
    ours = affidavit.PrivacyAccountant(NeighboringRelation.REPLACE_ONE).compose(event, 20)
    plan = dp_event.SelfComposedDpEvent(event, 20)
    assert ours.get_epsilon(1e-6) == affidavit.epsilon(plan, adjacency="replace_one", delta=1e-6)
    assert not affidavit.PrivacyAccountant(ZERO_OUT).supports(event)


@pytest.mark.soak
@pytest.mark.ordinary("inf")
@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, math.inf])
def test_a_repeated_run_is_a_plan(shape: float) -> None:
    run = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(SAMPLE, 9), LAPLACE])
    event = dp_event.RepeatAndSelectDpEvent(run, 5.0, shape)
    plan = affidavit.epsilon(event, adjacency="add_remove", delta=1e-6)
    ours = affidavit.PrivacyAccountant().compose(event).get_epsilon(1e-6)
    assert (ours, ours.lower) == pytest.approx((plan, plan.lower), rel=1e-9)


def test_mixtures_of_gaussians() -> None:
    """The number of dp-accounting's own test; a mixture of two is a Poisson sample."""
    mixture = dp_event.MixtureOfGaussiansDpEvent
    ours = affidavit.PrivacyAccountant().compose(mixture(1.0, [0.0, 1.0, 2.0], [0.2, 0.6, 0.2]), 3)
    bound = ours.compose(mixture(2.0, [0, 2, 3], [0.33, 0.34, 0.33]), 2).get_epsilon(1e-6)
    assert bound.lower <= 17.193115 <= bound <= 17.193115 * (1 + 1e-4)
    two = affidavit.PrivacyAccountant().compose(mixture(3.0, [1.5, 0.0], [0.05, 0.95]), 40)
    one = affidavit.PrivacyAccountant().compose(SAMPLE, 40).get_epsilon(1e-6)
    assert two.get_epsilon(1e-6) == pytest.approx(one, rel=2e-4)


def test_laplace_releases_never_lose_more_than_their_sum() -> None:
    ours = affidavit.PrivacyAccountant().compose(dp_event.LaplaceDpEvent(0.5), 2)
    assert (ours.get_delta(4.0), ours.get_epsilon(1e-14).upper <= 4 * (1 + 1e-8)) == (0, True)
    assert (
        1 - math.exp(-0.5)
        <= affidavit.PrivacyAccountant().compose(dp_event.LaplaceDpEvent(1.0)).get_delta(0.0)
        <= (1 - math.exp(-0.5)) * (1 + 1e-3)
    )


@pytest.mark.parametrize(
    "event",
    [
        dp_event.ZCDpEvent(0.1),
        dp_event.SampledWithReplacementDpEvent(100, 10, GAUSSIAN),
        dp_event.PoissonSampledDpEvent(0.1, LAPLACE),
        dp_event.MixtureOfGaussiansDpEvent(1.0, [1.0, 2.0], [0.5, 0.5]),
        dp_event.MixtureOfGaussiansDpEvent(1.0, [0.0, math.pi, 9.0], [0.5, 0.25, 0.25]),
        dp_event.GaussianDpEvent(-1.0),
        dp_event.SelfComposedDpEvent(GAUSSIAN, -1),
        dp_event.RepeatAndSelectDpEvent(LAPLACE, 0.5, 1.0),
    ],
    ids=str,
)
def test_what_is_not_bounded_on_both_sides_is_not_taken(event: Any) -> None:
    assert not affidavit.PrivacyAccountant(ZERO_OUT).supports(event)


@pytest.mark.parametrize("count", [0, -1])
def test_an_event_is_composed_once_or_more(count: int) -> None:
    with pytest.raises(ValueError, match="count"):
        affidavit.PrivacyAccountant().compose(GAUSSIAN, count)


def test_a_tree_needs_that_a_record_is_in_one_leaf() -> None:
    assert not affidavit.PrivacyAccountant().supports(TREES)
