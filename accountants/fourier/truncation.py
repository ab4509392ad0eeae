"""Truncated Poisson sampling: the laws of a release whose lot may be cut.

Whether the sample had to be cut is revealed, with the same probability under both
hypotheses, so that the law of the loss is a mixture of two laws that are known:

* not cut (at most L - 1 of the other records were drawn): the Poisson pair at q;
* cut, with probability w: the record is in the lot with probability p only, but when it
  is, another record is not, so that the sum moves by two clip norms: the pair of sampling
  without replacement at p.

Under add_remove the number of others is private too; w is taken for the largest data set
and p as q, which bounds every smaller one. The lower bound is a data set whose other
records contribute zero: Poisson sampling at the record's own rate.

w is a binomial tail from scipy, trusted to ``TAIL_ERROR`` of itself: it is rounded down by
that and p up by twice as much, which together can only raise the curve, because it is
convex in p and nothing at p = 0. Proofs: docs/theorems/truncated-poisson.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from affidavit.accountants.fourier.losses import (
    Atoms,
    Cells,
    Kind,
    LossLaw,
    NormalMixtureLaw,
    Survival,
    WorseOfBothLaw,
)
from affidavit.accountants.fourier.normal_masses import Array
from affidavit.plan import TruncatedPoissonGaussian

TAIL_ERROR = 1e-10
"""Relative error allowed for ``scipy.stats.binom.sf``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RevealedMixtureLaw:
    """``second`` with probability ``weight``, else ``first``, and it is known which."""

    first: LossLaw
    second: LossLaw
    weight: float

    @property
    def ceiling(self) -> float:
        """No loss of either exceeds this (nats)."""
        return max(self.first.ceiling, self.second.ceiling)

    def atoms(self) -> Atoms:
        """The law under P, for steering."""
        parts = (self.first.atoms(), 1 - self.weight), (self.second.atoms(), self.weight)
        losses = np.concatenate([atoms.losses for atoms, _ in parts])
        weights = np.concatenate([share * atoms.weights for atoms, share in parts])
        order = np.argsort(losses, kind="stable")
        return Atoms(losses=losses[order], weights=weights[order])

    def survival(self, losses: Array) -> Survival:
        """Both survival functions at increasing ``losses`` (nats), weighed."""
        first, second = self.first.survival(losses), self.second.survival(losses)
        rest = 1 - self.weight
        return Survival(
            p=rest * first.p + self.weight * second.p,
            q=rest * first.q + self.weight * second.q,
            relative=np.maximum(first.relative, second.relative) + 2.0**-51,
            loss_error=max(first.loss_error, second.loss_error),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses of both laws between ``edges``, weighed."""
        first, second = self.first.cells(edges), self.second.cells(edges)
        rest = 1 - self.weight
        return Cells(
            p=rest * first.p + self.weight * second.p,
            q=rest * first.q + self.weight * second.q,
            relative=np.maximum(first.relative, second.relative) + 2.0**-51,
            misplaced=np.maximum(first.misplaced, second.misplaced),
        )

    def top(self, probability: float) -> float:
        """A loss (nats) that is exceeded under P with at most about this small probability.

        Half of it for either law, since the bound of ε that needs no transform rests on it.
        """
        half = probability / 2
        if self.weight <= half:
            return self.first.top(half)
        return max(self.first.top(half), self.second.top(half / self.weight))


def truncated_law(leaf: TruncatedPoissonGaussian, side: Kind) -> LossLaw:
    """A law that dominates one release of ``leaf`` in the direction ``side``."""
    others = leaf.dataset_size - (0 if leaf.neighbours == "add_remove" else 1)
    first = _poisson(leaf, leaf.sampling_probability, side)
    weight = _chance_of_cut(leaf, others) * (1 - TAIL_ERROR)
    if weight == 0:
        return first
    if leaf.neighbours == "add_remove":
        second: LossLaw = _moved_twice(leaf, leaf.sampling_probability, side)
    else:
        drawn = leaf.max_lot_size / leaf.dataset_size * _sample_above(leaf, leaf.dataset_size)
        rate = min(leaf.sampling_probability, drawn / weight)
        second = WorseOfBothLaw(
            remove=_moved_twice(leaf, rate, "remove"), add=_moved_twice(leaf, rate, "add")
        )
    return RevealedMixtureLaw(first=first, second=second, weight=weight)


def attained_law(leaf: TruncatedPoissonGaussian, side: Kind) -> LossLaw:
    """The law of a data set whose other records contribute zero."""
    return _poisson(leaf, attained_rate(leaf), side)


def attained_rate(leaf: TruncatedPoissonGaussian) -> float:
    """The chance of a record to be in the lot as it is used, rounded down."""
    others = leaf.dataset_size - 1
    whole = leaf.sampling_probability * float(
        _binomial().cdf(leaf.max_lot_size - 1, others, leaf.sampling_probability)
    )
    cut = leaf.max_lot_size / leaf.dataset_size * _sample_above(leaf, leaf.dataset_size)
    return min(leaf.sampling_probability, whole + cut) * (1 - 2 * TAIL_ERROR)


def _poisson(leaf: TruncatedPoissonGaussian, rate: float, side: Kind) -> NormalMixtureLaw:
    kind: Kind = "replace" if leaf.neighbours == "replace_one" else side
    return NormalMixtureLaw(
        kind=kind, noise_multiplier=leaf.noise_multiplier, sampling_probability=rate
    )


def _moved_twice(leaf: TruncatedPoissonGaussian, rate: float, side: Kind) -> NormalMixtureLaw:
    """The pair of a record that displaces another, at ``rate`` rounded up."""
    raised = rate * (1 + 2 * TAIL_ERROR)
    if raised >= 1:
        return NormalMixtureLaw(
            kind="gaussian", noise_multiplier=leaf.noise_multiplier, distance=2.0
        )
    return NormalMixtureLaw(
        kind=side,
        noise_multiplier=leaf.noise_multiplier,
        sampling_probability=raised,
        distance=2.0,
    )


def _chance_of_cut(leaf: TruncatedPoissonGaussian, others: int) -> float:
    """w: the chance that the record, if drawn, finds the lot already full."""
    return float(_binomial().sf(leaf.max_lot_size - 1, others, leaf.sampling_probability))


def _sample_above(leaf: TruncatedPoissonGaussian, size: int) -> float:
    """The chance that a sample from ``size`` records is larger than the largest lot."""
    return float(_binomial().sf(leaf.max_lot_size, size, leaf.sampling_probability))


def _binomial() -> Any:
    """scipy's, loaded at the first use: it takes longer than most plans take to certify."""
    from scipy.stats import binom

    return binom
