"""Laws and golden values of the accountant as a whole."""

from __future__ import annotations

import math
from functools import cache

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier import evaluation, refinement
from affidavit.accountants.fourier.evaluation import approximate_epsilon
from affidavit.accountants.fourier.loss_laws import NormalMixtureLaw
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.protocol import OutOfReach
from affidavit.plan import events

pytestmark = pytest.mark.usefixtures("each_method")


def poisson(
    q: float, sigma: float, steps: int, pair: events.SubsampledPair = "add_remove"
) -> events.Repeated:
    leaf = events.PoissonSubsampledGaussian(
        sampling_probability=q, noise_multiplier=sigma, pair=pair
    )
    return events.Repeated(event=leaf, count=steps)


def epsilon(event: events.Event, delta: float, relative_width: float = 1e-4) -> Bracket:
    return FourierAccountant(relative_width=relative_width).curve(event).epsilon(delta)


def gaussian_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(40):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        tail = mpmath.e**epsilon * mpmath.ncdf(-mu / 2 - epsilon / mu)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - tail


def single_delta(q: float, sigma: float, epsilon: float) -> mpmath.mpf:
    """δ of one Poisson-subsampled release; removal is the larger direction for ε >= 0."""
    with mpmath.workdps(40):
        q = mpmath.mpf(q)
        inner = mpmath.log((mpmath.e ** mpmath.mpf(epsilon) - (1 - q)) / q)
        return q * gaussian_delta(1 / mpmath.mpf(sigma), inner)


ORACLES = [
    # q, σ, T, δ, lowest, highest: from independent tilted convolutions in extended grids.
    (0.004267, 1.1, 14062, 1e-14, 4.5793, 4.5800),
    (0.1, 20.0, 100_000, 1e-10, 10.9190, 10.9203),
    (0.1, 1.0, 10_000, 1e-5, 127.872, 127.888),
    (1024 / 42043, 2.3395 / 7, 410, 8e-6, 61.970, 61.985),
    (1024 / 60591, 2.3614 / 7, 885, 1e-5, 67.615, 67.630),
    (1024 / 42043, 0.7189, 410, 8e-6, 6.9655, 6.9670),
    (1e-4, 1.0, 1000, 1e-6, 0.01489, 0.01490),
    (5e-8, 0.3, 200_000, 1e-7, 2.4130, 2.4138),
    (0.5, 2000.0, 1_000_000, 1e-6, 1.0606, 1.0608),
]


@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "lowest", "highest"), ORACLES)
def test_golden_values(
    q: float, sigma: float, steps: int, delta: float, lowest: float, highest: float
) -> None:
    bracket = epsilon(poisson(q, sigma, steps), delta)
    assert lowest <= bracket.lower <= bracket.upper <= highest
    assert bracket.width <= 1e-4 * bracket.upper


@settings(max_examples=12)
@given(
    log_q=st.floats(math.log(1e-5), math.log(0.99)),
    log_sigma=st.floats(math.log(0.25), math.log(50.0)),
    log_delta=st.floats(math.log(1e-18), math.log(1e-2)),
)
def test_one_release_meets_the_closed_form(
    log_q: float, log_sigma: float, log_delta: float
) -> None:
    q, sigma, delta = math.exp(log_q), math.exp(log_sigma), math.exp(log_delta)
    bracket = epsilon(poisson(q, sigma, 1), delta)
    assert single_delta(q, sigma, bracket.upper) <= delta
    if bracket.lower > 0:
        assert single_delta(q, sigma, bracket.lower) >= delta


def test_brackets_are_as_narrow_as_asked_for_nearly_always() -> None:
    """Not always: a few rare jumps can leave only the bound of the transform's rounding."""
    source = np.random.default_rng(7)
    narrow = 0
    for _ in range(30):
        q, sigma = math.exp(source.uniform(-7, -0.5)), math.exp(source.uniform(-0.7, 3.0))
        steps, delta = round(math.exp(source.uniform(0, 9))), math.exp(source.uniform(-25, -5))
        bracket = epsilon(poisson(q, sigma, steps), delta)
        narrow += bracket.width <= 1.0001e-4 * bracket.upper + 1e-6
    assert narrow >= 27


