"""The exact sensitivity of trees of partial sums under a minimum separation.

sens² is the largest Σ over nodes of (participations inside the node)², over patterns of at most
k steps any two of which are at least b apart.

*Few places matter.* Move a participation one step to the left. What it shares with earlier ones
does not shrink, and within a tree earlier steps are in no fewer nodes, so that the sum falls only
where the step begins a tree, or begins a node that a later participation is in, which is larger
than b. So some worst pattern has each participation b after the one before it, or at a multiple
of M in its tree, where M is the least power of two above b: at (aM + jb) modulo the period.

*Joining.* F(m, s, e) is the most that the nodes inside a stretch of steps add up to with m
participations, none before s and none after e. Of two neighbours

    F(m, s, e) = max over m₁ + m₂ = m and over e₁ of F₁(m₁, s, e₁) + F₂(m₂, e₁ + b, e),

plus m² where one node holds both. Only the first b and the last b steps of a stretch can be cut
off by its neighbours.

>>> worst_pattern(steps=24, period=24, participations=8, separation=3)
88

References: Kairouz et al., arXiv:2103.00039, appendix D. TensorFlow Privacy's
``tree_aggregation_accountant`` computes the number of one tree by a recursion over all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.sensitivity import MAX_WORK, Unaffordable

Numbers = NDArray[np.int64]

NEVER = -(1 << 40)
"""The value of what cannot be."""
MAX_PLACES = 20_000
"""Places of a tree that are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """F of one stretch of ``length`` steps.

    ``values`` has shape (participations + 1, len(firsts), len(lasts)): F(m, s, e) for s up to
    ``firsts[i]`` and above ``firsts[i-1]``, and e from ``lasts[j]`` and below ``lasts[j+1]``.
    """

    length: int
    firsts: Numbers
    lasts: Numbers
    values: Numbers

    @classmethod
    def of_one(cls, length: int, places: Numbers) -> Reach:
        """A complete node in which at most one participation fits, at one of ``places``."""
        values = np.zeros((2 if len(places) else 1, len(places), len(places)), dtype=np.int64)
        if len(places):
            values[1] = np.where(places[:, None] <= places, length.bit_length(), NEVER)
        return cls(length=length, firsts=places, lasts=places, values=values)

    @property
    def most(self) -> int:
        """The most participations that fit."""
        return len(self.values) - 1

    def at(self, firsts: Numbers, lasts: Numbers) -> Numbers:
        """F(m, s, e) for every m, s and e; shape (participations + 1, len(firsts), len(lasts))."""
        if not self.most:
            return np.zeros((1, len(firsts), len(lasts)), dtype=np.int64)
        rows = np.searchsorted(self.firsts, firsts, side="left")
        columns = np.searchsorted(self.lasts, lasts, side="right") - 1
        possible = (rows < len(self.firsts))[:, None] & (columns >= 0)
        inside = self.values[:, np.minimum(rows, len(self.firsts) - 1)[:, None], columns]
        result = np.where(possible, inside, NEVER)
        result[0] = 0
        return result


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The joins of one search; the work that they take is counted and bounded."""

    participations: int
    separation: int
    work: list[int]

    def joined(self, left: Reach, right: Reach, *, node: bool) -> Reach:
        """``left`` followed by ``right``; ``node`` where one node holds both."""
        length = left.length + right.length
        most = min(self.participations, left.most + right.most, -(-length // self.separation))
        firsts = np.concatenate([left.firsts, left.length + right.firsts])
        firsts = firsts[: 1 + np.searchsorted(firsts, self.separation - 1)]
        lasts = np.concatenate([left.lasts, left.length + right.lasts])
        lasts = lasts[max(0, np.searchsorted(lasts, length - self.separation, "right") - 1) :]
        size = len(firsts) * len(lasts) * len(left.lasts)
        # Each numpy call costs about as much as a thousand additions.
        self.work[0] += (left.most + 1) * (right.most + 1) * (size + 1_000) + 10_000
        if self.work[0] > MAX_WORK:
            raise Unaffordable(f"{self.participations} participations in a tree")
        values = np.full((most + 1, len(firsts), len(lasts)), NEVER, dtype=np.int64)
        after = np.maximum(firsts - left.length, 0), lasts - left.length
        for alone in (left.at(firsts, lasts), right.at(*after)):
            count = min(len(alone), most + 1)
            np.maximum(values[:count], alone[:count], out=values[:count])
        before = left.at(firsts, left.lasts)
        turn = np.maximum(left.lasts + self.separation - left.length, 0)
        later = right.at(turn, after[1])
        for first in range(1, min(left.most, most) + 1):
            for second in range(1, min(right.most, most - first) + 1):
                both = before[first][:, :, None] + later[second]
                total = values[first + second]
                np.maximum(total, both.max(axis=1), out=total)
        if node:
            values += (np.arange(most + 1) ** 2)[:, None, None]
        return Reach(length=length, firsts=firsts, lasts=lasts, values=values)

    def node(self, start: int, length: int, places: Numbers) -> Reach:
        """The complete node over ``length`` steps from ``start``; a power of two."""
        low, high = np.searchsorted(places, [start, start + length])
        if length <= self.separation or low == high:
            return Reach.of_one(length, places[low:high] - start)
        half = length // 2
        return self.joined(
            self.node(start, half, places), self.node(start + half, half, places), node=True
        )

    def tree(self, steps: int, places: Numbers) -> Reach:
        """A tree that is stopped after ``steps``: complete nodes, the largest first."""
        result, start = None, 0
        for level in reversed(range(steps.bit_length())):
            if steps >> level & 1:
                part = self.node(start, 1 << level, places)
                result = part if result is None else self.joined(result, part, node=False)
                start += 1 << level
        assert result is not None
        return result


def worst_pattern(*, steps: int, period: int, participations: int, separation: int) -> int:
    """The largest Σ over nodes of counts² of trees of ``period`` steps over ``steps``.

    Raises ``Unaffordable``.
    """
    search = _Search(participations=participations, separation=separation, work=[0])
    starts = np.arange(0, period, 1 << separation.bit_length())
    turns = separation * np.arange(participations)
    if len(starts) * participations > MAX_WORK // 10:
        raise Unaffordable(f"{participations} participations in a tree of {period} steps")
    places = np.unique(np.add.outer(starts, turns) % period)
    if len(places) > MAX_PLACES:
        raise Unaffordable(f"{participations} participations in a tree of {period} steps")
    whole, rest = divmod(steps, period)
    power, result = search.tree(period, places), None
    while whole:
        if whole & 1:
            result = power if result is None else search.joined(result, power, node=False)
        whole >>= 1
        if whole:
            power = search.joined(power, power, node=False)
    assert result is not None
    if rest:
        last = search.tree(rest, places[places < rest])
        result = search.joined(result, last, node=False)
    return int(np.max(result.values))
