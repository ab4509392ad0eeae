"""Privacy loss distributions by dp_accounting: a two-sided second opinion.

The library discretises the privacy loss of a step on a grid and convolves. Rounding every loss up
gives an upper bound of the curve, and rounding every loss down a lower one. Both are computed here,
so the opinion can contradict ours in either direction. The lower bound loses up to half a grid step
per release and is loose for long runs.

The engine refuses what the library gets wrong. The library adds signed round-off of the FFT to δ,
so it under-reports below δ = 1e-9, and in long runs above it too. It accounts Poisson events under
add/remove only.

The round-off grows with the number of releases n, since a transform is raised to the n-th power: 1
is then off by n roundings of its angle. In experiments it moved δ by up to 1.2 n·2**-53.
``ROUND_OFF`` allows fifty times that, to each side of δ.

References: Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, arXiv:2207.04380 (connect the
dots); Koskela, Jälkö and Honkela, arXiv:1906.03049; dp_accounting 0.6.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dp_accounting.pld import privacy_loss_distribution as library

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import leaves
from affidavit.accountants.fourier.truncated_poisson import attained_rate
from affidavit.accountants.gaussian import EMPTY_CURVE
from affidavit.accountants.protocol import (
    OutOfReach,
    PrivacyCurve,
    Unsupported,
    require_delta,
    require_epsilon,
)
from affidavit.accountants.rdp import RdpAccountant
from affidavit.accountants.registry import PLD
from affidavit.plan import events

MIN_DELTA = 1e-9
MAX_GRID = 400_000
"""Points."""
DEFAULT_INTERVAL = 1e-4
"""Distance (nats) of the points of the grid."""
LONGEST_INTERVAL = 1e-2
"""The same in nats, at most."""
NEGLIGIBLE_SHARE = 1e-4
"""Share of ε that the steps of all releases may come to, whatever their number of points."""
MAX_NOISE = 1e4
"""The largest noise multiplier for which the library is used."""
MAX_STEPS = 1_000_000
"""Releases in one run."""
MAX_LEAVES = 8
"""Kinds of release in one run; each takes the library up to a second."""
ROUNDING = 1e-9
"""Relative allowance for the rounding of ε on the grid."""
MAX_LIBRARY_EPSILON = 600.0
"""Nats up to which the library's own search for ε is used."""
ROUND_OFF = 64 * 2.0**-53
"""Allowance of δ for the round-off of each release."""
MIN_ROUND_OFF_RELEASES = 1000
"""Least number of releases in the allowance, because one transform rounds as well."""


@dataclass(frozen=True, kw_only=True)
class PldCurve:
    """Both roundings of one composition, each computed on first use.

    ``leaves`` are its releases with counts, and ``interval`` is the grid step in nats.
    """

    leaves: tuple[tuple[events.Leaf, int], ...]
    interval: float

    @cached_property
    def _pessimistic(self) -> library.PrivacyLossDistribution:
        return _compose(self.leaves, self.interval, pessimistic=True)

    @cached_property
    def _optimistic(self) -> library.PrivacyLossDistribution:
        return _compose(self.leaves, self.interval, pessimistic=False)

    def epsilon(self, delta: float) -> Bracket:
        """Return the bracket of ε (nats) at ``delta``; raises ``OutOfReach`` for a small δ."""
        require_delta(delta)
        round_off = self._round_off
        _require_reach(delta, round_off)
        _, above = _crossing(self._pessimistic, delta - round_off)
        below, _ = _crossing(self._optimistic, min(delta + round_off, 1.0))
        lower, upper = below * (1 - ROUNDING), above * (1 + ROUNDING)
        return Bracket(lower=min(max(0.0, lower), upper), upper=upper)

    def delta(self, epsilon: float) -> Bracket:
        """Return the bracket of δ at ``epsilon`` (nats); raises ``OutOfReach`` for a small δ."""
        require_epsilon(epsilon)
        result = float(self._pessimistic.get_delta_for_epsilon(epsilon)) * (1 + ROUNDING)
        _require_reach(result, self._round_off)
        upper = result + self._round_off
        least = float(self._optimistic.get_delta_for_epsilon(epsilon)) * (1 - ROUNDING)
        lower = least - self._round_off
        return Bracket(lower=min(max(0.0, lower), upper), upper=min(1.0, upper))

    @property
    def _round_off(self) -> float:
        return ROUND_OFF * max(MIN_ROUND_OFF_RELEASES, sum(count for _, count in self.leaves))


def _crossing(pld: library.PrivacyLossDistribution, delta: float) -> tuple[float, float]:
    """Return ε (nats) on either side of the point where the curve of ``pld`` reaches ``delta``.

    The library sums exp(-loss), which underflows above some 700 nats. There it returns the loss
    that is exceeded with probability ``delta``, so ε is searched here.
    """
    result = float(pld.get_epsilon_for_delta(delta))
    if not MAX_LIBRARY_EPSILON < result < math.inf:
        return result, result
    low, high = 0.0, 2 * result
    while high - low > ROUNDING * high:
        middle = (low + high) / 2
        fits = pld.get_delta_for_epsilon(middle) <= delta
        low, high = (low, middle) if fits else (middle, high)
    return low, high


