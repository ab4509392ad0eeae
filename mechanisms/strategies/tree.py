"""Tree aggregation: noisy sums of dyadic stretches of steps, added up to prefix sums.

Node (l, i) holds steps i·2^l ... (i+1)·2^l - 1 and is released once they are complete, with
noise of its own; the sum of the first n steps is that of ⌊popcount n⌋ nodes. C has a row a
node and a column a step (it is not square), X_ij counts the nodes that hold both i and j,
and no entry is negative. One participation: sens² = ⌊log₂ T⌋ + 1, the nodes above step 0.

sens² is a whole number: Σ over nodes of (participations inside)², for the worst pattern. Prefix
sums are made of left children alone; ``attained`` is the sum over these, all that is seen.
``fixed_epoch`` is evaluated at every offset. For ``min_separation`` the worst pattern is found by
joining nodes from the leaves up (``Reach``). Where that is too much work, each level is bounded by
itself: at most k participations, at most ⌈2^l / b⌉ in one node, ⌊T / 2^l⌋ nodes, and a sum of
squares is largest when the nodes are filled one after the other.

With ``period`` a new tree is begun every so many steps (restart), and earlier trees count in
full.

>>> from affidavit.mechanisms.strategies.participation import Participation
>>> round(Tree.of(steps=8).sensitivity(Participation.single()).value, 12)
2.0

References: Dwork, Naor, Pitassi and Rothblum, STOC 2010; Chan, Shi and Song,
arXiv:1003.5439; Kairouz et al., arXiv:2103.00039, section 4 and appendix D (restarts).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.participation import Participation
from affidavit.mechanisms.strategies.sensitivity import MAX_WORK, Sensitivity, Unaffordable
from affidavit.mechanisms.strategies.strategy import (
    MAX_ERROR,
    Errors,
    Strategy,
    Streaming,
    TooLarge,
)
from affidavit.mechanisms.strategies.tree_sensitivity import worst_pattern
from affidavit.mechanisms.strategies.workload import Workload

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tree(Strategy):
    """Trees of ``period`` steps one after the other; ``period = steps`` is one tree."""

    period: int

    @classmethod
    def of(cls, steps: int, *, period: int | None = None) -> Tree:
        """One tree over all steps, or a new one every ``period`` steps."""
        return cls(kind="tree", steps=steps, period=min(period or steps, steps))

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """sens(C), from the nodes; raises ``Unaffordable``."""
        most, separation = participation.most(self.steps), participation.separation
        if most == 1:
            return Sensitivity.of_square(float(self.period.bit_length()), 1)
        if participation.schema == "fixed_epoch":
            return Sensitivity.between(*self._in_order(most, separation), 1)
        bound = self._by_level(most, separation)
        try:
            released, seen = self._in_order(most, separation)
        except Unaffordable:
            released, seen = 0, most
        if released < bound:
            with suppress(Unaffordable):
                bound = worst_pattern(
                    steps=self.steps, period=self.period, participations=most, separation=separation
                )
        return Sensitivity.between(bound, seen, 1)

    @property
    def streaming(self) -> Streaming:
        """The current node of every level."""
        return Streaming(
            form="tree",
            buffers=self.period.bit_length(),
            period=self.period,
            recurrence="w_t = e_t - e_{t-1}, e_t the summed noise of the nodes that make up the "
            "first t + 1 steps; a node's noise is drawn once, when the node is complete",
        )

    @property
    def is_nonnegative(self) -> bool:
        """Always."""
        return True

    @property
    def bands(self) -> int:
        """T: the root holds all steps."""
        return self.steps if self.period > 1 else 1

    @property
    def draws(self) -> int:
        """At most two nodes a step."""
        return 2 * self.steps

    def noise_columns(self, first: int, last: int) -> Array:
        """Columns first..last-1 of N; shape (T, last - first), one column a node."""
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
        """C, shape (nodes, T): row n is 1 on the steps that node n holds."""
        self._require_dense()
        nodes = list(self._nodes())
        result = np.zeros((len(nodes), self.steps))
        for place, (begin, end, _, _) in enumerate(nodes):
            result[place, begin:end] = 1.0
        return result

    def seen_matrix(self) -> Array:
        """The rows of C of the nodes that prefix sums are made of, shape (T, T)."""
        seen = [released < dropped for _, _, released, dropped in self._nodes()]
        return np.asarray(self.strategy_matrix()[seen])

    def errors(self, workload: Workload) -> Errors:
        """popcount of the step for prefix sums; otherwise as for any matrix.

        Raises ``TooLarge`` beyond ``MAX_ERROR`` / 4 steps of another workload.
        """
        if workload.is_prefix_sum:
            done, inside = np.divmod(np.arange(1, self.steps + 1), self.period)
            variance = done * self.period.bit_count() + _popcount(inside)
            return Errors(per_step=np.sqrt(variance.astype(np.float64)))
        if self.steps > MAX_ERROR // 4:
            raise TooLarge(f"errors over {self.steps} steps without Toeplitz structure")
        output = workload.apply(self.noise_columns(0, 2 * self.steps))
        return Errors(per_step=np.sqrt(np.einsum("ij,ij->i", output, output)))

    def _nodes(self) -> Iterator[tuple[int, int, int, int]]:
        """First step, end, and the steps from and until which the node is in the sum."""
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
        """The largest Σ counts² of steps o, o + b, ..., of all nodes and of those seen."""
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
        """Σ over levels of the most that Σ counts² can be in the nodes of one level."""
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
