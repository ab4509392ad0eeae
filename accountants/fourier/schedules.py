"""Runs of very many kinds of release: noise or a sampling rate that changes every step.

Releases with similar noise multipliers and rates are bracketed together, by one law that dominates
them (above) and one that they dominate (below), each composed as often as there are releases.

* Along one coordinate the curve of a release is convex: in the rate q, and in the total variation
  x = erf(1 / (σ √8)) of its Gaussian pair. So it is at most the chord between two releases on
  either side, and at least the line through two below it. A chord is a coin that is revealed. The
  coins of all releases, whose chances differ, come up at most as often as coins of one chance, with
  the geometric mean of the chances to come down. For a line the inequality is reversed.
* Along the other coordinate, and for pairs for which convexity is not proved, the noise is rounded
  down and the rate up (above), or the other way round (below).

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
)
from affidavit.plan import events

MAX_KINDS, MAX_KINDS_INVERTED = 250, 2000
"""Kinds of release that are accounted one by one, with a lattice and without one."""
MAX_CELLS, MAX_CELLS_INVERTED = 64, 256
"""Cells in which more kinds are bracketed together, with a lattice and without one."""
_CHORD_COST, _ROUNDED_COST = 0.1, 1.0
"""Cost of a span of log noise or log rate, along a chord and if it is rounded."""
_ROUNDING = 1e-9
"""Relative margin by which a chance is moved to the safe side."""
_CHORD_MARGIN, _LINE_LENGTH = 0.3, 0.15
"""Distance of a chord's ends from a cell, and between the two points that define a line, in widths
of the cell. With a larger margin the coins' chances differ less, and the curve from its chord more.
"""
_MIN_RELATIVE_WIDTH = 1e-5
"""Relative width of a cell below which rounding would decide its chances."""
_MAX_CHORD_SPAN = 0.3
"""Span of a cell, in its coordinate's logarithm, beyond which no chord is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtrapolatedLaw:
    """The line through the curves of ``lower`` and ``near``, extended by ``share`` beyond ``near``.

    (1 + share) times the law of ``near`` less share times that of ``lower``, if no part of it is
    negative: a lower bound of the release at that place. For lower bounds only.
    """

    lower: NormalMixtureLaw
    near: NormalMixtureLaw
    share: float

    @property
    def max_loss(self) -> float:
        """The larger of both laws' (nats)."""
        return max(self.lower.max_loss, self.near.max_loss)

    @property
    def min_density(self) -> float:
        """The least ratio of the law to that of ``near``; unusable if negative."""
        return 1 + self.share - self.share * _max_density_ratio(self.lower, self.near)

    def atoms(self) -> Atoms:
        """Return about the law under P."""
        return self.near.atoms()

    def upper_quantile(self, probability: float) -> float:
        """Return a loss (nats) that P exceeds with about this small probability."""
        return self.near.upper_quantile(probability)

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """Return P(L >= l) and Q(L >= l); all have shape (n,)."""
        pairs = zip(self.near.tails(losses), self.lower.tails(losses), strict=True)
        p, q = ((1 + self.share) * near - self.share * lower for near, lower in pairs)
        return np.maximum(p, 0.0), np.maximum(q, 0.0)

    def cells(self, edges: Array) -> Cells:
        """Return the masses of both laws between ``edges`` (n,), at least as large as their errors.

        The two laws are cut at losses that differ by the edge error. The strip between them holds
        at most eight times the share of the cells beside it that its width is of theirs.
        """
        near, lower = self.near.cells(edges), self.lower.cells(edges)
        widths = np.diff(edges, prepend=edges[0] - 1.0, append=edges[-1] + 1.0)
        edge_error = np.maximum(near.edge_error, lower.edge_error)
        strip = 8.0 * edge_error / widths
        results, share = [], self.share
        for above, below in ((near.p, lower.p), (near.q, lower.q)):
            moved = strip * below
            if moved.any():
                moved[1:] += strip[1:] * below[:-1]
                moved[:-1] += strip[:-1] * below[1:]
            error = (1 + share) * above * (near.relative_error + 4.0 * UNIT_ROUNDOFF)
            error += share * (below * (lower.relative_error + 4.0 * UNIT_ROUNDOFF) + moved)
            mass = np.maximum((1 + share) * above - share * below, error)
            with np.errstate(divide="ignore", invalid="ignore"):
                results.append((mass, np.nan_to_num(error / mass)))
        (p, p_error), (q, q_error) = results
        return Cells(p=p, q=q, relative_error=np.maximum(p_error, q_error), edge_error=edge_error)


BracketedRelease = tuple[LossLaw, LossLaw, int]
"""A law that dominates a release, one that a pair of data sets attains, and their count."""


Releases = Sequence[tuple[events.Leaf | events.RepeatAndSelect, int]]


def merge_kinds(parts: Releases) -> Releases:
    """Return releases that dominate ``parts``, of at most about ``MAX_KINDS`` kinds."""
    rest, cells = group_kinds(parts)
    return [*rest, *(cell.worst() for cell in cells)]


