"""Runs of very many kinds of release: noise or a sampling rate that changes every step.

Releases whose noise multipliers and rates are near each other are bracketed together, as so many of
one law that dominates them (above) and so many of one that they dominate (below).

* Along one coordinate the curve of a release is convex: in the rate q, and in the total variation
  x = erf(1 / (σ √8)) of its Gaussian pair. So it is at most the chord between two releases on
  either side, and at least the line through two below it. A chord is a coin that is revealed; the
  coins of the releases together, whose chances differ, come up at most as often as coins of one
  chance, with the geometric mean of the chances to come down. For a line the other way round.
* Along the other one, and for the pairs for which the first is not proved, the noise is
  rounded down and the rate up (above), or the other way round (below).

Proofs: docs/theorems/schedules.md.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import erf, erfinv

from affidavit.accountants.fourier.loss_laws import Kind, NormalMixtureLaw, RevealedMixtureLaw
from affidavit.accountants.fourier.privacy_loss import (
    UNIT_ROUNDOFF,
    Array,
    Atoms,
    Cells,
    LossLaw,
    Survival,
)
from affidavit.plan import (
    Gaussian,
    Leaf,
    PoissonSubsampledGaussian,
    RepeatAndSelect,
    SubsampledPair,
)

MAX_KINDS, MAX_INVERTED = 250, 2000
"""Kinds of release that are accounted one by one, and without a lattice."""
MAX_CELLS, FINER_CELLS = 64, 256
"""Of a run that has more, the sets of them that are bracketed together, with and without one."""
_CHORD, _REMAINDER = 0.1, 1.0
"""What a span of log noise or log rate costs along a chord, and where it is rounded."""
_ROUNDING = 1e-9
"""By which a chance is moved to the safe side."""
_BEYOND, _STEP = 0.3, 0.15
"""How far beyond a cell its chords are drawn, and how long what a line is drawn through is, in
widths of the cell: farther, the coins' chances differ less, and the curve from its chord more."""
_NARROWEST = 1e-5
"""Relative width of a cell below which rounding would decide its chances."""
_WIDEST = 0.3
"""Span of a cell, in its coordinate's logarithm, beyond which no chord is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtrapolatedLaw:
    """The line through the curves of ``lower`` and ``near``, ``share`` beyond the second.

    (1 + share) times the law of ``near`` less share times that of ``lower``, where no part of
    it is negative: a lower bound of the release so far beyond ``near``. For lower bounds only.
    """

    lower: NormalMixtureLaw
    near: NormalMixtureLaw
    share: float

    @property
    def ceiling(self) -> float:
        """No loss of either exceeds this (nats)."""
        return max(self.lower.ceiling, self.near.ceiling)

    @property
    def least(self) -> float:
        """The law is at least so many times that of ``near``; not negative where it is of use."""
        return 1 + self.share - self.share * _densest(self.lower, self.near)

    def atoms(self) -> Atoms:
        """The law under P, about, for parameters."""
        return self.near.atoms()

    def top(self, probability: float) -> float:
        """A loss (nats) that is exceeded under P with about this small probability."""
        return self.near.top(probability)

    def survival(self, losses: Array) -> Survival:
        """Both survival functions at increasing ``losses`` (nats)."""
        near, lower = self.near.survival(losses), self.lower.survival(losses)
        p, q, relative = self._less(near, lower, np.zeros(losses.size))
        return Survival(
            p=p, q=q, relative=relative, loss_error=max(near.loss_error, lower.loss_error)
        )

    def cells(self, edges: Array) -> Cells:
        """The masses of both laws between ``edges``.

        The two laws are cut at losses that differ by what is misplaced: the strip between them
        holds at most eight times the share of the cells beside it that its width is of theirs.
        """
        near, lower = self.near.cells(edges), self.lower.cells(edges)
        widths = np.diff(edges, prepend=edges[0] - 1.0, append=edges[-1] + 1.0)
        strip = 8.0 * np.maximum(near.misplaced, lower.misplaced) / widths
        p, q, relative = self._less(near, lower, strip)
        return Cells(
            p=p, q=q, relative=relative, misplaced=np.maximum(near.misplaced, lower.misplaced)
        )

    def _less(
        self, near: Survival | Cells, lower: Survival | Cells, strip: Array
    ) -> tuple[Array, Array, Array]:
        """Masses of P and Q, at least as large as their errors, and those relative to them."""
        results, share = [], self.share
        for above, below in ((near.p, lower.p), (near.q, lower.q)):
            moved = strip * below
            if moved.any():
                moved[1:] += strip[1:] * below[:-1]
                moved[:-1] += strip[:-1] * below[1:]
            error = (1 + share) * above * (near.relative + 4.0 * UNIT_ROUNDOFF)
            error += share * (below * (lower.relative + 4.0 * UNIT_ROUNDOFF) + moved)
            mass = np.maximum((1 + share) * above - share * below, error)
            with np.errstate(divide="ignore", invalid="ignore"):
                results.append((mass, np.nan_to_num(error / mass)))
        (p, p_error), (q, q_error) = results
        return p, q, np.maximum(p_error, q_error)


Part = tuple[LossLaw, LossLaw, int]
"""A law that dominates a release, one that a pair of data sets attains, and how many of them."""


Releases = Sequence[tuple[Leaf | RepeatAndSelect, int]]


def fewer(parts: Releases) -> Releases:
    """Releases that dominate ``parts``, of far fewer kinds where there are very many."""
    rest, cells = gathered(parts)
    return [*rest, *(cell.worst() for cell in cells)]


def gathered(
    parts: Releases, kinds: int = MAX_KINDS, cells: int = MAX_CELLS
) -> tuple[Releases, list[Cell]]:
    """The releases to account for one by one, and cells of those to bracket together.

    There are so many ``cells``, and only of more than so many ``kinds`` of release.
    """
    if len(parts) <= kinds:
        return parts, []
    rest: list[tuple[Leaf | RepeatAndSelect, int]] = []
    precisions: list[float] = []
    pairs: dict[SubsampledPair, list[tuple[float, float, int]]] = {}
    for leaf, count in parts:
        match leaf:
            case Gaussian(noise_multiplier=sigma):
                precisions.append(count / sigma**2)
            case PoissonSubsampledGaussian(noise_multiplier=sigma, sampling_probability=q):
                pairs.setdefault(leaf.pair, []).append((sigma, q, count))
            case _:
                rest.append((leaf, count))
    if precisions:
        # Gaussian releases are one, whose μ² is the sum of theirs.
        total = math.fsum(precisions) * (1 + 1e-14)
        rest.append((Gaussian(noise_multiplier=1 / math.sqrt(total)), 1))
    return rest, _cells(pairs, cells)


@dataclass(frozen=True, slots=True)
class Cell:
    """Subsampled releases of one ``pair``; the arrays have shape (n,)."""

    pair: SubsampledPair
    sigmas: Array
    rates: Array
    counts: Array

    @property
    def spans(self) -> tuple[float, float]:
        """Logarithms of the largest over the least noise multiplier, and rate."""
        return (
            math.log(self.sigmas.max() / self.sigmas.min()),
            math.log(self.rates.max() / self.rates.min()),
        )

    @property
    def chord(self) -> tuple[bool, bool]:
        """Whether the noise, and whether the rate, is taken by its mean and not rounded."""
        noise, rate = self.spans
        if self.pair == "replace_one":
            return False, 0 < rate <= _WIDEST
        return 0 < noise <= _WIDEST and noise >= rate, 0 < rate <= _WIDEST and rate > noise

    @property
    def costs(self) -> tuple[float, float]:
        """What the spans cost, about, relative to each other."""
        weight = float(self.counts @ (self.rates**2 * np.expm1(np.minimum(self.sigmas**-2, 30.0))))
        noise, rate = (
            weight * span * (_CHORD if chord else _REMAINDER)
            for span, chord in zip(self.spans, self.chord, strict=True)
        )
        return noise, rate

    def halves(self) -> Iterator[Cell]:
        """Both sides of the middle of the coordinate that costs more."""
        noise, rate = self.costs
        values = np.log(self.sigmas if noise >= rate else self.rates)
        low = values <= (values.min() + values.max()) / 2
        for part in (low, ~low):
            yield Cell(self.pair, self.sigmas[part], self.rates[part], self.counts[part])

    def worst(self) -> tuple[Leaf, int]:
        """The least noise at the highest rate, for every release of the cell."""
        leaf = PoissonSubsampledGaussian(
            sampling_probability=float(self.rates.max()),
            noise_multiplier=float(self.sigmas.min()),
            pair=self.pair,
        )
        return leaf, int(self.counts.sum())

    def part(self, side: Kind) -> Part:
        """The laws on either side of the cell's releases, in one direction."""
        least, most = float(self.sigmas.min()), float(self.sigmas.max())
        low, high = float(self.rates.min()), float(self.rates.max())
        kind: Kind = "replace" if self.pair == "replace_one" else side
        above = NormalMixtureLaw(kind=kind, noise_multiplier=least, sampling_probability=high)
        below = NormalMixtureLaw(kind=kind, noise_multiplier=most, sampling_probability=low)
        count = int(self.counts.sum())
        by_noise, by_rate = self.chord
        ends = self._ends(_variation(self.sigmas) if by_noise else self.rates)
        if not (by_noise or by_rate) or ends is None:
            return above, below, count

        def at(law: NormalMixtureLaw, place: float) -> NormalMixtureLaw:
            if by_noise:
                return replace(law, noise_multiplier=_sigma_at(place))
            return replace(law, sampling_probability=place)

        def place_of(law: NormalMixtureLaw) -> float:
            if by_noise:
                return float(_variation(np.array(law.noise_multiplier)))
            return law.sampling_probability

        places = _variation(self.sigmas) if by_noise else self.rates
        first, second = (at(above, place) for place in ends[1:])
        lower, near = (at(below, place) for place in ends[:2])
        chances = (places - place_of(first)) / (place_of(second) - place_of(first))
        rest = self._mean(np.log1p(-chances * (1 + _ROUNDING)))
        chord = RevealedMixtureLaw(first=first, second=second, weight=1 - rest * (1 - _ROUNDING))
        shares = (places - place_of(near)) / (place_of(near) - place_of(lower))
        share = self._mean(np.log(shares)) * (1 - 2 * _ROUNDING)
        line = ExtrapolatedLaw(lower=lower, near=near, share=share)
        if kind == "replace" or line.least < 0:
            return chord, below, count
        return chord, line, count

    @staticmethod
    def _ends(places: Array) -> tuple[float, float, float] | None:
        """Where a line and a chord begin, and where the chord ends; None where they cannot."""
        low, high = float(places.min()), float(places.max())
        width = high - low
        near, far = low - _BEYOND * width, high + _BEYOND * width
        if far >= 1 or near - _STEP * width <= 0 or width < _NARROWEST * far:
            return None
        return near - _STEP * width, near, far

    def _mean(self, logarithms: Array) -> float:
        """The geometric mean over the releases."""
        return math.exp(float(self.counts @ logarithms) / float(self.counts.sum()))


