"""One mixture release: forty digits, the lattices, and a run of which two events are bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library

from affidavit.accountants import (
    FourierAccountant,
    OutOfReach,
    accountant,
    parse_witness,
    search_witness,
    witness_document,
)
from affidavit.accountants.fourier.group_sampling import (
    GroupMixtureLaw,
    ReplacedGroupLaw,
    binomial_weights,
)
from affidavit.accountants.fourier.loss_laws import Kind, NormalMixtureLaw
from affidavit.accountants.fourier.privacy_loss import NormalPair
from affidavit.accountants.fourier.single_release import delta_of, epsilon_of
from affidavit.checker import (
    Unproved,
    Witness,
    prove,
)
from affidavit.plan import events


def exact(law: NormalPair, place: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf]:
    """ε and δ of the outputs beyond a place."""
    (p, p_tail), (q, q_tail) = (
        (
            mpmath.fsum(w * mpmath.npdf(place - m) for w, m in mixture),
            mpmath.fsum(w * mpmath.ncdf(m - place) for w, m in mixture),
        )
        for mixture in (law.p_mixture, law.q_mixture)
    )
    return mpmath.log(p / q), p_tail - p / q * q_tail


def name(law: NormalPair) -> str:
    return f"{type(law).__name__}-{len(law.p_mixture) + len(law.q_mixture)}"


def laws() -> list[NormalPair]:
    rng = np.random.default_rng(4)
    kinds: tuple[Kind, ...] = ("gaussian", "remove", "add", "replace")
    result: list[NormalPair] = [
        NormalMixtureLaw(kind=kind, noise_multiplier=noise, sampling_probability=1e-4)
        for noise in (0.4, 4.0)
        for kind in kinds
    ]
    for moves in (1, 2, 7, 160):
        for noise in (0.03, 0.4, 5.0, 300.0):
            weights = rng.random(moves + 1) ** 6
            weights[0] += 3
            shares = tuple(map(float, weights / weights.sum()))
            law = GroupMixtureLaw(
                noise_multiplier=noise * moves, weights=shares, added=bool(rng.random() < 0.5)
            )
            result.append(law)
            if moves in (1, 7):
                result.append(
                    ReplacedGroupLaw(noise_multiplier=law.noise_multiplier, weights=shares)
                )
    return result


@pytest.mark.ordinary("NormalMixtureLaw-*", "GroupMixtureLaw-9*", "ReplacedGroupLaw-16*")
@pytest.mark.parametrize("law", laws(), ids=name)
def test_brackets_hold_the_curve_in_forty_digits(law: NormalPair) -> None:
    with mpmath.workdps(40):
        for place in (-1.0, 0.7, 4.0, 11.0, law.mu):
            epsilon, delta = exact(law, mpmath.mpf(place))
            if epsilon <= 0 or not 1e-200 < delta < 1:
                continue
            # Near its largest value ε says nothing of δ: doubles do not tell it from it.
            near = epsilon > law.max_loss * (1 - 1e-5)
            at_epsilon, at_delta = delta_of(law, float(epsilon)), epsilon_of(law, float(delta))
            # Both numbers were rounded to doubles, which moves the other one a little.
            assert at_epsilon.lower <= delta * (1 + mpmath.mpf("1e-9"))
            assert delta <= at_epsilon.upper * (1 + mpmath.mpf("1e-9"))
            assert at_delta.lower <= epsilon * (1 + mpmath.mpf("1e-9"))
            assert epsilon <= at_delta.upper * (1 + mpmath.mpf("1e-9"))
            assert near or at_epsilon.width <= 1e-4 * at_epsilon.upper
            assert at_delta.width <= 1e-6 * max(1.0, at_delta.upper)


@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_one_release_agrees_with_two_of_which_one_says_little(delta: float) -> None:
    """The lattices answer for two."""
    alone = events.PoissonSampledGroupGaussian(
        records=5, sampling_probability=0.1, noise_multiplier=4.0
    )
    faint = events.PoissonSubsampledGaussian(sampling_probability=1e-6, noise_multiplier=900.0)
    curve, both = (
        FourierAccountant().curve(event)
        for event in (alone, events.Composed(events=(alone, faint)))
    )
    assert curve.epsilon(delta).upper == pytest.approx(both.epsilon(delta).upper, rel=1e-3)


def mixture(
    records: int, rate: float, noise: float, conceded: float = 0.0
) -> events.GaussianMixture:
    return events.GaussianMixture(
        weights=binomial_weights(records, rate), noise_multiplier=noise, conceded=conceded
    )


def test_a_mixture_of_binomial_weights_is_a_group_of_records() -> None:
    group = events.PoissonSampledGroupGaussian(
        records=6, sampling_probability=0.2, noise_multiplier=9.0
    )
    for count in (1, 30):
        one, other = (
            FourierAccountant().curve(events.Repeated(event=leaf, count=count)).epsilon(1e-6)
            for leaf in (group, mixture(6, 0.2, 9.0))
        )
        assert one == other


def test_what_is_conceded_adds_to_delta() -> None:
    whole, less = (
        FourierAccountant().curve(mixture(3, 0.1, 2.0, conceded)) for conceded in (0.0, 1e-16)
    )
    assert less.epsilon(1e-15).lower == 0
    assert less.epsilon(1e-15).upper >= whole.epsilon(9e-16).upper * (1 - 1e-9)
    assert less.delta(1.0).upper >= whole.delta(1.0).lower + 1e-16
    with pytest.raises(OutOfReach, match="concedes"):
        less.epsilon(1e-16)


@pytest.mark.soak
def test_a_mixture_has_the_epsilon_of_dp_accounting() -> None:
    leaf = mixture(12, 0.1, 6.0)
    theirs = library.from_mixture_gaussian_mechanism(
        leaf.noise_multiplier,
        list(range(len(leaf.weights))),
        list(leaf.weights),
        value_discretization_interval=1e-3,
    )
    for delta in (1e-3, 1e-8):
        bracket = FourierAccountant().curve(leaf).epsilon(delta)
        assert bracket.upper == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=2e-3)


def poisson(noise: float) -> events.Event:
    return events.Repeated(
        event=events.PoissonSubsampledGaussian(sampling_probability=0.01, noise_multiplier=noise),
        count=500,
    )


@pytest.mark.parametrize(("noise", "less"), [(0.6, 1), (3.0, 0)])
def test_the_upper_end_is_the_least_of_both_bounds(noise: float, less: int) -> None:
    bounds = (poisson(noise), mixture(20, 0.25, 12.0))
    either = events.Composed(
        events=(events.EitherBound(events=bounds), events.Gaussian(noise_multiplier=50.0))
    )
    fourier = FourierAccountant()
    brackets = [fourier.curve(event).epsilon(1e-6) for event in events.alternatives(either)]
    assert brackets[less].upper < brackets[1 - less].lower
    result = fourier.curve(either)
    assert result.epsilon(1e-6).upper == pytest.approx(brackets[less].upper, rel=1e-3)
    assert result.epsilon(1e-6).lower == 0
    assert result.delta(1.0).upper <= min(
        fourier.curve(event).delta(1.0).upper for event in events.alternatives(either)
    ) * (1 + 1e-3)
    assert accountant("rdp").curve(either).epsilon(1e-6).upper == pytest.approx(
        accountant("rdp").curve(events.alternatives(either)[0]).epsilon(1e-6).upper
    )


@pytest.mark.parametrize("delta", [1e-3, 1e-12, 1e-100])
@pytest.mark.parametrize("leaf", [0, 1, 2])
def test_the_checker_proves_a_single_release_and_nothing_below_it(leaf: int, delta: float) -> None:
    """In closed form: no lattice is chosen, and twelve digits are decided."""
    event: events.Event = (
        mixture(160, 0.1, 30.0),
        mixture(3, 0.5, 0.4),
        events.PoissonSubsampledGaussian(sampling_probability=0.02, noise_multiplier=0.9),
    )[leaf]
    epsilon = FourierAccountant().curve(event).epsilon(delta)
    claims = [repr(epsilon.upper * (1 + 1e-9)), repr(epsilon.lower * (1 - 1e-9))]
    above, below = (Witness(epsilon=claim, delta=repr(delta), runs=()) for claim in claims)
    assert prove(above, event).epsilon == claims[0]
    with pytest.raises(Unproved, match="proves"):
        prove(below, event)


def test_a_proof_is_of_the_bound_that_it_names() -> None:
    either = events.EitherBound(events=(poisson(0.6), mixture(20, 0.25, 12.0)))
    bracket = FourierAccountant().curve(either).epsilon(1e-6)
    witness, proof = search_witness(either, bracket, 1e-6, 1e-4)
    assert (witness.alternative, proof.theorems) == (1, ("gaussian_mixture",))
    assert parse_witness(witness_document(witness)) == witness
    with pytest.raises(Unproved):
        prove(replace(witness, alternative=0), either)


def test_of_little_noise_the_first_bound_is_that_of_participations() -> None:
    """The lattices end at a noise multiplier of 0.1."""
    first = poisson(0.09)
    above = accountant("participations").curve(first).epsilon(1e-6).upper
    for noise, upper in ((0.01, above), (12.0, math.inf)):
        either = events.EitherBound(events=(first, mixture(20, 0.25, noise)))
        assert FourierAccountant().curve(either).epsilon(1e-6).upper <= min(above, upper)


def test_events_with_a_choice_are_read_as_they_were_written() -> None:
    either = events.Composed(
        events=(events.EitherBound(events=(poisson(1.0), mixture(3, 0.1, 2.0, 1e-18))),)
    )
    assert events.parse_event(events.event_document(either)) == either
    assert events.alternatives(poisson(1.0)) == (poisson(1.0),)


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": (1.0,)},
        {"weights": (0.5, 0.4)},
        {"weights": (1.0, 0.0)},
        {"weights": (0.5, 0.5), "conceded": 1.0},
        {"weights": (0.5, 0.5), "noise_multiplier": 0.0},
    ],
)
def test_a_mixture_has_weights_that_add_up_to_one(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"weights|conceded|noise_multiplier"):
        events.GaussianMixture(**{"noise_multiplier": 1.0, **fields})
