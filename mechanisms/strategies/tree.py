"""Tree aggregation: noisy sums of dyadic ranges of steps, added up to prefix sums.

Node (l, i) holds steps i·2^l ... (i+1)·2^l - 1 and is released when they are complete, with noise
of its own; the sum of the first n steps adds up popcount(n) nodes. C has one row per node and one
column per step. sens² is Σ over nodes of (participations inside)², for the worst pattern. Prefix
sums are made of left children alone, so ``attained`` is the sum over these. With ``period`` a new
tree begins every ``period`` steps (restart); earlier trees count in full.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> round(Tree.of(steps=8).sensitivity(Participation.single()).value, 12)
2.0

``fixed_epoch`` is evaluated at every offset. For ``min_separation``, ``worst_pattern`` joins nodes
from the leaves up. F(m, s, e) is the largest sum of the nodes inside a range of steps with m
participations, none before s and none after e, and for two neighbours

    F(m, s, e) = max over m₁ + m₂ = m and over e₁ of F₁(m₁, s, e₁) + F₂(m₂, e₁ + b, e),

plus m² if one node holds both. Only steps (aM + jb) modulo the period matter, M the least power of
two above b. Beyond the work limit each level is bounded by itself. Source:
docs/theorems/correlated-noise.md, Theorem 6.

>>> worst_pattern(steps=24, period=24, participations=8, separation=3)
88

References: Dwork, Naor, Pitassi and Rothblum, STOC 2010; Chan, Shi and Song,
arXiv:1003.5439; Kairouz et al., arXiv:2103.00039, section 4 and appendix D (restarts).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.numerics import Array, padded
from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import MAX_WORK, Sensitivity, Unaffordable
from affidavit.mechanisms.strategies.strategy import (
    MAX_ERROR_STEPS,
    Errors,
    Strategy,
    Streaming,
    TooLarge,
)
from affidavit.mechanisms.strategies.workload import Workload

Numbers = NDArray[np.int64]

IMPOSSIBLE = -(1 << 40)
"""F of a combination that cannot occur."""
MAX_POSITIONS = 20_000
"""Steps of a tree that are considered for participations."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tree(Strategy):
    """Consecutive trees of ``period`` steps each; ``period = steps`` is one tree."""

    period: int

    @classmethod
    def of(cls, steps: int, *, period: int | None = None) -> Tree:
        """Return one tree over all steps, or a new one every ``period`` steps."""
        return cls(kind="tree", steps=steps, period=min(period or steps, steps))

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Return sens(C), from the nodes; raises ``Unaffordable``."""
        most, separation = participation.max_participations(self.steps), participation.separation
        if most == 1:
            return Sensitivity.of_square(float(self.period.bit_length()), 1)
        if participation.schema == "fixed_epoch":
            return Sensitivity.between(*self._in_order(most, separation), 1)
        bound = self._by_level(most, separation)
        try:
            released, seen = self._in_order(most, separation)
        except Unaffordable:
            first = np.zeros(self.steps)
            first[: most * separation : separation] = 1.0
            released, seen = 0, int(np.square(self.visible_sums(first)).sum())
        if released < bound:
            with suppress(Unaffordable):
                bound = worst_pattern(
                    steps=self.steps, period=self.period, participations=most, separation=separation
                )
        return Sensitivity.between(bound, seen, 1)

    @property
    def streaming(self) -> Streaming:
        """One buffer for the current node of every level."""
        return Streaming(
            form="tree",
            buffers=self.period.bit_length(),
            period=self.period,
            recurrence="w_t = e_t - e_{t-1}, e_t the summed noise of the nodes that make up the "
            "first t + 1 steps; a node's noise is drawn once, when the node is complete",
        )

    @property
    def is_nonnegative(self) -> bool:
        """Always true."""
        return True

    @property
    def bands(self) -> int:
        """T, because the root holds all steps; 1 for trees of one step."""
        return self.steps if self.period > 1 else 1

    @property
    def draws(self) -> int:
        """At most two nodes per step."""
        return 2 * self.steps

    def noise_columns(self, first: int, last: int) -> Array:
        """Return columns first..last-1 of N, one per node; shape (T, last - first)."""
        nodes = list(self._nodes())[first:last]
        result = np.zeros((self.steps, len(nodes)))
        for place, (begin, end, released, dropped) in enumerate(nodes):
            del begin, end
            if released < dropped:
                result[released, place] = 1.0
                if dropped < self.steps:
                    result[dropped, place] = -1.0
        return result

    def strategy_matrix(self) -> Array:
        """Return C, shape (nodes, T): row n is 1 on the steps of node n."""
        self._require_dense()
        nodes = list(self._nodes())
        result = np.zeros((len(nodes), self.steps))
        for place, (begin, end, _, _) in enumerate(nodes):
            result[place, begin:end] = 1.0
        return result

    def visible_matrix(self) -> Array:
        """Return the rows of C for the nodes in prefix sums, shape (T, T)."""
        seen = [released < dropped for _, _, released, dropped in self._nodes()]
        return np.asarray(self.strategy_matrix()[seen])

    def visible_sums(self, values: Array) -> Array:
        """Return the sums of ``values``, shape (T,), over the nodes that an observer sees.

        Zeros stand for nodes that no prefix sum uses.
        """
        return np.concatenate([sums.ravel() for sums in self._sums_by_level(values)])

    def spread_sums(self, sums: Array) -> Array:
        """Return for each step the total of ``sums``, one for each node, of the nodes it is in.

        Shape (T,). It multiplies by the transpose of ``visible_sums``.
        """
        trees = -(-self.steps // self.period)
        result, first = np.zeros((trees, self.period)), 0
        for level in range(self.period.bit_length()):
            size, nodes = 1 << level, self.period >> level
            shape = trees, -(-nodes // 2)
            part = sums[first : first + math.prod(shape)].reshape(shape) * self._is_complete(level)
            result[:, : nodes * size].reshape(trees, nodes, size)[:, ::2] += part[:, :, None]
            first += part.size
        return result.ravel()[: self.steps]

    def visible_squares(self) -> Array:
        """Return the visible nodes that hold each step, shape (T,)."""
        return self.spread_sums(np.ones_like(self.visible_sums(np.zeros(self.steps))))

    def _sums_by_level(self, values: Array) -> Iterator[Array]:
        """Yield the sums over the left children of each level, shape (trees, nodes)."""
        trees = -(-self.steps // self.period)
        by_tree = padded(values, trees * self.period).reshape(trees, self.period)
        for level in range(self.period.bit_length()):
            size, nodes = 1 << level, self.period >> level
            inside = by_tree[:, : nodes * size].reshape(trees, nodes, size)[:, ::2]
            yield inside.sum(axis=2) * self._is_complete(level)

    def _is_complete(self, level: int) -> NDArray[np.bool_]:
        """Return which left children of a level end within the run, shape (trees, nodes)."""
        trees, nodes = -(-self.steps // self.period), self.period >> level
        ends = (np.arange(0, nodes, 2) + 1) << level
        starts = np.arange(trees)[:, None] * self.period
        return np.asarray(starts + ends <= self.steps)

    def errors(self, workload: Workload) -> Errors:
        """Return the errors: popcount of the step for prefix sums, else those of the matrix.

        Raises ``TooLarge`` beyond ``MAX_ERROR_STEPS`` / 4 steps of another workload.
        """
        if workload.is_prefix_sum:
            done, inside = np.divmod(np.arange(1, self.steps + 1), self.period)
            variance = done * self.period.bit_count() + _popcount(inside)
            return Errors.of(np.sqrt(variance.astype(np.float64)))
        if self.steps > MAX_ERROR_STEPS // 4:
            raise TooLarge(f"errors over {self.steps} steps without Toeplitz structure")
        output = workload.apply(self.noise_columns(0, 2 * self.steps))
        return Errors.of(np.sqrt(np.einsum("ij,ij->i", output, output)))

    def _nodes(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the first step and the end of each node, and when it enters and leaves the sum."""
        for start in range(0, self.steps, self.period):
            length = min(self.period, self.steps - start)
            for level in range(length.bit_length()):
                size = 1 << level
                for place in range(length // size):
                    end = (place + 1) * size
                    # In the sum of n steps for n in [end, end + size), if it is a left child.
                    until = end + size if place % 2 == 0 else end
                    final = length == self.period and place % 2 == 0 and until > length
                    yield (
                        start + place * size,
                        start + end,
                        start + end - 1,
                        self.steps if final else start + until - 1,
                    )

    def _in_order(self, most: int, separation: int) -> tuple[int, int]:
        """Return the largest Σ counts² of steps o, o + b, ..., of all nodes and of those seen."""
        levels = self.period.bit_length()
        if self.steps * most * levels > MAX_WORK:
            raise Unaffordable(f"{most} participations in a tree of {self.steps} steps")
        offsets = np.arange(self.steps)
        total, seen = np.zeros((2, len(offsets)), dtype=np.int64)
        for level in range(levels):
            node, before = np.full(len(offsets), -1), np.zeros(len(offsets), dtype=np.int64)
            for turn in range(most):
                place = offsets + turn * separation
                here, index, complete = self._node_of(np.minimum(place, self.steps - 1), level)
                complete &= place < self.steps
                before = np.where(here == node, before + 1, 1)
                # The squares 1, 4, 9, ... grow by 2n - 1 with the n-th step in one node.
                grown = np.where(complete, 2 * before - 1, 0)
                total += grown
                seen += np.where(index % 2 == 0, grown, 0)
                node = here
        return int(np.max(total)), int(np.max(seen))

    def _node_of(
        self, steps: NDArray[np.int_], level: int
    ) -> tuple[NDArray[np.int_], NDArray[np.int_], NDArray[np.bool_]]:
        tree, inside = np.divmod(steps, self.period)
        length = np.minimum(self.period, self.steps - tree * self.period)
        index = inside >> level
        return (tree * self.period << 1) + index, index, (index + 1) << level <= length

    def _by_level(self, most: int, separation: int) -> int:
        """Return Σ over levels of the largest Σ counts² in the nodes of one level."""
        whole, rest = divmod(self.steps, self.period)
        total = 0
        for level in range(self.period.bit_length()):
            nodes = whole * (self.period >> level) + (rest >> level)
            inside = min(most, -(-(1 << level) // separation))
            full = min(nodes, most // inside)
            left = min(most - full * inside, inside) if full < nodes else 0
            total += full * inside**2 + left**2
        return total


def _popcount(numbers: NDArray[np.int_]) -> NDArray[np.int_]:
    result = np.zeros_like(numbers)
    while np.any(numbers):
        result += numbers & 1
        numbers = numbers >> 1
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeSums:
    """F of one range of ``length`` steps.

    ``values`` has shape (participations + 1, len(firsts), len(lasts)): F(m, s, e) for s up to
    ``firsts[i]`` and above ``firsts[i-1]``, and e from ``lasts[j]`` and below ``lasts[j+1]``.
    """

    length: int
    firsts: Numbers
    lasts: Numbers
    values: Numbers

    @classmethod
    def of_one(cls, length: int, positions: Numbers) -> RangeSums:
        """Return a complete node that has room for one participation, at one of ``positions``."""
        values = np.zeros(
            (2 if len(positions) else 1, len(positions), len(positions)), dtype=np.int64
        )
        if len(positions):
            values[1] = np.where(positions[:, None] <= positions, length.bit_length(), IMPOSSIBLE)
        return cls(length=length, firsts=positions, lasts=positions, values=values)

    @property
    def most(self) -> int:
        """The largest number of participations."""
        return len(self.values) - 1

    def at(self, firsts: Numbers, lasts: Numbers) -> Numbers:
        """Return F(m, s, e), shape (participations + 1, len(firsts), len(lasts))."""
        if not self.most:
            return np.zeros((1, len(firsts), len(lasts)), dtype=np.int64)
        rows = np.searchsorted(self.firsts, firsts, side="left")
        columns = np.searchsorted(self.lasts, lasts, side="right") - 1
        possible = (rows < len(self.firsts))[:, None] & (columns >= 0)
        inside = self.values[:, np.minimum(rows, len(self.firsts) - 1)[:, None], columns]
        result = np.where(possible, inside, IMPOSSIBLE)
        result[0] = 0
        return result


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The joins of one search, whose total work is limited."""

    participations: int
    separation: int
    work: list[int]

    def join(self, left: RangeSums, right: RangeSums, *, node: bool) -> RangeSums:
        """Return ``left`` followed by ``right``; ``node`` is true if one node holds both."""
        length = left.length + right.length
        most = min(
            self.participations,
            left.most + right.most,
            -(-length // self.separation),
        )
        firsts = np.concatenate([left.firsts, left.length + right.firsts])
        firsts = firsts[: 1 + np.searchsorted(firsts, self.separation - 1)]
        lasts = np.concatenate([left.lasts, left.length + right.lasts])
        lasts = lasts[max(0, np.searchsorted(lasts, length - self.separation, "right") - 1) :]
        size = len(firsts) * len(lasts) * len(left.lasts)
        # Each numpy call costs about as much as a thousand additions.
        self.work[0] += (left.most + 1) * (right.most + 1) * (size + 1_000) + 10_000
        if self.work[0] > MAX_WORK:
            raise Unaffordable(f"{self.participations} participations in a tree")
        values = np.full((most + 1, len(firsts), len(lasts)), IMPOSSIBLE, dtype=np.int64)
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
        return RangeSums(length=length, firsts=firsts, lasts=lasts, values=values)

    def node(self, start: int, length: int, positions: Numbers) -> RangeSums:
        """Return the complete node over ``length`` steps, a power of two, from ``start``."""
        low, high = np.searchsorted(positions, [start, start + length])
        if length <= self.separation or low == high:
            return RangeSums.of_one(length, positions[low:high] - start)
        half = length // 2
        return self.join(
            self.node(start, half, positions), self.node(start + half, half, positions), node=True
        )

    def tree(self, steps: int, positions: Numbers) -> RangeSums:
        """Return a tree stopped after ``steps``: its complete nodes, the largest first."""
        result, start = None, 0
        for level in reversed(range(steps.bit_length())):
            if steps >> level & 1:
                part = self.node(start, 1 << level, positions)
                result = part if result is None else self.join(result, part, node=False)
                start += 1 << level
        assert result is not None
        return result


def worst_pattern(*, steps: int, period: int, participations: int, separation: int) -> int:
    """Return the largest Σ over nodes of counts², for trees of ``period`` steps over ``steps``.

    Raises ``Unaffordable``.
    """
    search = _Search(participations=participations, separation=separation, work=[0])
    starts = np.arange(0, period, 1 << separation.bit_length())
    turns = separation * np.arange(participations)
    if len(starts) * participations > MAX_WORK // 10:
        raise Unaffordable(f"{participations} participations in a tree of {period} steps")
    positions = np.unique(np.add.outer(starts, turns) % period)
    if len(positions) > MAX_POSITIONS:
        raise Unaffordable(f"{participations} participations in a tree of {period} steps")
    whole, rest = divmod(steps, period)
    power, result = search.tree(period, positions), None
    while whole:
        if whole & 1:
            result = power if result is None else search.join(result, power, node=False)
        whole >>= 1
        if whole:
            power = search.join(power, power, node=False)
    assert result is not None
    if rest:
        last = search.tree(rest, positions[positions < rest])
        result = search.join(result, last, node=False)
    return int(np.max(result.values))
