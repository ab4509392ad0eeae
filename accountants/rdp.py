"""Rényi accounting by dp_accounting: an upper bound for whatever it knows.

Rényi divergences add under composition and convert to (ε, δ) at every order, so the
least over any set of orders is a proved bound, and usually a loose one: the lower end of
its brackets is 0. It is the second opinion where the others do not reach (δ below 1e-9)
and about repeat-and-select.

Only events built here are ever given to the library: its ``from_named_tuple`` imports whatever
module the data names, so that nothing from a request may reach it.

References: Mironov, arXiv:1702.07476; Mironov, Talwar and Zhang, arXiv:1908.10530;
Wang, Balle and Kasiviswanathan, arXiv:1808.00087 (without replacement); Canonne, Kamath
and Steinke, arXiv:2004.00010 (conversion).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import assert_never

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant as LibraryAccountant
from scipy.special import gammaln

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import parts
from affidavit.accountants.cyclic_convolution import Array
from affidavit.accountants.fourier.schedules import merge_kinds
from affidavit.accountants.protocol import OutOfReach, Unsupported, require_delta, require_epsilon
from affidavit.accountants.registry import RDP
from affidavit.plan import (
    BallsInBinsGaussian,
    Event,
    Gaussian,
    GaussianMixture,
    Laplace,
    Leaf,
    PoissonSampledGroupGaussian,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    RepeatAndSelect,
    ReplacedAllocationGaussian,
    TruncatedPoissonGaussian,
    TruncatedPoissonGroupGaussian,
    WithoutReplacementGaussian,
    WithoutReplacementGroupGaussian,
)


def as_dp_event(leaf: Leaf | RepeatAndSelect) -> dp_accounting.DpEvent:
    """One release, or one selection among repeated runs, as a ``DpEvent``.

    Without replacement, dp_accounting's RDP takes the noise over the *replacement*
    distance, which is twice the clip norm.

    Raises ``Unsupported`` for a leaf that dp_accounting has no event for.
    """
    match leaf:
        case Gaussian(noise_multiplier=sigma):
            return dp_accounting.GaussianDpEvent(sigma)
        case Laplace(noise_multiplier=scale):
            return dp_accounting.LaplaceDpEvent(scale)
        case PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma):
            return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        case WithoutReplacementGaussian(dataset_size=size, sample_size=lot, noise_multiplier=sigma):
            half = dp_accounting.GaussianDpEvent(sigma / 2)
            return dp_accounting.SampledWithoutReplacementDpEvent(size, lot, half)
        case RepeatAndSelect(event=run, mean=mean, shape=shape):
            repeated = dp_accounting.ComposedDpEvent(
                [dp_accounting.SelfComposedDpEvent(as_dp_event(p), n) for p, n in parts(run)]
            )
            return RepeatAndSelectDpEvent(repeated, mean, shape)
        case _:
            raise Unsupported(
                f"dp_accounting's Rényi accountant has no event for {type(leaf).__name__}.",
                "Use another accountant.",
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's warnings to itself: an order that it drops only loosens a bound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.setLevel(level)


ROUNDING = 1e-9
"""Relative allowance for the library's floating point, far above what it loses."""
MIN_NOISE = 0.05
"""Below this the fractional orders of the library fail one by one."""
STEADY_NOISE = 2000.0
"""Above this the library's differences for samples without replacement cancel to nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RdpCurve:
    """Upper bounds only; ``lower`` is always 0."""

    ledger: LibraryAccountant
    empty: bool

    def epsilon(self, delta: float) -> Bracket:
        """``[0, least ε over the orders]`` at ``delta``.

        In nats; raises ``ValueError`` unless 0 < δ < 1.
        """
        require_delta(delta)
        with quiet():
            result = self.ledger.get_epsilon(delta)
        return Bracket(lower=0.0, upper=_up(result))

    def delta(self, epsilon: float) -> Bracket:
        """``[0, least δ over the orders]`` at ``epsilon``.

        ε in nats; raises ``ValueError`` where it is negative.
        """
        require_epsilon(epsilon)
        if self.empty:
            return Bracket(lower=0.0, upper=0.0)
        with quiet():
            result = self.ledger.get_delta(epsilon)
        # The next double up: a bound that underflowed is still not zero.
        return Bracket(lower=0.0, upper=min(1.0, math.nextafter(_up(result), math.inf)))

    def divergences(self) -> tuple[tuple[int, float], ...]:
        """Whole orders with a bound on the Rényi divergence (nats) at each, where it is finite.

        The library has no public name for them; its version is pinned.
        """
        return tuple(
            (int(order), _up(result))
            for order, result in zip(self.ledger._orders, self.ledger._rdp, strict=True)
            if order == int(order) and math.isfinite(result)
        )


def _up(value: float) -> float:
    if math.isnan(value):
        raise OutOfReach("the Rényi orders failed numerically.", "Use another accountant.")
    return float(value) * (1 + ROUNDING)


@dataclass(frozen=True, kw_only=True, slots=True)
class RdpAccountant:
    """dp_accounting's Rényi accountant, at its default orders unless ``orders`` are given."""

    name: str = "rdp"
    version: str = RDP
    orders: tuple[int, ...] | None = None

    def curve(self, event: Event) -> RdpCurve:
        """The curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        kinds = _relations(event) - {None}
        if len(kinds) > 1:
            raise Unsupported(
                "the run mixes sampling with and without replacement, which are bounded "
                "under different adjacencies.",
                "Use one scheme throughout.",
            )
        relation = kinds.pop() if kinds else NeighboringRelation.ADD_OR_REMOVE_ONE
        ledger = LibraryAccountant(self.orders, neighboring_relation=relation)
        with quiet():
            # Of very many kinds of release those alike are taken for the worst of them.
            for part, count in merge_kinds(parts(event)):
                steady, rounding = _steady(part, ledger)
                ledger.compose(as_dp_event(steady), count)
                ledger._rdp = ledger._rdp + count * rounding
        return RdpCurve(ledger=ledger, empty=not parts(event))


def _steady(
    part: Leaf | RepeatAndSelect, ledger: LibraryAccountant
) -> tuple[Leaf | RepeatAndSelect, Array | float]:
    """``part``, or the like that costs no less, and what rounding takes from each divergence.

    A moment is added up from terms whose logarithms are rounded, and its own logarithm may be
    smaller than that: the library then returns zero, or less, and an ε of zero. Shape (orders,).
    """
    if isinstance(part, WithoutReplacementGaussian):
        return replace(part, noise_multiplier=min(part.noise_multiplier, STEADY_NOISE)), 0.0
    if not isinstance(part, PoissonSubsampledGaussian) or part.sampling_probability >= 1:
        return part, 0.0
    orders = np.asarray(ledger._orders, dtype=np.float64)
    q, square = part.sampling_probability, orders**2 / (2 * part.noise_multiplier**2)
    logarithms = 4 * gammaln(orders + 1) + square - orders * (math.log(q) + math.log1p(-q))
    return part, 2.0**-53 * (4 * logarithms + 2 * orders * (1 + square)) / (orders - 1)


def _relations(event: Event) -> set[NeighboringRelation | None]:
    result: set[NeighboringRelation | None] = set()
    for part, _ in parts(event):
        if isinstance(part, RepeatAndSelect):
            result |= _relations(part.event)
        else:
            result.add(_relation(part))
    return result


def _relation(leaf: Leaf) -> NeighboringRelation | None:
    """The adjacency under which the library knows the leaf; None where either will do."""
    match leaf:
        case PoissonSubsampledGaussian(pair="replace_one"):
            raise Unsupported(
                "Rényi accounting has no bound here for Poisson sampling under replace_one.",
                "Use add_remove, or an accountant that has the pair.",
            )
        case PoissonSubsampledGaussian(noise_multiplier=sigma) if sigma < MIN_NOISE:
            raise OutOfReach(
                f"noise multiplier {sigma:.3g} is below {MIN_NOISE}.", "Add more noise."
            )
        case PoissonSubsampledGaussian():
            return NeighboringRelation.ADD_OR_REMOVE_ONE
        case (
            PoissonSampledGroupGaussian()
            | GaussianMixture()
            | WithoutReplacementGroupGaussian()
            | TruncatedPoissonGroupGaussian()
        ):
            raise Unsupported(
                "Rényi accounting has no bound here for several records of a user.",
                "Use the fourier accountant.",
            )
        case WithoutReplacementGaussian():
            return NeighboringRelation.REPLACE_ONE
        case TruncatedPoissonGaussian():
            raise Unsupported(
                "Rényi accounting has no bound here for truncated Poisson sampling.",
                "Use the fourier accountant.",
            )
        case RandomAllocationGaussian() | ReplacedAllocationGaussian():
            raise Unsupported(
                "Rényi accounting has no bound here for random allocation.",
                "Use the allocation accountant.",
            )
        case BallsInBinsGaussian():
            raise Unsupported(
                "Rényi accounting has no bound here for balls in bins with correlated noise.",
                "Use the monte_carlo accountant.",
            )
        case Gaussian() | Laplace():
            return None
        case _:
            assert_never(leaf)