def _require_reach(delta: float, round_off: float) -> None:
    least = max(MIN_DELTA, 2 * round_off)
    if delta < least:
        raise OutOfReach(
            f"the PLD engine adds round-off to δ and bounds nothing below {least:.3g} in this run.",
            "Use another accountant for smaller δ.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PldAccountant:
    """dp_accounting's PLD accountant with both roundings.

    ``interval`` is the grid step in nats. By default it depends on the ε of the run.
    """

    name: str = "pld"
    version: str = PLD
    interval: float | None = None

    def curve(self, event: events.Event) -> PrivacyCurve:
        """Return the curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        parts = leaves(event)
        if not parts:
            return EMPTY_CURVE
        for leaf, _ in parts:
            _require_supported(leaf)
        steps = sum(count for _, count in parts)
        if steps > MAX_STEPS:
            raise OutOfReach(
                f"{steps} releases exceed the PLD engine's limit of {MAX_STEPS}.",
                "Use another accountant.",
            )
        if len(parts) > MAX_LEAVES:
            raise OutOfReach(
                f"{len(parts)} kinds of release exceed the PLD engine's limit of {MAX_LEAVES}.",
                "Use another accountant.",
            )
        interval = _interval(parts) if self.interval is None else self.interval
        return PldCurve(leaves=parts, interval=interval)


def _require_supported(leaf: events.Leaf) -> None:
    match leaf:
        case (
            events.Gaussian(noise_multiplier=sigma)
            | events.Laplace(noise_multiplier=sigma)
            | events.PoissonSubsampledGaussian(noise_multiplier=sigma, pair="add_remove")
            | events.TruncatedPoissonGaussian(
                noise_multiplier=sigma, neighbours="add_remove" | "zero_out"
            )
        ):
            if sigma > MAX_NOISE:
                raise OutOfReach(
                    f"noise multiplier {sigma:.3g} exceeds the PLD engine's limit of "
                    f"{MAX_NOISE:g}.",
                    "Use another accountant.",
                )
        case _:
            raise Unsupported(
                "the PLD engine takes Laplace releases, and Gaussian releases, unsampled or "
                "Poisson-sampled under add_remove.",
                "Use another accountant.",
            )


def _interval(parts: tuple[tuple[events.Leaf, int], ...]) -> float:
    """Return a grid step of at most ε/1000, or a longer one if the grid would be too large.

    Where few releases have a large ε, a step as long as moves it by ``NEGLIGIBLE_SHARE`` will do.
    The grid of the composition spans the losses of probability above 1e-15, which the Rényi bound
    encloses.
    """
    run = tuple(events.Repeated(event=_rdp_stand_in(leaf), count=count) for leaf, count in parts)
    rough = RdpAccountant().curve(events.Composed(events=run))
    span = 2 * rough.epsilon(1e-15).upper
    # The library mixes the two events of truncation slowly, so a tenth of the grid must do.
    truncated = any(isinstance(leaf, events.TruncatedPoissonGaussian) for leaf, _ in parts)
    finest = DEFAULT_INTERVAL * (10 if truncated else 1)
    typical, releases = rough.epsilon(1e-5).upper, sum(count for _, count in parts)
    negligible = min(typical * NEGLIGIBLE_SHARE / releases, LONGEST_INTERVAL)
    requested = max(min(finest, typical / 1000), negligible)
    interval = max(requested, span / MAX_GRID, 1e-8)
    if interval > LONGEST_INTERVAL:
        raise OutOfReach(
            f"the PLD grid would span {span:.3g} nats.", "Add noise, or use another accountant."
        )
    return interval


def _rdp_stand_in(leaf: events.Leaf) -> events.Leaf:
    """Return a release with a Rényi bound that moves the sum as far as ``leaf``."""
    if not isinstance(leaf, events.TruncatedPoissonGaussian):
        return leaf
    return events.PoissonSubsampledGaussian(
        sampling_probability=leaf.sampling_probability, noise_multiplier=leaf.noise_multiplier / 2
    )


def _compose(
    parts: tuple[tuple[events.Leaf, int], ...], interval: float, *, pessimistic: bool
) -> library.PrivacyLossDistribution:
    total: library.PrivacyLossDistribution | None = None
    for leaf, count in parts:
        step = _leaf_pld(leaf, count, interval, pessimistic=pessimistic)
        total = step if total is None else total.compose(step)
    return total


def _leaf_pld(
    leaf: events.Leaf, count: int, interval: float, *, pessimistic: bool
) -> library.PrivacyLossDistribution:
    # Only upper rounding has a "connect the dots" form; lower rounding takes buckets.
    shape = {
        "value_discretization_interval": interval,
        "pessimistic_estimate": pessimistic,
        "use_connect_dots": pessimistic,
    }
    match leaf:
        case events.Gaussian(noise_multiplier=sigma):
            return library.from_gaussian_mechanism(sigma / count**0.5, **shape)
        case events.Laplace(noise_multiplier=scale):
            step = library.from_laplace_mechanism(scale, **shape)
            return step if count == 1 else step.self_compose(count)
        case events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma):
            step = library.from_gaussian_mechanism(sigma, sampling_prob=q, **shape)
            return step if count == 1 else step.self_compose(count)
        case events.TruncatedPoissonGaussian(noise_multiplier=sigma) if pessimistic:
            step = library.from_truncated_subsampled_gaussian_mechanism(
                leaf.dataset_size + (1 if leaf.neighbours == "add_remove" else 0),
                leaf.sampling_probability,
                leaf.max_lot_size,
                sigma,
                interval,
            )
            return step.self_compose(count)
        case events.TruncatedPoissonGaussian(noise_multiplier=sigma):
            # The library's pair is not attained. This one is, if all others contribute zero.
            rate = attained_rate(leaf)
            step = library.from_gaussian_mechanism(sigma, sampling_prob=rate, **shape)
            return step.self_compose(count)
        case _:
            raise Unsupported(f"the PLD engine does not support {type(leaf).__name__}.")