@pytest.mark.ordinary("*-add_remove")
@pytest.mark.parametrize("pair", ["add_remove", "replace_one"])
@pytest.mark.parametrize(
    ("phases", "delta"),
    [
        ([(1.86e-4, 0.73, 6), (0.048, 1.57, 6), (0.024, 4.07, 1)], 5.5e-10),
        ([(1.3e-05, 2.95, 86), (0.003139, 3.35, 515)], 6.7e-8),
        ([(0.000644, 7.56, 11), (0.000193, 0.59, 1219)], 1.7e-7),
        ([(1.1e-05, 0.72, 4597), (0.000847, 0.67, 378), (0.447864, 4.55, 44)], 7e-12),
        ([(0.146104, 2.12, 35936), (0.395342, 0.6, 181), (3.3e-05, 4.46, 4461)], 2.3e-8),
    ],
)
def test_phases_of_very_different_scales_are_as_narrow_as_asked_for(
    phases: list[tuple[float, float, int]], delta: float, pair: events.SubsampledPair
) -> None:
    """Where one law lies within a step of the grid that suits another."""
    members = tuple(poisson(q, sigma, steps, pair) for q, sigma, steps in phases)
    together = epsilon(events.Composed(events=members), delta)
    assert together.width <= 1.0001e-4 * together.upper
    # A phase less costs no more.
    rest = epsilon(events.Composed(events=members[1:]), delta)
    assert rest.lower <= together.upper


@pytest.mark.ordinary("not *-900.0-1000000-0.*")
@pytest.mark.parametrize("delta", [0.999, 0.9, 0.6, 0.1, 1e-5, 1e-12, 1e-20])
@pytest.mark.parametrize(
    ("sigma", "steps"), [(0.3, 40), (0.5, 1), (20.0, 100), (3.0, 7), (900.0, 10**6)]
)
def test_gaussian_compositions_meet_the_closed_form(sigma: float, steps: int, delta: float) -> None:
    event = events.Repeated(event=events.Gaussian(noise_multiplier=sigma), count=steps)
    bracket = epsilon(event, delta)
    mu = math.sqrt(steps) / sigma
    assert gaussian_delta(mu, bracket.upper) <= delta
    assert bracket.lower == 0 or gaussian_delta(mu, bracket.lower) >= delta


@pytest.mark.parametrize("pair", ["add_remove", "replace_one"])
def test_sampling_nearly_everything_approaches_the_gaussian(pair: events.SubsampledPair) -> None:
    distance = 1.0 if pair == "add_remove" else 2.0
    bracket = epsilon(poisson(1 - 1e-9, 5.0, 50, pair), 1e-6)
    mu = distance * math.sqrt(50) / 5.0
    assert gaussian_delta(mu, bracket.lower * (1 - 1e-6)) >= 1e-6
    assert gaussian_delta(mu, bracket.upper * (1 + 1e-6)) <= 1e-6


def quadrature_delta(q: float, sigma: float, epsilon: float, kind: str) -> float:
    """δ of two releases: the second's closed form averaged over the first's loss."""
    law = NormalMixtureLaw(kind=kind, noise_multiplier=sigma, sampling_probability=q)  # type: ignore[arg-type]
    z = np.linspace(-13.0, 13.0 + 2 / sigma, 60_001)
    mu = 1 / sigma
    mixture = {
        "remove": ((1 - q, 0.0), (q, mu)),
        "add": ((1.0, 0.0),),
        "replace": ((1 - q, 0.0), (q, mu)),
    }[kind]
    density = sum(w * np.exp(-((z - m) ** 2) / 2) / math.sqrt(2 * math.pi) for w, m in mixture)
    losses = epsilon - law.loss(z)
    order = np.argsort(losses)
    p, q = law.tails(losses[order])
    rest = np.empty_like(losses)
    rest[order] = p - np.exp(losses[order]) * q
    return float(np.sum(density * np.maximum(rest, 0.0)) * (z[1] - z[0]))


