"""The table of dominating pairs: which statement covers which release, and with what law.

``DOMINATING_PAIRS`` is data. The checker reads its laws from it, docs/theorems/checker.md shows
it, and a certificate names the rows that it rests on. A release without a row is refused.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction

from flint import arb, fmpz

from affidavit.accountants.checker.lattice import Unproved, at_precision
from affidavit.accountants.checker.measures import Mixture, Piece
from affidavit.plan import (
    Composed,
    Event,
    Gaussian,
    Leaf,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    RepeatAndSelect,
    Repeated,
    TruncatedPoissonGaussian,
    WithoutReplacementGaussian,
)

MOST_KINDS = 20
"""Different releases of one run; each costs a second at most."""
MOST_DRAWS = 300_000
"""Terms of a binomial probability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """P against Q on the places above ``above`` or below ``below``, in clip norms; the loss rises.

    N(m) is a normal around m clip norms; what a row's pairs do not hold is at a loss of zero.
    """

    over: str
    under: str
    above: str = ""
    below: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One statement: ``pairs`` dominate ``release`` where ``where`` and ``requires`` hold.

    ``also`` are the same with P and Q exchanged. With ``sides`` a run has two directions, and the
    other has all pairs exchanged. ``source`` is the page in docs/theorems.
    """

    release: str
    where: tuple[str, ...] = ()
    requires: str
    pairs: tuple[Pair, ...] = ()
    also: tuple[Pair, ...] = ()
    sides: bool
    source: str


_POISSON = "σ > 0, 0 < q < 1"
_CUT = "σ > 0, 0 < q < 1; u, w, p of the lot; r = 1-u-w"
_SAMPLED = Pair(over="r*(1-q) N(0) + r*q N(1)", under="r N(0)")
_DISPLACED = Pair(
    over="w*(1-p) N(-1) + u*(1-q) N(0) + (u*q+w*p) N(1)",
    under="(u*q+w) N(-1) + u*(1-q) N(0)",
    above="0",
)
_REPLACED = Pair(over="(1-q) N(0) + q N(2)", under="1 N(0)", above="1")
DOMINATING_PAIRS: dict[str, Row] = {
    "gaussian": Row(
        release="Gaussian",
        requires="σ > 0",
        pairs=(Pair(over="1 N(1)", under="1 N(0)"),),
        sides=False,
        source="correlated-noise",
    ),
    "poisson_add_remove": Row(
        release="PoissonSubsampledGaussian",
        where=("pair", "add_remove"),
        requires=_POISSON,
        pairs=(Pair(over="(1-q) N(0) + q N(1)", under="1 N(0)"),),
        sides=True,
        source="poisson-add-remove",
    ),
    "poisson_replace_one": Row(
        release="PoissonSubsampledGaussian",
        where=("pair", "replace_one"),
        requires=_POISSON,
        pairs=(Pair(over="(1-q) N(0) + q N(1)", under="(1-q) N(0) + q N(-1)"),),
        sides=False,
        source="poisson-replace-one",
    ),
    "without_replacement": Row(
        release="WithoutReplacementGaussian",
        requires="replace_one, σ > 0, q = B/N < 1",
        pairs=(_REPLACED,),
        also=(_REPLACED,),
        sides=False,
        source="without-replacement",
    ),
    "truncated_add_remove": Row(
        release="TruncatedPoissonGaussian",
        where=("neighbours", "add_remove"),
        requires=_CUT,
        pairs=(
            _SAMPLED,
            Pair(
                over="w*(1-q) N(-1) + u*(1-q) N(0) + (u+w)*q N(1)",
                under="w N(-1) + u N(0)",
            ),
        ),
        sides=True,
        source="truncated-poisson",
    ),
    "truncated_zero_out": Row(
        release="TruncatedPoissonGaussian",
        where=("neighbours", "zero_out"),
        requires=_CUT,
        pairs=(
            _SAMPLED,
            Pair(
                over="w*(1-p) N(-1) + u*(1-q) N(0) + (u*q+w*p) N(1)",
                under="w*(1-p) N(-1) + (u+w*p) N(0)",
                above="1/2",
            ),
            Pair(
                over="u*(1-q) N(0) + (u*q+w) N(1)",
                under="(u+w*p) N(0) + w*(1-p) N(1)",
                below="1/2",
            ),
        ),
        sides=True,
        source="truncated-poisson",
    ),
    "truncated_replace_one": Row(
        release="TruncatedPoissonGaussian",
        where=("neighbours", "replace_one"),
        requires=_CUT,
        pairs=(
            Pair(over="r*(1-q) N(0) + r*q N(1)", under="r*(1-q) N(0) + r*q N(-1)"),
            _DISPLACED,
        ),
        also=(_DISPLACED,),
        sides=False,
        source="truncated-poisson",
    ),
    "random_allocation": Row(
        release="RandomAllocationGaussian",
        requires="add_remove or zero_out, σ > 0; P = (1 - T/b) N(0) + 1/b Σ N(e_i), T = b or the "
        "bins released, against Q = N(0)",
        sides=True,
        source="random-allocation",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of one release in one direction: ``pieces``, or ``bins`` of an allocation.

    ``mu`` is a clip norm in standard deviations of the noise. A record is in one of the bins with
    probability ``share``, otherwise in none.
    """

    statement: str
    mu: arb
    pieces: tuple[Piece, ...] = ()
    bins: int = 0
    share: Fraction = Fraction(1)
    removed: bool = True


