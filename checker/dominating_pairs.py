"""The laws of a run's releases, by the table of dominating pairs.

``DOMINATING_PAIRS`` is data (``dominating_pairs.toml``). The checker reads its laws from it,
docs/theorems/dominating-pairs.md shows it, and a certificate names the rows that it rests on. A
release without a row is refused.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.resources import files
from typing import Any, Literal

from flint import arb

from affidavit.checker.lattice import (
    Unproved,
    bad_witness,
    no_statement,
)
from affidavit.plan import events

MAX_KINDS = 100
"""Different releases of one run; each takes at most a second."""

Mixture = Mapping[int, arb]
"""Weights of normals with one standard deviation, by their means in clip norms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One statement: ``pairs`` dominate ``release`` where ``where`` and ``requires`` hold.

    A pair is P (``over``) against Q (``under``), each a sum of WEIGHT N(MEAN) with means in clip
    norms, N(K) with a random number K; a place lies ``above`` or ``below`` a number of clip norms,
    and the loss rises there. The rest of the mass has a loss of zero. ``orders``: a run has a
    second direction in which all pairs are exchanged ("either order"), or those with a place are
    also exchanged in the same direction ("both"), or neither ("symmetric"). ``source`` is the page
    in docs/theorems. A ``hidden`` row needs a ``Cover``. Pairs of an allocation may hold for some
    ``values`` alone of the ratio of P less e^ε times that of Q, "positive" or "negative" ones.
    """

    release: str
    requires: str
    orders: Literal["either order", "both", "symmetric"]
    source: str
    where: Mapping[str, str] = field(default_factory=dict)
    pairs: Sequence[Mapping[str, str]] = ()
    hidden: bool = False


DOMINATING_PAIRS: dict[str, Row] = {
    name: Row(**row)
    for name, row in tomllib.loads(
        files(__package__).joinpath("dominating_pairs.toml").read_text(encoding="utf-8")
    ).items()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cover:
    """A witness's choice of the lots that hide a cut; every number in (0, 1) is sound.

    ``spent`` and ``share`` are the used shares of lots of L - 2 and of L others, and ``crowded`` is
    the share of the hidden mass that is given up: θ, φ and ρ of docs/theorems/truncated-poisson.md.
    """

    spent: float
    share: float
    crowded: float

    def __post_init__(self) -> None:
        if not (0 < self.spent < 1 and 0 < self.share <= 1 and 0 < self.crowded < 1):
            raise bad_witness("a part of a cover is not between 0 and 1")


Covers = tuple[Cover | None, ...]
"""One for each leaf of ``coverable_leaves``, in its order, or empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The losses log P/Q of ``over`` and ``under`` between two places, where they rise.

    Places are in clip norms; without one the piece has no end on that side. With ``sign`` 1 or -1
    the piece is that of the positive or the negative values of a difference.
    """

    over: Mixture
    under: Mixture
    start: arb | None = None
    stop: arb | None = None
    sign: int = 0

    @property
    def reversed(self) -> Piece:
        """The losses of Q against P, on the mirrored line, where they rise."""
        over, under = ({-m: w for m, w in law.items()} for law in (self.under, self.over))
        start, stop = (None if x is None else -x for x in (self.stop, self.start))
        return Piece(over=over, under=under, start=start, stop=stop, sign=-self.sign)


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """The law of one release in one direction.

    ``mu`` is a clip norm in standard deviations of the noise. With ``bins`` the likelihood ratio is
    1 + ``share`` (S - 1), S the mean of ``bins`` ratios of ``pieces``, or the inverse of that if a
    record is added and not ``removed``. If the law has a ``reverse``, the pieces of the other order
    of the data sets, its curve is that of means of differences instead. The probability
    ``conceded`` adds to δ.
    """

    statement: str
    mu: arb
    pieces: tuple[Piece, ...]
    bins: int = 0
    share: Fraction = Fraction(1)
    removed: bool = True
    reverse: tuple[Piece, ...] = ()
    conceded: arb = field(default_factory=lambda: arb(0))


Direction = tuple[tuple[Law, int], ...]


def coverable_leaves(event: events.Event) -> list[events.Leaf]:
    """Return the kinds of release of ``event`` with a row for a cover, in the order of ``laws``."""
    return [leaf for leaf, _ in _parts(event) if _row(leaf, hidden=True) is not None]


def laws(event: events.Event, covers: Covers = ()) -> tuple[Direction, ...]:
    """Return the laws of ``event`` with their counts, for each direction of the adjacency.

    Unsampled Gaussian releases are combined into one, the first: their μ² add up. Raises
    ``Unproved`` with the code ``no_statement`` for a release without a row.
    """
    parts = _parts(event)
    of_leaf: dict[events.Leaf, Cover | None] = {}
    if covers:
        leaves = coverable_leaves(event)
        if len(covers) != len(leaves):
            raise bad_witness("its covers are for other releases")
        of_leaf = dict(zip(leaves, covers, strict=True))
    rows = []
    for leaf, _ in parts:
        name = _row(leaf, hidden=of_leaf.get(leaf) is not None)
        if name is None:
            raise no_statement(type(leaf).__name__)
        rows.append(name)
    sides = any(DOMINATING_PAIRS[name].orders == "either order" for name in rows)
    directions = []
    for removed in (True, False) if sides else (True,):
        direction, squares, gaussian = [], arb(0), None
        for name, (leaf, times) in zip(rows, parts, strict=True):
            law = _law(name, leaf, removed, of_leaf.get(leaf))
            if name == "gaussian":
                squares, gaussian = squares + times * law.mu**2, law
            else:
                direction.append((law, times))
        if gaussian is not None:
            joint = Law(statement="gaussian", mu=squares.sqrt(), pieces=gaussian.pieces)
            direction.insert(0, (joint, 1))
        directions.append(tuple(direction))
    return (*directions, *_smaller(parts, of_leaf))


def _smaller(
    parts: list[tuple[events.Leaf, int]], covers: dict[events.Leaf, Cover | None]
) -> tuple[Direction, ...]:
    """Return the directions of data sets too small for a cover under add_remove, cuts revealed."""
    halves: dict[events.Leaf, events.TruncatedPoissonGaussian] = {
        leaf: replace(leaf, dataset_size=leaf.dataset_size // 2)
        for leaf, cover in covers.items()
        if cover is not None
        and isinstance(leaf, events.TruncatedPoissonGaussian)
        and leaf.neighbours == "add_remove"
    }
    if not halves:
        return ()
    if len({half.dataset_size for half in halves.values()}) > 1:
        raise bad_witness("its covers are for data sets of more than one size")
    return laws(
        events.Composed(
            events=tuple(
                events.Repeated(event=halves.get(leaf, leaf), count=times) for leaf, times in parts
            )
        )
    )


def _parts(event: events.Event) -> list[tuple[events.Leaf, int]]:
    """Return each kind of release with its count, sorted."""
    counts: Counter[events.Leaf] = Counter()
    _count(event, 1, counts)
    if len(counts) > MAX_KINDS:
        raise Unproved(
            "too_many_kinds",
            f"The run has {len(counts)} kinds of release; at most {MAX_KINDS} are proved.",
            "Use fewer phases.",
        )
    return sorted(((leaf, times) for leaf, times in counts.items() if times), key=repr)


def _count(event: events.Event, times: int, counts: Counter[events.Leaf]) -> None:
    match event:
        case events.Repeated(event=inner, count=count):
            _count(inner, times * count, counts)
        case events.Composed(events=members):
            for inner in members:
                _count(inner, times, counts)
        case events.EitherBound():
            raise bad_witness("it does not say which of several bounds it is for")
        case (
            events.RepeatAndSelect()
            | events.ChainOfNeighbours()
            | events.SampledColumns()
            | events.OverlappingColumns()
            | events.OverlappingBins()
            | events.FixedSizeRun()
        ):
            raise no_statement(type(event).__name__)
        case _:
            counts[event] += times


def _row(leaf: events.Leaf, *, hidden: bool) -> str | None:
    kind = type(leaf).__name__
    for name, row in DOMINATING_PAIRS.items():
        if (row.release, row.hidden) == (kind, hidden) and all(
            getattr(leaf, key) == row.where[key] for key in row.where
        ):
            return name
    return None


def _law(name: str, leaf: Any, removed: bool, cover: Cover | None) -> Law:
    row, mu, weights = DOMINATING_PAIRS[name], 1 / arb(leaf.noise_multiplier), _weights(leaf)
    conceded = arb(0)
    if cover is not None:
        covered, conceded = _covered(leaf, weights, cover)
        weights |= covered
    elif isinstance(leaf, events.GaussianMixture):
        conceded = arb(leaf.conceded)
    pieces = [_piece(pair, weights, _numbers_drawn(leaf)) for pair in row.pairs]
    if isinstance(leaf, events.ReplacedAllocationGaussian):
        own, reverse = pieces, [piece.reversed for piece in pieces]
        if not removed and row.orders == "either order":
            own, reverse = reverse, own
        return Law(
            statement=name,
            mu=mu,
            pieces=(*own,),
            reverse=(*reverse,),
            bins=leaf.bins,
            share=Fraction(leaf.drawn),
        )
    if bins := getattr(leaf, "bins", 0):
        number = leaf.released or bins
        share = Fraction(number, bins)
        return Law(
            statement=name, mu=mu, pieces=(*pieces,), bins=number, share=share, removed=removed
        )
    if row.orders == "both":
        pieces += [piece.reversed for piece in pieces if piece.start is not None]
    elif row.orders == "either order" and not removed:
        pieces = [piece.reversed for piece in pieces]
    return Law(statement=name, mu=mu, pieces=(*pieces,), conceded=conceded)


def _weights(leaf: Any) -> dict[str, arb]:
    """Return the letters of a row.

    Of M others drawn, r = P(M < L-1), u = P(M = L-1), w = P(M ≥ L); p, the probability that the
    record is in a cut lot, has w p = L/(n+1) P(Bin(n+1, q) > L), or is q.
    """
    match type(leaf).__name__:
        case "PoissonSubsampledGaussian":
            return {"q": arb(leaf.sampling_probability)}
        case "WithoutReplacementGaussian":
            return {"q": arb(leaf.sample_size) / leaf.dataset_size}
        case "TruncatedPoissonGaussian":
            q, size, lot = arb(leaf.sampling_probability), leaf.dataset_size, leaf.max_lot_size
            others = size if leaf.neighbours == "add_remove" else size - 1
            w = at_least(lot, others, q)
            u = at_least(lot - 1, others, q) - w
            r = at_least(others - lot + 2, others, 1 - q)
            cut = others < size and lot <= others
            p = at_least(lot + 1, size, q) * lot / size / w if cut else q
            return {"q": q, "r": r, "u": u, "w": w, "p": p}
        case _:
            return {}


def _covered(
    leaf: events.TruncatedPoissonGaussian, weights: dict[str, arb], cover: Cover
) -> tuple[dict[str, arb], arb]:
    """Return the letters of a hidden row, with another r, and the probability that it concedes.

    v = P(M = L-2), t and f are the used shares of lots of L - 2 and of L others, c is the mass of
    L - 1 others that these replace, and l what is left of them. Raises ``Unproved`` if more is
    conceded than that.
    """
    q, u, w, p = (weights[name] for name in ("q", "u", "w", "p"))
    lot, sigma = leaf.max_lot_size, arb(leaf.noise_multiplier)
    private = leaf.neighbours == "add_remove"
    others = leaf.dataset_size - (0 if private else 1)
    v = at_least(lot - 2, others, q) - u - w
    left = (leaf.dataset_size // 2 if private else others) + 1 - lot
    if lot < 2 or left < 1 or not v > 0:
        raise bad_witness("no lots hide a cut")
    t, f, crowded = arb(cover.spent), arb(cover.share), arb(cover.crowded)
    fewer, more = t * v, f * w
    if not private:
        fewer, more = fewer * (1 - q), more * (1 - p)
    apart = more * (-1 / sigma**2).exp()
    c = 2 * (fewer * apart).sqrt() * (1 - crowded)
    likely = 2 * crowded * (fewer / apart).sqrt() * left
    beyond = sigma * likely.log() - 3 / (2 * sigma)
    conceded = (q * u + w * p) * (beyond / arb(2).sqrt()).erfc() / 2
    left_over = fewer + more - c
    if private:
        conceded /= 1 - q
    if not (conceded <= left_over and (c <= more or not private)):
        raise bad_witness("its cover hides or concedes more than it leaves")
    letters = {"r": weights["r"] - v, "v": v, "t": t, "f": f, "c": c, "l": left_over}
    return letters, conceded


def at_least(least: int, size: int, q: arb) -> arb:
    """Return P(Bin(``size``, q) ≥ ``least``) = I_q(least, size - least + 1)."""
    if not 0 < least <= size:
        return arb(0 if least > 0 else 1)
    return q.beta_lower(least, size - least + 1, 1)


def _numbers_drawn(leaf: Any) -> Mixture:
    """Return the law of K: a user's drawn records, or the units that a mixture moves."""
    if isinstance(leaf, events.GaussianMixture):
        # From the largest on, up to a total of one: the sum of weights is rounded.
        result, left = {}, 1 - arb(leaf.conceded)
        for k in reversed(range(1, len(leaf.weights))):
            result[k] = arb(leaf.weights[k]).min(left)
            left -= result[k]
        return {0: left, **result}
    if (records := getattr(leaf, "records", None)) is None:
        return {}
    q = arb(leaf.sampling_probability)
    return {k: math.comb(records, k) * q**k * (1 - q) ** (records - k) for k in range(records + 1)}