def _cells(pairs: dict[SubsampledPair, list[tuple[float, float, int]]], most: int) -> list[Cell]:
    heap: list[tuple[float, int, Cell]] = []
    for pair, releases in pairs.items():
        cell = Cell(pair, *np.array(releases, dtype=np.float64).T)
        heapq.heappush(heap, (-max(cell.costs), len(heap), cell))
    number = len(heap)
    while len(heap) < most and heap and heap[0][0] < 0:
        _, _, widest = heapq.heappop(heap)
        for cell in widest.halves():
            number += 1
            heapq.heappush(heap, (-max(cell.costs), number, cell))
    return [cell for _, _, cell in sorted(heap, key=lambda entry: entry[1])]


def _variation(sigma: Array) -> Array:
    """The total variation of a Gaussian pair of noise multiplier σ."""
    return np.asarray(erf(math.sqrt(0.125) / sigma))


def _sigma_at(variation: float) -> float:
    """The noise multiplier whose Gaussian pair has about this total variation."""
    return math.sqrt(0.125) / float(erfinv(variation))


def _densest(lower: NormalMixtureLaw, near: NormalMixtureLaw) -> float:
    """At least the largest ratio of the loss's density under ``lower`` to that under ``near``."""
    mu, most = lower.mu, near.mu
    if mu < most:
        return most / mu * math.exp((most * most - mu * mu) / 8) * (1 + _ROUNDING)
    ratio = near.sampling_probability / lower.sampling_probability
    edges = np.linspace(-3 * mu * mu, 0.0, 257)
    left, right = edges[:-1], edges[1:]
    reach = np.log(1 / ratio + (1 - 1 / ratio) * np.exp(-left))
    rise = np.maximum(0.0, 1.5 + (2 * right + reach) / (2 * mu * mu))
    return ratio * math.exp(min(700.0, float((reach * rise).max()))) * (1 + _ROUNDING)