@pytest.mark.parametrize("kind", ["remove", "replace"])
@pytest.mark.parametrize(
    ("q", "sigma", "at"), [(0.1, 1.0, 0.5), (0.02, 0.6, 2.0), (0.5, 2.0, 0.3), (0.3, 0.4, 9.0)]
)
def test_two_releases_meet_a_quadrature(kind: str, q: float, sigma: float, at: float) -> None:
    pair: events.SubsampledPair = "replace_one" if kind == "replace" else "add_remove"
    bracket = FourierAccountant().curve(poisson(q, sigma, 2, pair)).delta(at)
    value = quadrature_delta(q, sigma, at, kind)
    if kind == "remove":
        value = max(value, quadrature_delta(q, sigma, at, "add"))
    assert bracket.lower * (1 - 1e-6) <= value <= bracket.upper * (1 + 1e-6)
    assert bracket.width <= 1e-4 * bracket.upper


PLANS = [
    (0.01, 1.0, 500, 1e-6),
    (0.2, 4.0, 300, 1e-8),
    (0.002, 0.6, 4000, 1e-7),
    (1e-4, 0.8, 20_000, 1e-9),
]


@pytest.mark.ordinary("*-0.2-4.0-*")
@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), PLANS)
def test_refining_shrinks_the_bracket_and_never_leaves_it(
    q: float, sigma: float, steps: int, delta: float
) -> None:
    event = poisson(q, sigma, steps)
    old = epsilon(event, delta, 1e-2)
    for width in (1e-3, 1e-4, 2e-5, 1e-5):
        new = epsilon(event, delta, width)
        assert old.lower <= new.lower <= new.upper <= old.upper
        assert new.width <= max(width, 1e-4 if q < 1e-3 else 0.0) * new.upper
        old = new