def _piece(pair: Mapping[str, str], weights: Mapping[str, arb], drawn: Mixture) -> Piece:
    over, under = (_mixture(pair[side], weights, drawn) for side in ("over", "under"))
    places = (Fraction(pair[side]) if side in pair else None for side in ("above", "below"))
    start, stop = (None if x is None else arb(x.numerator) / x.denominator for x in places)
    sign = {"positive": 1, "negative": -1}.get(pair.get("values", ""), 0)
    return Piece(over=over, under=under, start=start, stop=stop, sign=sign)


def _mixture(text: str, weights: Mapping[str, arb], drawn: Mixture) -> Mixture:
    """Return the mixture that a row states as a sum of WEIGHT N(MEAN); a weight is a product.

    N(K) is the mixture of normals at the numbers ``drawn``, and N(-K) its mirror image.
    """
    values = {"1": arb(1), **weights, **{f"(1-{name})": 1 - of for name, of in weights.items()}}
    mixture: dict[int, arb] = {}
    for term in text.split(" + "):
        weight, _, mean = term.removesuffix(")").partition(" N(")
        factor = math.prod((values[name] for name in weight.split("*")), start=arb(1))
        sign = -1 if mean == "-K" else 1
        for place, share in (drawn if mean in ("K", "-K") else {int(mean): arb(1)}).items():
            mixture[sign * place] = mixture.get(sign * place, arb(0)) + factor * share
    return mixture