def group_kinds(
    parts: Releases, max_kinds: int = MAX_KINDS, max_cells: int = MAX_CELLS
) -> tuple[Releases, list[Cell]]:
    """Return the releases to account for one by one, and cells of those to bracket together.

    There are cells only if there are more than ``max_kinds`` kinds of release.
    """
    if len(parts) <= max_kinds:
        return parts, []
    rest: list[tuple[events.Leaf | events.RepeatAndSelect, int]] = []
    precisions: list[float] = []
    pairs: dict[events.SubsampledPair, list[tuple[float, float, int]]] = {}
    for leaf, count in parts:
        match leaf:
            case events.Gaussian(noise_multiplier=sigma):
                precisions.append(count / sigma**2)
            case events.PoissonSubsampledGaussian(noise_multiplier=sigma, sampling_probability=q):
                pairs.setdefault(leaf.pair, []).append((sigma, q, count))
            case _:
                rest.append((leaf, count))
    if precisions:
        # Gaussian releases compose to one, whose μ² is the sum of theirs.
        total = math.fsum(precisions) * (1 + 1e-14)
        rest.append((events.Gaussian(noise_multiplier=1 / math.sqrt(total)), 1))
    return rest, _cells(pairs, max_cells)


@dataclass(frozen=True, slots=True)
class Cell:
    """Subsampled releases of one ``pair``; the arrays have shape (n,)."""

    pair: events.SubsampledPair
    sigmas: Array
    rates: Array
    counts: Array

    @property
    def spans(self) -> tuple[float, float]:
        """Logarithms of the largest over the least noise multiplier, and the same for the rate."""
        return (
            math.log(self.sigmas.max() / self.sigmas.min()),
            math.log(self.rates.max() / self.rates.min()),
        )

    @property
    def chord(self) -> tuple[bool, bool]:
        """Whether a chord is drawn along the noise, and whether along the rate."""
        noise, rate = self.spans
        if self.pair == "replace_one":
            return False, 0 < rate <= _MAX_CHORD_SPAN
        return (
            0 < noise <= _MAX_CHORD_SPAN and noise >= rate,
            0 < rate <= _MAX_CHORD_SPAN and rate > noise,
        )

    @property
    def costs(self) -> tuple[float, float]:
        """The approximate costs of both spans, relative to each other."""
        weight = float(self.counts @ (self.rates**2 * np.expm1(np.minimum(self.sigmas**-2, 30.0))))
        noise, rate = (
            weight * span * (_CHORD_COST if chord else _ROUNDED_COST)
            for span, chord in zip(self.spans, self.chord, strict=True)
        )
        return noise, rate

    def halves(self) -> Iterator[Cell]:
        """Split the cell at the middle of the coordinate that costs more."""
        noise, rate = self.costs
        values = np.log(self.sigmas if noise >= rate else self.rates)
        low = values <= (values.min() + values.max()) / 2
        for part in (low, ~low):
            yield Cell(self.pair, self.sigmas[part], self.rates[part], self.counts[part])

    def worst(self) -> tuple[events.Leaf, int]:
        """Return the least noise at the highest rate, with the count of all releases."""
        leaf = events.PoissonSubsampledGaussian(
            sampling_probability=float(self.rates.max()),
            noise_multiplier=float(self.sigmas.min()),
            pair=self.pair,
        )
        return leaf, int(self.counts.sum())

    def bracketed(self, side: Kind) -> BracketedRelease:
        """Return laws above and below the cell's releases, in one direction."""
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
        if kind == "replace" or line.min_density < 0:
            return chord, below, count
        return chord, line, count

    @staticmethod
    def _ends(places: Array) -> tuple[float, float, float] | None:
        """Return where a line and a chord begin, and where the chord ends; None if out of range."""
        low, high = float(places.min()), float(places.max())
        width = high - low
        near, far = low - _CHORD_MARGIN * width, high + _CHORD_MARGIN * width
        if far >= 1 or near - _LINE_LENGTH * width <= 0 or width < _MIN_RELATIVE_WIDTH * far:
            return None
        return near - _LINE_LENGTH * width, near, far

    def _mean(self, logarithms: Array) -> float:
        """Return the geometric mean over the releases."""
        return math.exp(float(self.counts @ logarithms) / float(self.counts.sum()))


def _cells(
    pairs: dict[events.SubsampledPair, list[tuple[float, float, int]]], max_cells: int
) -> list[Cell]:
    heap: list[tuple[float, int, Cell]] = []
    for pair, releases in pairs.items():
        cell = Cell(pair, *np.array(releases, dtype=np.float64).T)
        heapq.heappush(heap, (-max(cell.costs), len(heap), cell))
    number = len(heap)
    while len(heap) < max_cells and heap and heap[0][0] < 0:
        _, _, widest = heapq.heappop(heap)
        for cell in widest.halves():
            number += 1
            heapq.heappush(heap, (-max(cell.costs), number, cell))
    return [cell for _, _, cell in sorted(heap, key=lambda entry: entry[1])]


def _variation(sigma: Array) -> Array:
    """Return the total variation of a Gaussian pair of noise multiplier σ."""
    return np.asarray(erf(math.sqrt(0.125) / sigma))


def _sigma_at(variation: float) -> float:
    """Return the noise multiplier whose Gaussian pair has about this total variation."""
    return math.sqrt(0.125) / float(erfinv(variation))


def _max_density_ratio(lower: NormalMixtureLaw, near: NormalMixtureLaw) -> float:
    """Bound the ratio of the loss's density under ``lower`` to that under ``near``."""
    mu, most = lower.mu, near.mu
    if mu < most:
        return most / mu * math.exp((most * most - mu * mu) / 8) * (1 + _ROUNDING)
    ratio = near.sampling_probability / lower.sampling_probability
    edges = np.linspace(-3 * mu * mu, 0.0, 257)
    left, right = edges[:-1], edges[1:]
    reach = np.log(1 / ratio + (1 - 1 / ratio) * np.exp(-left))
    rise = np.maximum(0.0, 1.5 + (2 * right + reach) / (2 * mu * mu))
    return ratio * math.exp(min(700.0, float((reach * rise).max()))) * (1 + _ROUNDING)