@pytest.mark.ordinary("not *-0.0001-0.8-20000-*")
@pytest.mark.parametrize("pair", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), PLANS)
def test_monotone_in_every_parameter(
    pair: events.SubsampledPair, q: float, sigma: float, steps: int, delta: float
) -> None:
    middle = epsilon(poisson(q, sigma, steps, pair), delta)
    for worse in (
        epsilon(poisson(q * 1.01, sigma, steps, pair), delta),
        epsilon(poisson(q, sigma * 0.99, steps, pair), delta),
        epsilon(poisson(q, sigma, steps + steps // 50, pair), delta),
        epsilon(poisson(q, sigma, steps, pair), delta * 0.8),
    ):
        assert worse.upper > middle.upper or worse.meets(middle)
        assert worse.upper > middle.lower


def test_splitting_and_permuting_phases_changes_nothing() -> None:
    first, second = poisson(0.02, 1.0, 300), poisson(0.005, 0.7, 900)
    whole = events.Composed(events=(first, second))
    parts = events.Composed(
        events=(
            poisson(0.005, 0.7, 400),
            first,
            events.Repeated(event=poisson(0.005, 0.7, 250), count=2),
        )
    )
    assert epsilon(whole, 1e-6) == epsilon(parts, 1e-6)


def test_phases_cost_between_the_best_and_the_worst_of_them() -> None:
    mixed = events.Composed(
        events=(poisson(0.02, 1.0, 300), poisson(0.02, 1.2, 300), poisson(0.02, 1.1, 300))
    )
    assert epsilon(poisson(0.02, 1.2, 900), 1e-6).upper < epsilon(mixed, 1e-6).lower
    assert epsilon(mixed, 1e-6).upper < epsilon(poisson(0.02, 1.0, 900), 1e-6).lower


def test_equal_phases_written_differently_meet() -> None:
    near = events.Composed(events=(poisson(0.02, 1.0, 300), poisson(0.02, 1.0 + 1e-12, 300)))
    assert epsilon(near, 1e-6).meets(epsilon(poisson(0.02, 1.0, 600), 1e-6))


def test_gaussian_steps_mix_with_subsampled_ones() -> None:
    gaussian = events.Repeated(event=events.Gaussian(noise_multiplier=10.0), count=4)
    mixed = epsilon(events.Composed(events=(gaussian, poisson(0.01, 1.0, 100))), 1e-6)
    assert epsilon(gaussian, 1e-6).upper < mixed.lower
    assert epsilon(poisson(0.01, 1.0, 100), 1e-6).upper < mixed.lower


def test_replace_one_costs_more_than_add_remove_and_no_more_than_twice_the_clip() -> None:
    one = epsilon(poisson(0.02, 1.0, 300), 1e-6)
    other = epsilon(poisson(0.02, 1.0, 300, "replace_one"), 1e-6)
    assert one.upper < other.lower


@pytest.mark.parametrize("at", [0.0, 0.3, 2.0, 8.0, 30.0])
def test_delta_inverts_epsilon(at: float) -> None:
    curve = FourierAccountant().curve(poisson(0.02, 0.8, 400))
    delta = curve.delta(at)
    # Where it is below what transforms can follow it is bounded by that.
    assert delta.width <= 1.01e-4 * delta.upper or delta.upper < 1.1e-26
    if 1e-20 < delta.upper < 0.5 and at > 0:
        assert curve.epsilon(delta.upper).lower <= at <= curve.epsilon(delta.lower).upper


def test_a_window_without_an_end_refines_nothing() -> None:
    event = events.Composed(
        events=(poisson(0.048, 1.8792911123182923, 1), events.Laplace(noise_multiplier=17.46))
    )
    result = FourierAccountant().curve(event).delta(math.log(9))
    assert 0 < result.upper - result.lower < 1e-4 * result.upper


def test_the_empty_composition_costs_nothing() -> None:
    for event in (events.Composed(events=()), poisson(0.1, 1.0, 0)):
        curve = FourierAccountant().curve(event)
        assert curve.epsilon(1e-9) == Bracket(lower=0.0, upper=0.0)
        assert curve.delta(0.0) == Bracket(lower=0.0, upper=0.0)


def test_a_delta_above_the_total_variation_needs_no_epsilon() -> None:
    assert epsilon(poisson(1e-4, 5.0, 10), 1e-2) == Bracket(lower=0.0, upper=0.0)


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (poisson(0.1, 0.05, 10), 1e-5),
        (poisson(0.1, 2e6, 10), 1e-5),
        (poisson(0.1, 2000.0, 10**9), 1e-5),
        (poisson(1e-10, 1.0, 10), 1e-5),
        (poisson(0.1, 1.0, 10**10 + 1), 1e-5),
        (poisson(0.1, 1.0, 10), 1e-31),
        (
            events.WithoutReplacementGaussian(dataset_size=9, sample_size=3, noise_multiplier=1.0),
            0.9999,
        ),
    ],
)
def test_out_of_reach_is_refused(event: events.Event, delta: float) -> None:
    with pytest.raises(OutOfReach) as refusal:
        epsilon(event, delta)
    assert refusal.value.remedy


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_a_delta_that_is_no_probability_is_an_error(delta: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        FourierAccountant().curve(poisson(0.1, 1.0, 1)).epsilon(delta)


def test_normal_tails_of_the_oracle_are_sane() -> None:
    assert math.isclose(float(gaussian_delta(1.0, 0.0)), 2 * 0.19146246127401312, rel_tol=1e-12)
    assert math.isclose(float(log_ndtr(-1.0)), math.log(0.15865525393145705), rel_tol=1e-12)


@cache
def dp_accounting_s_epsilon(
    q: float, sigma: float, steps: int, delta: float, *, pessimistic: bool
) -> float:
    from dp_accounting.pld import privacy_loss_distribution as privacy_loss

    law = privacy_loss.from_gaussian_mechanism(
        sigma, sampling_prob=q, pessimistic_estimate=pessimistic
    )
    return float(law.self_compose(steps).get_epsilon_for_delta(delta))


@pytest.mark.ordinary("*-0.1-3.0-*")
@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta"),
    [(0.01, 0.8, 200, 1e-6), (0.1, 3.0, 500, 1e-5), (0.05, 1.0, 20, 1e-8)],
)
def test_dp_accounting_s_grids_meet_the_bracket(
    q: float, sigma: float, steps: int, delta: float
) -> None:
    """Its pessimistic ε is not below our lower bound, its optimistic one not above our upper."""
    bracket = epsilon(poisson(q, sigma, steps), delta)
    plan = q, sigma, steps, delta
    assert dp_accounting_s_epsilon(*plan, pessimistic=True) >= bracket.lower
    assert dp_accounting_s_epsilon(*plan, pessimistic=False) <= bracket.upper


