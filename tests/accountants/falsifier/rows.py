"""The curve that a row of the table of dominating pairs claims, read from the row's text.

The letters are those of docs/theorems/truncated-poisson.md, computed here once more, from the
definitions and not from identities. A row with a letter that is not here is refused.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.special import gammaln, ndtr

from tests.accountants.falsifier.hockey_sticks import Array, Line, between, line_excess

TABLE = Path(__file__).parents[3] / "checker/dominating_pairs.toml"
Row = Mapping[str, Any]
Direction = Literal["remove", "add"]


def table() -> dict[str, Row]:
    """The rows by their names."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Cover:
    """The choice of a hidden row: the shares θ, φ and ρ, all in (0, 1)."""

    spent: float
    share: float
    crowded: float


@dataclass(frozen=True)
class Case:
    """A release of a row: what its ``where`` says, and its numbers.

    ``size`` is N and ``lot`` B or the largest lot; ``weights`` is the law of K.
    """

    release: str
    sigma: float
    where: Mapping[str, str] = field(default_factory=dict)
    q: float = 0.0
    size: int = 0
    lot: int = 0
    weights: tuple[float, ...] = ()
    conceded: float = 0.0
    bins: int = 0
    released: int = 0
    cover: Cover | None = None

    @property
    def private_size(self) -> bool:
        return self.where.get("neighbours") == "add_remove"


def binomial(number: int, q: float) -> Array:
    """P(Bin(``number``, q) = k) for k = 0..``number``."""
    k = np.arange(number + 1)
    ways = gammaln(number + 1) - gammaln(k + 1) - gammaln(number - k + 1)
    return np.asarray(np.exp(ways + k * math.log(q) + (number - k) * math.log1p(-q)))


def letters(case: Case) -> dict[str, float]:
    """The letters of a row for ``case``, with those of its cover."""
    if case.release == "WithoutReplacementGaussian":
        return {"q": case.lot / case.size}
    if case.release != "TruncatedPoissonGaussian":
        return {"q": case.q}
    q, lot = case.q, case.lot
    others = case.size - (0 if case.private_size else 1)
    drawn = np.concatenate((binomial(others, q), np.zeros(lot + 1)))
    u, w = float(drawn[lot - 1]), float(drawn[lot:].sum())
    result = {"q": q, "u": u, "w": w}
    if not case.private_size:
        # A record that is drawn with M ≥ L others is one of L among M + 1.
        kept = lot / (np.arange(lot, len(drawn)) + 1)
        result["p"] = q * float(drawn[lot:] @ kept) / w if w else q
    if case.cover is None:
        return result | {"r": float(drawn[: lot - 1].sum())}
    t, f = case.cover.spent, case.cover.share
    v = float(drawn[lot - 2])
    absent = (1.0, 1.0) if case.private_size else (1 - q, 1 - result["p"])
    a, c_above = t * absent[0] * v, f * absent[1] * w * math.exp(-1 / case.sigma**2)
    c = 2 * (1 - case.cover.crowded) * math.sqrt(a * c_above)
    left_over = a + f * absent[1] * w - c
    return result | {
        "r": float(drawn[: lot - 2].sum()),
        **{"v": v, "t": t, "f": f, "c": c, "l": left_over},
    }


def conceded(case: Case) -> float:
    """η of a cover: the record's own mass in a full lot where some other is too likely."""
    assert case.cover is not None
    of = letters(case)
    others = case.size // 2 if case.private_size else case.size - 1
    absent = (1.0, 1.0) if case.private_size else (1 - case.q, 1 - of["p"])
    a = of["t"] * absent[0] * of["v"]
    c_above = of["f"] * absent[1] * of["w"] * math.exp(-1 / case.sigma**2)
    likely = 2 * case.cover.crowded * math.sqrt(a / c_above) * (others - case.lot + 1)
    own = (
        case.q * (of["u"] + of["w"]) if case.private_size else case.q * of["u"] + of["w"] * of["p"]
    )
    return own * float(ndtr(1.5 / case.sigma - case.sigma * math.log(likely)))


def is_cover(case: Case) -> bool:
    """Whether the theorem's side conditions on a cover hold."""
    others = case.size - (0 if case.private_size else 1)
    fewest = case.size // 2 if case.private_size else others
    if not 2 <= case.lot <= fewest:
        return False
    of = letters(case)
    given_up = conceded(case) / (1 - case.q if case.private_size else 1)
    hides_no_more = of["c"] <= of["f"] * of["w"] or not case.private_size
    return of["v"] > 0 and given_up <= of["l"] and hides_no_more


