"""Every scheme under every adjacency is certified by its theorem, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from affidavit.assessment.plan_summary import assumptions_of
from affidavit.mechanisms.lowering import lower
from affidavit.plan import (
    Plan,
    RefusedPlan,
    events,
)

Make = Callable[..., Plan]

SIGMA = 3.0
STEPS = 40
BY_LOT = {"lot_size": 100}
SAMPLING: dict[str, dict[str, Any]] = {
    "poisson": BY_LOT,
    "truncated_poisson": {**BY_LOT, "max_lot_size": 120},
    "fixed_size": BY_LOT,
    "balls_in_bins": BY_LOT,
    "shuffled": BY_LOT,
    "cyclic": BY_LOT,
    "full_batch": {},
}


def gaussian(sigma: float) -> events.Gaussian:
    return events.Gaussian(noise_multiplier=sigma)


def poisson(pair: Any) -> events.PoissonSubsampledGaussian:
    return events.PoissonSubsampledGaussian(
        sampling_probability=0.1, noise_multiplier=SIGMA, pair=pair
    )


def truncated(neighbours: Any) -> events.TruncatedPoissonGaussian:
    return events.TruncatedPoissonGaussian(
        dataset_size=1000,
        sampling_probability=0.1,
        max_lot_size=120,
        noise_multiplier=SIGMA,
        neighbours=neighbours,
    )


DRAWN = events.WithoutReplacementGaussian(
    dataset_size=1000, sample_size=100, noise_multiplier=SIGMA
)

CERTIFIED: dict[tuple[str, str], tuple[events.Leaf, int]] = {
    ("poisson", "add_remove"): (poisson("add_remove"), STEPS),
    ("poisson", "zero_out"): (poisson("add_remove"), STEPS),
    ("poisson", "replace_one"): (poisson("replace_one"), STEPS),
    ("fixed_size", "replace_one"): (DRAWN, STEPS),
    ("fixed_size", "zero_out"): (DRAWN, STEPS),
    ("shuffled", "zero_out"): (gaussian(SIGMA), 4),
    ("shuffled", "replace_one"): (gaussian(SIGMA / 2), 4),
    ("cyclic", "zero_out"): (gaussian(SIGMA), 4),
    ("cyclic", "replace_one"): (gaussian(SIGMA / 2), 4),
    ("full_batch", "add_remove"): (gaussian(SIGMA), STEPS),
    ("full_batch", "zero_out"): (gaussian(SIGMA), STEPS),
    ("full_batch", "replace_one"): (gaussian(SIGMA / 2), STEPS),
    ("truncated_poisson", "add_remove"): (truncated("add_remove"), STEPS),
    ("truncated_poisson", "zero_out"): (truncated("zero_out"), STEPS),
    ("truncated_poisson", "replace_one"): (truncated("replace_one"), STEPS),
    ("balls_in_bins", "replace_one"): (gaussian(SIGMA / 2), 4),
}
ALLOCATED = {("balls_in_bins", "add_remove"), ("balls_in_bins", "zero_out")}
REFUSED = {
    ("fixed_size", "add_remove"): "fixed_size_needs_replace_one",
    ("shuffled", "add_remove"): "removal_moves_records",
    ("cyclic", "add_remove"): "removal_moves_records",
}
CELLS = [(scheme, a) for scheme in SAMPLING for a in ("add_remove", "zero_out", "replace_one")]


def planned(plan_of: Make, scheme: str, adjacency: str, **changes: Any) -> Plan:
    """A plan of one release at σ = 3, a tenth of the data a lot."""
    return plan_of(
        **{
            "adjacency": adjacency,
            "sampling": {"scheme": scheme, **SAMPLING[scheme]},
            "steps": STEPS,
            "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": SIGMA}],
            **changes,
        }
    )


def only(plan: Plan) -> events.Event:
    """The only event of a plan, or the first of its bounds."""
    run = lower(plan).event()
    (event,) = (run.events[0] if isinstance(run, events.EitherBound) else run).events
    return event.events[0] if isinstance(event, events.EitherBound) else event


def code(plan: Plan) -> str:
    """The code of the only reason to refuse a plan."""
    with pytest.raises(RefusedPlan) as caught:
        lower(plan)
    (reason,) = caught.value.reasons
    assert reason.pointer == "/sampling/scheme"
    return reason.code


@pytest.mark.parametrize(("scheme", "adjacency"), CELLS)
def test_each_pair_is_certified_as_the_table_says_or_refused(
    plan_of: Make, scheme: str, adjacency: str
) -> None:
    plan = planned(plan_of, scheme, adjacency)
    if (scheme, adjacency) in REFUSED:
        assert code(plan) == REFUSED[scheme, adjacency]
    elif (scheme, adjacency) in ALLOCATED:
        result = only(plan)
        assert isinstance(result, events.RandomAllocationGaussian)
        assert result.bins == 10
        assert result.noise_multiplier == pytest.approx(SIGMA / 2, rel=1e-14)
        assert result.noise_multiplier <= SIGMA / 2
    else:
        leaf, count = CERTIFIED[scheme, adjacency]
        assert only(plan) == events.Repeated(event=leaf, count=count)


def test_a_poisson_lot_of_everything_is_the_full_batch(plan_of: Make) -> None:
    for everything in ({"lot_size": 1000}, {"probability": 1}):
        for adjacency in ("add_remove", "replace_one", "zero_out"):
            plan = planned(
                plan_of, "poisson", adjacency, sampling={"scheme": "poisson", **everything}
            )
            assert only(plan) == only(planned(plan_of, "full_batch", adjacency))


def test_a_fixed_lot_of_everything_is_the_full_batch(plan_of: Make) -> None:
    plan = planned(
        plan_of,
        "fixed_size",
        "replace_one",
        sampling={"scheme": "fixed_size", "lot_size": 1000},
    )
    assert only(plan) == only(planned(plan_of, "full_batch", "replace_one"))


@pytest.mark.parametrize(("size", "steps", "k"), [(42043, 410, 10), (60591, 885, 15)])
def test_the_shuffled_plans_of_the_paper_take_part_once_an_epoch(
    plan_of: Make, size: int, steps: int, k: int
) -> None:
    plan = plan_of(
        adjacency="zero_out",
        dataset={"size": size},
        sampling={"scheme": "shuffled", "lot_size": 1024},
        steps=steps,
    )
    assert only(plan) == events.Repeated(event=gaussian(20.0), count=k)


@pytest.mark.parametrize(
    ("scheme", "adjacency", "sigma"),
    [
        ("full_batch", "add_remove", 0.75),
        ("full_batch", "zero_out", 0.75),
        ("full_batch", "replace_one", 0.375),
        ("shuffled", "zero_out", 0.75),
        ("shuffled", "replace_one", 0.375),
        ("cyclic", "replace_one", 0.375),
    ],
)
def test_a_user_of_four_records_has_a_quarter_of_the_noise(
    plan_of: Make, scheme: str, adjacency: str, sigma: float
) -> None:
    users = {"size": 1000, "unit": "user", "contributions_per_user": 4}
    event = only(planned(plan_of, scheme, adjacency, dataset=users))
    assert isinstance(event, events.Repeated)
    assert event.event == gaussian(sigma)


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_a_user_of_several_records_is_a_mixture_over_those_drawn(
    plan_of: Make, adjacency: str
) -> None:
    users = {"size": 1000, "unit": "user", "contributions_per_user": 4}
    event = only(planned(plan_of, "poisson", adjacency, dataset=users))
    leaf = events.PoissonSampledGroupGaussian(
        records=4,
        sampling_probability=0.1,
        noise_multiplier=SIGMA,
        pair="replace_one" if adjacency == "replace_one" else "add_remove",
    )
    assert isinstance(event, events.Repeated)
    assert event.event == leaf
    users["contributions_per_user"] = 201
    assert code(planned(plan_of, "poisson", adjacency, dataset=users)) == "user_level_sampling"


def test_a_user_of_several_records_in_lots_of_fixed_size(plan_of: Make) -> None:
    users = {"size": 1000, "unit": "user", "contributions_per_user": 4}
    event = only(planned(plan_of, "fixed_size", "replace_one", dataset=users))
    leaf = events.WithoutReplacementGroupGaussian(
        records=4, dataset_size=1000, sample_size=100, noise_multiplier=SIGMA
    )
    assert isinstance(event, events.Repeated)
    assert event.event == leaf
    users["contributions_per_user"] = 201
    assert code(planned(plan_of, "fixed_size", "replace_one", dataset=users)) == (
        "user_level_sampling"
    )


@pytest.mark.parametrize(("scheme", "adjacency"), sorted(CERTIFIED))
def test_a_user_of_one_record_is_an_example(plan_of: Make, scheme: str, adjacency: str) -> None:
    users = {"size": 1000, "unit": "user", "contributions_per_user": 1}
    plan = planned(plan_of, scheme, adjacency, dataset=users)
    assert only(plan) == only(planned(plan_of, scheme, adjacency))


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_users_who_share_records_cost_what_others_do(plan_of: Make, adjacency: str) -> None:
    users = {"size": 1000, "unit": "user", "contributions_per_user": 4}
    for scheme in SAMPLING:
        alone, shared = (
            lower(planned(plan_of, scheme, adjacency, dataset={**users, **more}))
            for more in ({}, {"users_per_record": 2})
        )
        assert alone.event() == shared.event()
        assert assumptions_of(alone) != assumptions_of(shared)


def test_the_probability_of_a_leaf_is_never_below_lot_over_size(plan_of: Make) -> None:
    for size in (3, 7, 42043, 60591, 10**9 + 7):
        plan = plan_of(dataset={"size": size}, sampling={"scheme": "poisson", "lot_size": 2})
        event = only(plan)
        assert isinstance(event, events.Repeated)
        assert isinstance(event.event, events.PoissonSubsampledGaussian)
        assert Fraction(event.event.sampling_probability) >= Fraction(2, size)
        assert event.event.sampling_probability == pytest.approx(2 / size, rel=1e-15)


@pytest.mark.parametrize("steps", [1, 7, 10])
def test_a_later_epoch_of_kept_bins_counts_in_the_bins_that_are_in_it(
    plan_of: Make, steps: int
) -> None:
    begun = only(planned(plan_of, "balls_in_bins", "add_remove", steps=steps))
    assert isinstance(begun, events.RandomAllocationGaussian)
    assert begun.noise_multiplier == pytest.approx(SIGMA, rel=1e-14)
    assert begun.released == (None if steps == 10 else steps)
    one_more = only(planned(plan_of, "balls_in_bins", "add_remove", steps=11))
    assert isinstance(one_more, events.RandomAllocationGaussian)
    assert one_more.noise_multiplier == pytest.approx(SIGMA / 2**0.5, rel=1e-14)
    assert one_more.attained_at == pytest.approx(SIGMA, rel=1e-14)
    assert one_more.attained_at <= SIGMA
    assert one_more.longer == 1


def test_an_epoch_of_balls_in_bins_has_as_many_steps_as_lots(plan_of: Make) -> None:
    lots = {"scheme": "balls_in_bins", "lot_size": 300}
    plan = planned(plan_of, "balls_in_bins", "zero_out", sampling=lots, steps=..., epochs=2)
    lowered = lower(plan)
    assert lowered.phases[0].steps == 6
    (event,) = lowered.event().events
    assert isinstance(event, events.RandomAllocationGaussian)
    assert event.bins == 3


def test_one_bin_is_the_full_batch(plan_of: Make) -> None:
    lots = {"scheme": "balls_in_bins", "lot_size": 501}
    plan = planned(plan_of, "balls_in_bins", "add_remove", sampling=lots)
    assert only(plan) == only(planned(plan_of, "full_batch", "add_remove"))


def test_the_bins_of_one_users_records_amplify_nothing(plan_of: Make) -> None:
    users = {"size": 1000, "unit": "user", "contributions_per_user": 4}
    plan = planned(plan_of, "balls_in_bins", "add_remove", dataset=users)
    assert only(plan) == events.Repeated(event=gaussian(SIGMA / 4), count=4)


def test_a_lot_that_no_data_set_fills_is_never_cut(plan_of: Make) -> None:
    never = {"scheme": "truncated_poisson", "lot_size": 100, "max_lot_size": 1001}
    plan = planned(plan_of, "truncated_poisson", "add_remove", sampling=never)
    assert only(plan) == only(planned(plan_of, "poisson", "add_remove"))


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_a_user_of_several_records_in_lots_that_are_cut(plan_of: Make, adjacency: str) -> None:
    users = {"size": 1000, "unit": "user", "contributions_per_user": 4}
    plan = planned(plan_of, "truncated_poisson", adjacency, dataset=users)
    event = only(plan)
    assert isinstance(event, events.Repeated)
    assert isinstance(event.event, events.TruncatedPoissonGroupGaussian)
    assert (event.event.records, event.event.neighbours) == (4, adjacency)
    users["contributions_per_user"] = 201
    assert code(planned(plan_of, "truncated_poisson", adjacency, dataset=users)) == (
        "user_level_sampling"
    )


@pytest.mark.parametrize(("largest", "cut"), [(1001, True), (1003, True), (1004, False)])
def test_a_user_that_is_added_may_fill_a_lot(plan_of: Make, largest: int, cut: bool) -> None:
    users = {"size": 1000, "unit": "user", "contributions_per_user": 4}
    lots = {"scheme": "truncated_poisson", "lot_size": 100, "max_lot_size": largest}
    plan = planned(plan_of, "truncated_poisson", "add_remove", dataset=users, sampling=lots)
    event = only(plan)
    assert isinstance(event, events.Repeated)
    assert isinstance(event.event, events.TruncatedPoissonGroupGaussian) == cut


def test_a_sample_of_everything_that_is_always_cut_is_of_fixed_size(plan_of: Make) -> None:
    always = {"scheme": "truncated_poisson", "probability": 1, "max_lot_size": 100}
    for adjacency in ("replace_one", "zero_out"):
        plan = planned(plan_of, "truncated_poisson", adjacency, sampling=always)
        assert only(plan) == events.Repeated(event=DRAWN, count=STEPS)
    plan = planned(plan_of, "truncated_poisson", "add_remove", sampling=always)
    assert code(plan) == "unsupported"


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_a_record_that_an_epoch_leaves_out_costs_less(plan_of: Make, adjacency: str) -> None:
    """The lots that an epoch releases are one sample without replacement for each record."""
    plan = planned(plan_of, "shuffled", adjacency, steps=14)
    known, sampled = events.alternatives(lower(plan).event())
    distance = 2 if adjacency == "replace_one" else 1
    assert known == events.Composed(
        events=(events.Repeated(event=gaussian(SIGMA / distance), count=2),)
    )
    in_first = events.Repeated(event=gaussian(SIGMA / distance), count=1)
    rest = events.WithoutReplacementGaussian(
        dataset_size=1000, sample_size=400, noise_multiplier=SIGMA
    )
    in_second = events.Repeated(event=rest, count=1)
    assert sampled == events.Composed(events=(events.Composed(events=(in_first, in_second)),))


def test_bins_drawn_afresh_are_an_allocation_an_epoch(plan_of: Make) -> None:
    lots = {"scheme": "balls_in_bins", "lot_size": 100, "bins_drawn": "each_epoch"}
    plan = planned(plan_of, "balls_in_bins", "add_remove", sampling=lots, steps=31)
    once = events.RandomAllocationGaussian(bins=10, noise_multiplier=SIGMA)
    begun = events.RandomAllocationGaussian(bins=10, noise_multiplier=SIGMA, released=1)
    assert only(plan) == events.Composed(events=(events.Repeated(event=once, count=3), begun))
    whole = planned(plan_of, "balls_in_bins", "add_remove", sampling=lots, steps=40)
    assert only(whole) == events.Repeated(event=once, count=4)


@pytest.mark.parametrize("drawn", [None, "once", "each_epoch"])
def test_phases_of_balls_in_bins_are_told_to_throw_the_records_anew(
    plan_of: Make, drawn: str | None
) -> None:
    """They are composed as independent draws; bins kept from phase to phase spend far more."""
    sampling = {"scheme": "balls_in_bins", "lot_size": 100, "bins_drawn": drawn}
    phase = {
        "sampling": {key: value for key, value in sampling.items() if value is not None},
        "steps": 10,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": SIGMA}],
    }
    left_out = {"sampling": ..., "steps": ..., "releases": ...}
    plans = [
        plan_of(phases=[phase] * count, adjacency="add_remove", **left_out) for count in (1, 2)
    ]
    one, two = ({part.sampled.assumption for part in lower(plan).phases} for plan in plans)
    assert len(two) == 1
    if drawn == "each_epoch":
        assert one == two
        assert "afresh for each epoch" in one.pop()
    else:
        assert "for the whole run" in one.pop()
        assert "anew for each phase" in two.pop()
