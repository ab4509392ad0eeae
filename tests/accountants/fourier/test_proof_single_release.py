"""A thousand single releases and thirty Gaussian runs, against closed forms."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import mpmath
import numpy as np
import pytest

from affidavit.accountants.fourier_accountant import FourierAccountant, FourierCurve
from affidavit.accountants.protocol import OutOfReach
from affidavit.accountants.registry import accountant
from affidavit.plan import events
from tests.accountants.fourier.closed_forms import Side, distance, one_release


@dataclass(frozen=True, kw_only=True, slots=True)
class Single:
    """One release, the pair of hypotheses that it is closed for, and the δ asked for."""

    event: events.Event
    side: Side
    rate: float
    clip_norms: int
    noise_multiplier: float
    delta: float

    def exact(self, epsilon: float) -> mpmath.mpf:
        """δ in high precision."""
        mu = distance(self.noise_multiplier, self.clip_norms)
        return one_release(self.side, self.rate, mu, epsilon)


def between(source: np.random.Generator, low: float, high: float) -> float:
    """Log-uniform."""
    return math.exp(source.uniform(math.log(low), math.log(high)))


def draw(source: np.random.Generator) -> Single:
    """A release anywhere in the declared range."""
    sigma, delta = between(source, 0.2, 1000.0), between(source, 1e-20, 0.1)
    kinds = ["remove", "replace_one", "without_replacement"]
    kind = source.choice(kinds, p=[0.4, 0.3, 0.3])
    if kind == "without_replacement":
        size = round(between(source, 10, 1e6))
        sample = min(size - 1, max(1, round(size * between(source, 1e-6, 1.0))))
        event: events.Event = events.WithoutReplacementGaussian(
            dataset_size=size, sample_size=sample, noise_multiplier=sigma
        )
        rate, clip_norms, side = sample / size, 2, "remove"
    else:
        rate, clip_norms = between(source, 1e-6, 1.0), 1
        side = "replace" if kind == "replace_one" else str(kind)
        event = events.PoissonSubsampledGaussian(
            sampling_probability=rate,
            noise_multiplier=sigma,
            pair="replace_one" if side == "replace" else "add_remove",
        )
    return Single(
        event=event,
        side=side,  # type: ignore[arg-type]
        rate=rate,
        clip_norms=clip_norms,
        noise_multiplier=sigma,
        delta=delta,
    )


def is_long(one: Single) -> bool:
    """Whether ε is some 1e-6 at a tiny δ: that can take seconds, and ``make soak`` has them."""
    mu = one.clip_norms / one.noise_multiplier
    return one.delta < 1e-8 and one.rate * mu * math.sqrt(-2 * math.log(one.delta)) < 5e-5


@pytest.mark.ordinary("0")
@pytest.mark.parametrize("seed", range(4))
def test_random_single_releases_hold_their_closed_form(seed: int) -> None:
    """A hundred of them; and the promised width, where rounding does not forbid it."""
    source = np.random.default_rng(seed)
    drawn = (one for _ in range(150) if not is_long(one := draw(source)))
    cases = list(itertools.islice(drawn, 100))
    assert len(cases) == 100
    assert {one.side for one in cases} == {"remove", "replace"}
    narrow = 0
    for one in cases:
        result = FourierAccountant().curve(one.event).epsilon(one.delta)
        assert one.exact(result.upper) <= one.delta, (one, result)
        assert result.lower == 0 or one.exact(result.lower) >= one.delta, (one, result)
        narrow += result.width <= max(1.0001e-4 * result.upper, 1.0001e-6)
    assert narrow >= 97


@pytest.mark.ordinary("0")
@pytest.mark.parametrize("seed", range(2))
def test_below_what_most_ask_for_releases_hold_their_closed_form_or_are_refused(seed: int) -> None:
    source = np.random.default_rng(100 + seed)
    drawn = (replace(draw(source), delta=between(source, 1e-30, 1e-20)) for _ in range(60))
    cases = [one for one in drawn if not is_long(one)]
    answered = 0
    for one in cases:
        try:
            result = FourierAccountant().curve(one.event).epsilon(one.delta)
        except OutOfReach:
            continue
        assert one.exact(result.upper) <= one.delta <= one.exact(result.lower), (one, result)
        answered += 1
    assert answered >= len(cases) / 2


@pytest.mark.parametrize("delta", [1e-22, 1e-26, 1e-30])
@pytest.mark.parametrize(("sigma", "steps"), [(0.5, 1), (5.0, 7), (20.0, 1000)])
def test_runs_without_sampling_equal_the_exact_gaussian_there(
    sigma: float, steps: int, delta: float
) -> None:
    event = events.Repeated(event=events.Gaussian(noise_multiplier=sigma), count=steps)
    exact = accountant("gaussian").curve(event).epsilon(delta)
    result = FourierAccountant().curve(event).epsilon(delta)
    assert result.lower <= exact.lower <= exact.upper <= result.upper
    assert result.width <= 1.0001e-4 * result.upper


@pytest.mark.soak
def test_the_reverse_direction_alone_holds_its_closed_form() -> None:
    """At ε > 0 adding costs one release less than removing, and is not seen from outside."""
    source = np.random.default_rng(7)
    checked = narrow = 0
    for _ in range(150):
        q, sigma = between(source, 1e-5, 1.0), between(source, 0.25, 1000.0)
        epsilon = -math.log1p(-q) * source.uniform()
        exact = one_release("add", q, distance(sigma), epsilon)
        if exact < 1e-16:
            continue
        leaf = events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
        both = FourierAccountant().curve(leaf)
        result = FourierCurve(directions=both.directions[1:], relative_width=1e-4).delta(epsilon)
        assert result.lower <= exact <= result.upper, leaf
        checked += 1
        narrow += result.width <= 1.0001e-4 * result.upper
    assert checked >= 50
    assert narrow >= 0.95 * checked


@pytest.mark.parametrize("seed", range(30))
def test_runs_without_sampling_equal_the_exact_gaussian(seed: int) -> None:
    source = np.random.default_rng(1000 + seed)
    delta = between(source, 1e-20, 0.1)
    parts = []
    for _ in range(1 + seed % 3):
        sigma = between(source, 0.3, 1000.0)
        # So many steps that ε stays within reach.
        most = min(1e7, 400.0 * sigma * sigma)
        leaf = events.Gaussian(noise_multiplier=sigma)
        parts.append(events.Repeated(event=leaf, count=round(between(source, 1.0, most))))
    event = events.Composed(events=tuple(parts))
    exact = accountant("gaussian").curve(event).epsilon(delta)
    result = FourierAccountant().curve(event).epsilon(delta)
    assert result.lower <= exact.lower
    assert exact.upper <= result.upper
    assert result.width <= max(1.001e-4 * result.upper, 1.001e-6)