Direction = tuple[tuple[Law, int], ...]


def laws(event: Event) -> tuple[Direction, ...]:
    """The laws of ``event`` with their counts, for each direction of the adjacency.

    Plainly Gaussian releases are one, first. Raises ``Unproved`` with the code ``no_statement``
    for a release without a row.
    """
    at_precision()
    counts: Counter[Leaf] = Counter()
    _count(event, 1, counts)
    if len(counts) > MOST_KINDS:
        raise Unproved(
            "too_many_kinds",
            f"The run has {len(counts)} kinds of release; at most {MOST_KINDS} are proved.",
            "Use fewer phases.",
        )
    parts = sorted(((leaf, times) for leaf, times in counts.items() if times), key=repr)
    named = [(leaf, _row(leaf), times) for leaf, times in parts]
    directions = (True, False) if any(row.sides for _, (_, row), _ in named) else (True,)
    return tuple(
        (
            *_gaussian([(leaf, times) for leaf, times in parts if isinstance(leaf, Gaussian)]),
            *(
                (_law(leaf, name, row, removed), times)
                for leaf, (name, row), times in named
                if not isinstance(leaf, Gaussian)
            ),
        )
        for removed in directions
    )


def _row(leaf: Leaf) -> tuple[str, Row]:
    kind = type(leaf).__name__
    for name, row in DOMINATING_PAIRS.items():
        if row.release == kind and (not row.where or getattr(leaf, row.where[0]) == row.where[1]):
            return name, row
    raise _without_statement(kind)


def _gaussian(parts: list[tuple[Gaussian, int]]) -> Direction:
    """All plainly Gaussian releases as one: their μ² add up."""
    if not parts:
        return ()
    squares = sum((times / arb(leaf.noise_multiplier) ** 2 for leaf, times in parts), arb(0))
    pair = DOMINATING_PAIRS["gaussian"].pairs[0]
    return ((Law(statement="gaussian", mu=squares.sqrt(), pieces=(_piece(pair, {}),)), 1),)


def _law(leaf: Leaf, name: str, row: Row, removed: bool) -> Law:
    mu = 1 / arb(leaf.noise_multiplier)
    if isinstance(leaf, RandomAllocationGaussian):
        bins = leaf.released or leaf.bins
        share = Fraction(bins, leaf.bins)
        return Law(statement=name, mu=mu, bins=bins, share=share, removed=removed)
    weights = _weights(leaf)
    pieces = [_piece(pair, weights) for pair in row.pairs]
    if row.sides and not removed:
        pieces = [piece.reversed for piece in pieces]
    pieces += [_piece(pair, weights).reversed for pair in row.also]
    return Law(statement=name, mu=mu, pieces=tuple(pieces))


def _weights(leaf: Leaf) -> dict[str, arb]:
    """The letters of a row."""
    match leaf:
        case PoissonSubsampledGaussian(sampling_probability=q):
            return {"q": arb(q)}
        case WithoutReplacementGaussian(sample_size=sample, dataset_size=size):
            return {"q": arb(sample) / size}
        case TruncatedPoissonGaussian():
            return _of_a_lot(leaf)
        case _:
            raise _without_statement(type(leaf).__name__)


