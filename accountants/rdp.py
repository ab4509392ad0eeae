"""Rényi accounting by dp_accounting: upper bounds.

Rényi divergences add under composition and convert to (ε, δ) at every order. So the least over any
set of orders is a proved bound, and usually a loose one. The lower bound is 0. This engine is the
second opinion where the others do not reach (δ below 1e-9) and about repeat-and-select.

The library only receives events that are built here. Its ``from_named_tuple`` imports any module
that the data names, so it must not receive data from a request.

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

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant as LibraryAccountant
from scipy.special import gammaln

from affidavit.accountants.bracket import Bracket
from affidavit.accountants.composition import parts
from affidavit.accountants.fourier.schedules import merge_kinds
from affidavit.accountants.protocol import OutOfReach, Unsupported, require_delta, require_epsilon
from affidavit.accountants.registry import RDP
from affidavit.accountants.rounding import Array
from affidavit.plan import events

ROUNDING = 1e-9
"""Relative allowance for the library's rounding, far above what it loses."""
MIN_NOISE = 0.05
"""Noise multiplier below which the library's fractional orders fail."""
MAX_FIXED_SIZE_NOISE = 2000.0
"""Noise multiplier above which the library's differences for samples without replacement cancel."""
_OTHER_ENGINES = {
    events.RandomAllocationGaussian: "allocation",
    events.ReplacedAllocationGaussian: "allocation",
    events.BallsInBinsGaussian: "monte_carlo",
}


def as_dp_event(leaf: events.Leaf | events.RepeatAndSelect) -> dp_accounting.DpEvent:
    """Return one release, or one selection among repeated runs, as a ``DpEvent``.

    Without replacement, dp_accounting's RDP takes the noise over the *replacement* distance, which
    is twice the clip norm. Raises ``Unsupported`` if dp_accounting has no event for the leaf.
    """
    match leaf:
        case events.Gaussian(noise_multiplier=sigma):
            return dp_accounting.GaussianDpEvent(sigma)
        case events.Laplace(noise_multiplier=scale):
            return dp_accounting.LaplaceDpEvent(scale)
        case events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma):
            return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        case events.WithoutReplacementGaussian(
            dataset_size=size, sample_size=lot, noise_multiplier=sigma
        ):
            half = dp_accounting.GaussianDpEvent(sigma / 2)
            return dp_accounting.SampledWithoutReplacementDpEvent(size, lot, half)
        case events.RepeatAndSelect(event=run, mean=mean, shape=shape):
            repeated = dp_accounting.ComposedDpEvent(
                [dp_accounting.SelfComposedDpEvent(as_dp_event(p), n) for p, n in parts(run)]
            )
            return RepeatAndSelectDpEvent(repeated, mean, shape)
        case _:
            engine = _OTHER_ENGINES.get(type(leaf), "fourier")
            raise Unsupported(
                f"dp_accounting's Rényi accountant has no event for {type(leaf).__name__}.",
                f"Use the {engine} accountant.",
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the library's warnings. Dropping an order only loosens a bound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True, kw_only=True, slots=True)
class RdpCurve:
    """Upper bounds; ``lower`` is always 0."""

    ledger: LibraryAccountant
    empty: bool

    def epsilon(self, delta: float) -> Bracket:
        """Return ``[0, least ε over the orders]`` (nats) at ``delta``.

        Raises ``ValueError`` unless 0 < δ < 1.
        """
        require_delta(delta)
        with quiet():
            result = self.ledger.get_epsilon(delta)
        return Bracket(lower=0.0, upper=_up(result))

    def delta(self, epsilon: float) -> Bracket:
        """Return ``[0, least δ over the orders]`` at ``epsilon`` (nats).

        Raises ``ValueError`` if ε is negative.
        """
        require_epsilon(epsilon)
        if self.empty:
            return Bracket(lower=0.0, upper=0.0)
        with quiet():
            result = self.ledger.get_delta(epsilon)
        # The next larger double, because a bound that underflows is not zero.
        return Bracket(lower=0.0, upper=min(1.0, math.nextafter(_up(result), math.inf)))

    def divergences(self) -> tuple[tuple[int, float], ...]:
        """Return whole orders with a finite bound on the Rényi divergence (nats) at each.

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
    """dp_accounting's Rényi accountant, by default at its default orders."""

    name: str = "rdp"
    version: str = RDP
    orders: tuple[int, ...] | None = None

    def curve(self, event: events.Event) -> RdpCurve:
        """Return the curve of ``event``; raises ``Unsupported`` or ``OutOfReach``."""
        relations = _relations(event)
        if len(relations) > 1:
            raise Unsupported(
                "the run mixes sampling with and without replacement, which are bounded "
                "under different adjacencies.",
                "Use one scheme throughout.",
            )
        relation = relations.pop() if relations else NeighboringRelation.ADD_OR_REMOVE_ONE
        ledger = LibraryAccountant(self.orders, neighboring_relation=relation)
        with quiet():
            # Of very many kinds of release, similar ones count as the worst of them.
            for part, count in merge_kinds(parts(event)):
                stable, rounding = _with_rounding(part, ledger)
                ledger.compose(as_dp_event(stable), count)
                ledger._rdp = ledger._rdp + count * rounding
        return RdpCurve(ledger=ledger, empty=not parts(event))


def _with_rounding(
    part: events.Leaf | events.RepeatAndSelect, ledger: LibraryAccountant
) -> tuple[events.Leaf | events.RepeatAndSelect, Array | float]:
    """Return ``part``, or a similar one that costs no less, and the rounding of divergences.

    A moment is a sum of terms with rounded logarithms, and its own logarithm may be smaller than
    their rounding: the library then returns zero or less, and an ε of zero. Shape (orders,).
    """
    if isinstance(part, events.WithoutReplacementGaussian):
        return replace(part, noise_multiplier=min(part.noise_multiplier, MAX_FIXED_SIZE_NOISE)), 0.0
    if not isinstance(part, events.PoissonSubsampledGaussian) or part.sampling_probability >= 1:
        return part, 0.0
    orders = np.asarray(ledger._orders, dtype=np.float64)
    q, square = part.sampling_probability, orders**2 / (2 * part.noise_multiplier**2)
    logarithms = 4 * gammaln(orders + 1) + square - orders * (math.log(q) + math.log1p(-q))
    return part, 2.0**-53 * (4 * logarithms + 2 * orders * (1 + square)) / (orders - 1)


def _relations(event: events.Event) -> set[NeighboringRelation]:
    """Return the adjacencies under which the library bounds the releases of ``event``.

    Unsampled releases have none. Raises ``Unsupported`` or ``OutOfReach`` for a release that it
    does not bound.
    """
    result: set[NeighboringRelation] = set()
    for part, _ in parts(event):
        match part:
            case events.RepeatAndSelect(event=run):
                result |= _relations(run)
            case events.PoissonSubsampledGaussian(pair="replace_one"):
                raise Unsupported(
                    "Rényi accounting has no bound here for Poisson sampling under replace_one.",
                    "Use add_remove, or an accountant that has the pair.",
                )
            case events.PoissonSubsampledGaussian(noise_multiplier=sigma):
                if sigma < MIN_NOISE:
                    raise OutOfReach(
                        f"noise multiplier {sigma:.3g} is below {MIN_NOISE}.", "Add more noise."
                    )
                result.add(NeighboringRelation.ADD_OR_REMOVE_ONE)
            case events.WithoutReplacementGaussian():
                result.add(NeighboringRelation.REPLACE_ONE)
            case _:
                as_dp_event(part)  # raises unless it is Gaussian or Laplace
    return result