def claimed(row: Row, case: Case, direction: Direction, alphas: Array) -> Array:
    """The excess that ``row`` claims to dominate that of ``case`` at each α.

    What the pairs leave of a mass of one has a loss of zero. What is conceded has an infinite one.
    """
    if case.release == "ReplacedAllocationGaussian":
        return _replaced(row, case, direction, alphas)
    if case.bins:
        return _allocated(row, case, direction, alphas)
    claim = np.zeros(len(alphas))
    for over, under, start, stop in _pieces(row, case, direction):
        ends = np.array([start]), np.array([stop])
        lost = np.where(alphas < 1, alphas * (over.mass(*ends) - under.mass(*ends)), 0.0)
        claim += line_excess(over, under, alphas, start, stop) + lost
    return claim + _conceded_at(row, case, direction, alphas)


def _conceded_at(row: Row, case: Case, direction: Direction, alphas: Array) -> Array:
    """What the theorem concedes of the excess at each α."""
    if case.conceded:
        # A move that is conceded only adds to P, unless a replacement moves as far.
        none = direction == "add" and row["orders"] == "either order"
        return (0.0 if none else case.conceded) * np.minimum(alphas, 1.0)
    if not row.get("hidden"):
        return np.zeros(len(alphas))
    if not case.private_size:
        return conceded(case) * np.minimum(alphas, 1.0)
    if direction == "remove":
        return np.where(alphas > 1 - case.q, conceded(case), 0.0)
    return np.where(alphas < 1 / (1 - case.q), conceded(case) * alphas, 0.0)


Piece = tuple[Line, Line, float, float]


def _pieces(row: Row, case: Case, direction: Direction) -> list[Piece]:
    """P, Q and the places between which a pair holds, in standard deviations of the noise."""
    pieces: list[Piece] = []
    for pair in row["pairs"]:
        over, under = (_mixture(pair[side], case) for side in ("over", "under"))
        start = float(Fraction(pair["above"])) / case.sigma if "above" in pair else -np.inf
        stop = float(Fraction(pair["below"])) / case.sigma if "below" in pair else np.inf
        if row["orders"] == "either order" and direction == "add":
            over, under = under, over
        pieces.append((over, under, start, stop))
        if row["orders"] == "both" and "above" in pair:
            pieces.append((under.mirrored, over.mirrored, -stop, -start))
    return pieces


def _mixture(text: str, case: Case) -> Line:
    """A sum of WEIGHT N(MEAN), a weight a product of letters, 1 less a letter, and numbers."""
    values = letters(case)
    values |= {f"(1-{letter})": 1 - value for letter, value in values.items()}
    centres: list[float] = []
    weights: list[float] = []
    for term in text.split(" + "):
        found = re.fullmatch(r"(\S+) N\((-?)(K|\d+)\)", term)
        assert found, f"a term that no reader knows: {term}"
        weight, sign, mean = found.groups()
        factor = math.prod(_value(letter, values) for letter in weight.split("*"))
        for place, share in enumerate(_drawn(case)) if mean == "K" else [(int(mean), 1.0)]:
            centres.append((-place if sign else place) / case.sigma)
            weights.append(factor * share)
    return Line(np.array(centres), np.array(weights))


def _value(factor: str, values: Mapping[str, float]) -> float:
    if re.fullmatch(r"[\d.]+", factor):
        return float(factor)
    assert factor in values, f"a letter without a meaning in this file: {factor}"
    return values[factor]


def _drawn(case: Case) -> Array:
    """The law of K, without the moves that are conceded, which are the least."""
    above = np.cumsum(case.weights[::-1])[::-1]
    kept = np.minimum(above, 1 - case.conceded)
    return np.asarray(kept - np.append(kept[1:], 0.0))