@pytest.mark.ordinary("inversion first-12000")
@pytest.mark.parametrize("most", [3000, 5000, 7000, 9000, 12000])
def test_a_grid_that_would_be_too_long_is_made_coarser_and_not_refused(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    event = poisson(1e-3, 0.8, 3000)
    narrow = FourierAccountant().curve(event)
    truth = narrow.delta(1.0), narrow.epsilon(1e-6)
    for module in (evaluation, refinement):
        monkeypatch.setattr(module, "MAX_POINTS", most)
    wide = FourierAccountant().curve(event)
    assert wide.delta(1.0).meets(truth[0])
    assert wide.epsilon(1e-6).meets(truth[1])


@pytest.mark.ordinary("inversion first-event0-*")
@pytest.mark.parametrize(
    ("event", "epsilon", "delta"),
    [
        # Four steps lose at most 0.269 in one direction, which draws its tilt without end.
        (poisson(0.0651, 6.64, 4), 0.25, 1.5503e-22),
        (poisson(0.01, 2.0, 1000), 4.0, 1e-26),
    ],
)
def test_a_direction_that_is_all_but_done_does_not_hold_up_the_other(
    event: events.Event, epsilon: float, delta: float
) -> None:
    result = FourierAccountant().curve(event).delta(epsilon)
    assert result.upper <= delta * (1 + 2e-4)
    assert result.lower < 1e-60 or result.width <= 1.01e-4 * result.upper


@pytest.mark.ordinary("lattice alone")
def test_two_releases_far_out_are_bounded_on_both_sides() -> None:
    """δ at 4.0196 is ∫ p(x) δ_μ(ε - log p(x)/q(x)) dx over the sampled release, in 60 digits."""
    leaf = poisson(1 / 38, 1.598048173002978, 1, "replace_one")
    event = events.Composed(events=(leaf, events.Gaussian(noise_multiplier=2.949500000000244)))
    curve = FourierAccountant().curve(event)
    result = curve.delta(4.019626502338453)
    assert result.lower <= 1.7815009739225e-27 * (1 + 1e-10)
    assert result.upper >= 1.7815009739225e-27 * (1 - 1e-10)
    assert result.width <= 1e-4 * result.upper
    assert curve.delta(9.0).upper < 1e-22


def test_approximations_are_near_where_many_releases_compose() -> None:
    event = poisson(0.05, 2.0, 2000)
    curve = FourierAccountant().curve(event)
    assert approximate_epsilon(event, 1e-6) == pytest.approx(curve.epsilon(1e-6).upper, rel=0.01)


def test_the_approximation_of_one_release_with_little_noise_is_its_closed_form() -> None:
    event = poisson(0.1, 1e-6, 1)
    upper = FourierAccountant().curve(event).epsilon(1e-5).upper
    assert approximate_epsilon(event, 1e-5) == pytest.approx(upper, rel=1e-9)