def _of_a_lot(leaf: TruncatedPoissonGaussian) -> dict[str, arb]:
    """u = P(M = L-1), w = P(M ≥ L), and p with w p = L/(n+1) P(Bin(n+1, q) > L), or q.

    M is binomial, of the n others.
    """
    q, size, lot = arb(leaf.sampling_probability), leaf.dataset_size, leaf.max_lot_size
    private = leaf.neighbours == "add_remove"
    others = size if private else size - 1
    u, (_, w) = binomial(others, q, lot - 1), binomial_tails(others, q, lot)
    r, _ = binomial_tails(others, q, lot - 1)
    p = q if private else binomial_tails(others + 1, q, lot + 1)[1] * lot / size / w
    return {"q": q, "u": u, "w": w, "p": p if w > 0 else q, "r": r}


def binomial(size: int, q: arb, count: int) -> arb:
    """A ball of the probability of ``count`` of ``size`` draws."""
    if not 0 <= count <= size:
        return arb(0)
    ways = [arb(n + 1).lgamma() for n in (size, count, size - count)]
    return (ways[0] - ways[1] - ways[2] + count * q.log() + (size - count) * (-q).log1p()).exp()


def binomial_tails(size: int, q: arb, least: int) -> tuple[arb, arb]:
    """Balls of the probabilities of fewer and of at least ``least`` of ``size`` draws.

    The terms of the smaller one are added. Where the ratio ρ < 1 of two terms in a row no longer
    rises, the rest is at most one term · ρ/(1-ρ). Raises ``Unproved`` for too many terms.
    """
    upwards = bool(arb(least) > size * q)
    if not 0 < least <= size:
        return (arb(0), arb(1)) if least <= 0 else (arb(1), arb(0))
    odds, count = q / (1 - q), least if upwards else least - 1
    term = binomial(size, q, count)
    total, smallest = term, term / fmpz(2) ** 200
    for _ in range(MOST_DRAWS):
        if upwards:
            ratio = arb(size - count) / (count + 1) * odds
            count += 1
        else:
            ratio = arb(count) / (size - count + 1) / odds
            count -= 1
        if ratio == 0 or (term < smallest and ratio < 1):
            rest = (term * ratio / (1 - ratio)).upper()
            total += arb(rest / 2, rest / 2)
            return (1 - total, total) if upwards else (total, 1 - total)
        term *= ratio
        total += term
    raise Unproved(
        "too_many_terms",
        "The probability of a cut lot has too many terms for the checker.",
        "Rest on the accountants.",
    )


_TERM = re.compile(r"(\S+) N\((-?\d)\)")


def _piece(pair: Pair, weights: dict[str, arb]) -> Piece:
    piece = Piece(over=_mixture(pair.over, weights), under=_mixture(pair.under, weights))
    if pair.above:
        piece = replace(piece, start=_place(pair.above))
    if pair.below:
        piece = replace(piece, stop=_place(pair.below))
    return piece


def _place(text: str) -> arb:
    place = Fraction(text)
    return arb(place.numerator) / place.denominator


def _mixture(text: str, weights: dict[str, arb]) -> Mixture:
    """The mixture that a row writes as a sum of WEIGHT N(MEAN)."""
    terms = [_TERM.fullmatch(term) for term in text.split(" + ")]
    return {
        int(term[2]): _value(ast.parse(term[1], mode="eval").body, weights)
        for term in terms
        if term is not None
    }


def _value(node: ast.expr, weights: dict[str, arb]) -> arb:
    match node:
        case ast.Name(id=name):
            return weights[name]
        case ast.Constant(value=int(number)):
            return arb(number)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, weights) + _value(right, weights)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left, weights) - _value(right, weights)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left, weights) * _value(right, weights)
        case _:
            raise ValueError(f"a weight has no {ast.dump(node)}")


def _count(event: Event, times: int, counts: Counter[Leaf]) -> None:
    match event:
        case Repeated(event=inner, count=count):
            _count(inner, times * count, counts)
        case Composed(events=events):
            for inner in events:
                _count(inner, times, counts)
        case RepeatAndSelect():
            raise _without_statement("RepeatAndSelect")
        case _:
            counts[event] += times


def _without_statement(name: str) -> Unproved:
    return Unproved(
        "no_statement",
        f"The checker has no statement about {name}.",
        "Rest on the accountants of the certificate, or use a release of docs/theorems/checker.md.",
    )