def _allocated(row: Row, case: Case, direction: Direction, alphas: Array) -> Array:
    """The excess for the ratio 1 - T/b + (T/b) S, S a mean of T ratios of the row's pair.

    One ratio is integrated in closed form. The others are moved to the ends of small cells, each
    with its mean kept, which raises the mean of what is convex in them by next to nothing.
    """
    ((over, under, *_),) = _pieces(row, case, "remove")
    (centre,), (zero,) = over.centres, under.centres
    mu, number = abs(centre - zero), case.released or case.bins
    share = number / case.bins
    places = np.linspace(-10, 11, 3000 if number == 2 else 400)
    ends = np.concatenate(([-np.inf], places))
    ratios = np.exp(mu * ends - mu * mu / 2)
    masses, means = between(ends[:-1], ends[1:]), between(ends[:-1] - mu, ends[1:] - mu)
    higher = (means - ratios[:-1] * masses) / np.diff(ratios)
    chances = np.append(masses - higher, 0.0) + np.append(0.0, higher)
    sums, weight = np.zeros(1), np.ones(1)
    for _ in range(number - 1):
        sums = np.add.outer(sums, ratios).ravel()
        weight = np.outer(weight, chances).ravel()

    def call(level: float, sign: int) -> float:
        """E (±(ratio - level))₊ under the law of mass Q."""
        k = number * (level - 1 + share) / share - sums
        place = (np.log(np.maximum(k, 1e-300)) / mu + mu / 2) * sign
        value = sign * (ndtr(sign * mu - place) - k * ndtr(-place))
        trivial = 1 - k if sign > 0 else np.zeros(1)
        return float(weight @ np.where(k > 0, value, trivial)) * share / number

    exchanged = direction == "add" and row["orders"] == "either order"
    result = []
    for alpha in alphas:
        if exchanged:
            # ∫(Q - αP)₊ and ∫(αP - Q)₊, where P is the larger hypothesis.
            result.append(alpha * call(1 / alpha, -1 if alpha >= 1 else 1))
        else:
            result.append(call(alpha, 1 if alpha >= 1 else -1))
    return np.array(result)


Values = tuple[int, int, str]
"""Whose P - αQ over N(0) counts, by its means, and of which sign, if not of both."""


def _replaced(row: Row, case: Case, direction: Direction, alphas: Array) -> Array:
    """The excess of w ΣV + (1 - lw)(1 - α), or of that of the other order at 1/α."""
    own = [
        (*(int(re.fullmatch(r"1 N\((-?\d)\)", pair[side])[1]) for side in ("over", "under")),  # type: ignore[index]
         pair.get("values", ""))
        for pair in row["pairs"]
    ]  # fmt: skip
    other_sign = {"positive": "negative", "negative": "positive", "": ""}
    other = [(b, a, other_sign[sign]) for a, b, sign in own]
    if direction == "add" and row["orders"] == "either order":
        own, other = other, own
    return np.array(
        [
            _difference_mean(own, case, alpha)
            if alpha >= 1
            else alpha * _difference_mean(other, case, 1 / alpha)
            for alpha in alphas
        ]
    )


def _difference_mean(pairs: Sequence[Values], case: Case, alpha: float) -> float:
    """E (w ΣV + (1 - lw)(1 - α))₊ with V moved to the ends of small cells, its mean kept."""
    mu, drawn = 1 / case.sigma, 1.0
    places = np.linspace(-11, 13, 500 if case.bins < 3 else 80)
    if case.size:
        drawn = case.bins * case.lot / case.size
    atoms, chances = [np.zeros(1)], [np.zeros(1)]
    for a, b, sign in pairs:
        cuts = places
        if sign:
            zero = (math.log(alpha) / mu + (a * a - b * b) * mu / 2) / (a - b)
            cuts = np.sort(np.append(places, zero))
        ends = np.concatenate(([cuts[0] - 3], cuts, [cuts[-1] + 3]))
        values = np.exp(a * mu * ends - (a * mu) ** 2 / 2)
        values -= alpha * np.exp(b * mu * ends - (b * mu) ** 2 / 2)
        low, high = ends[:-1], ends[1:]
        mass, over, under = (between(low - m * mu, high - m * mu) for m in (0, a, b))
        middle = (values[:-1] + values[1:]) / 2
        sides = {"positive": middle > 0, "negative": middle < 0, "": middle == middle}
        counts = sides[sign]
        steps = np.diff(values)
        share = (over - alpha * under - values[:-1] * mass) / np.where(steps == 0, 1.0, steps)
        atoms += [values[:-1][counts], values[1:][counts]]
        chances += [(mass - share)[counts], share[counts]]
    v, p = np.concatenate(atoms), np.concatenate(chances)
    p[0] += max(0.0, 1 - p.sum())
    order = np.argsort(v)
    v, p = v[order], p[order]
    tails = np.cumsum(p[::-1])[::-1]
    # E (V - v)₊ at each atom, between which it is linear.
    calls = np.append(np.cumsum((np.diff(v) * tails[1:])[::-1])[::-1], 0.0)
    level = case.bins * (1 / drawn - 1) * (alpha - 1)
    sums, weight = np.zeros(1), np.ones(1)
    for _ in range(case.bins - 1):
        sums, weight = np.add.outer(sums, v).ravel(), np.outer(weight, p).ravel()
    needed = level - sums
    gains = np.interp(needed, v, calls) + np.maximum(v[0] - needed, 0.0)
    return drawn / case.bins * float(weight @ gains)
