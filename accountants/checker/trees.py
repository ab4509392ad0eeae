"""sens of trees of partial sums, an integer squared: docs/theorems/correlated-noise.md, Theorem 6.

Node i of level l holds the steps i·2^l to (i+1)·2^l - 1 of its tree, if all of them are run.
sens² is the largest Σ over nodes of (participations inside)².
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

from flint import arb

from affidavit.accountants.checker.sensitivity import Patterns, require_affordable

Reach = dict[tuple[int, int, int], int]
"""The most that the nodes inside a stretch add up to, by the number of participations in it and
the steps before the first and after the last of these, counted up to the separation."""


def tree_sensitivity(steps: int, period: int, patterns: Patterns) -> arb:
    """sens of trees of ``period`` steps one after the other; raises ``Unproved``."""
    most, apart = min(patterns.most, -(-steps // patterns.apart)), patterns.apart
    if most == 1:
        return arb(period.bit_length()).sqrt()
    require_affordable(steps * most * period.bit_length())
    if patterns.exactly:
        turns = (range(first, steps, apart)[:most] for first in range(steps))
        return arb(max(_squares(steps, period, turn) for turn in turns)).sqrt()
    return arb(_Search(steps, period, most, apart).worst()).sqrt()


def _squares(steps: int, period: int, places: Sequence[int]) -> int:
    counts: Counter[tuple[int, int, int]] = Counter()
    for place in places:
        tree, inside = divmod(place, period)
        length = min(period, steps - tree * period)
        for level in range(length.bit_length()):
            if ((inside >> level) + 1) << level <= length:
                counts[tree, level, inside >> level] += 1
    return sum(count * count for count in counts.values())


class _Search:
    """Joins neighbouring stretches, from nodes in which one participation fits upwards."""

    def __init__(self, steps: int, period: int, most: int, apart: int) -> None:
        self.steps, self.period, self.most, self.apart = steps, period, most, apart
        starts, turns = range(0, period, 1 << apart.bit_length()), range(most)
        require_affordable(len(starts) * most)
        self.places = sorted(
            {(start + turn * apart) % period for start in starts for turn in turns}
        )
        self.work = 0
        self.node = cache(self._node)

    def worst(self) -> int:
        """The largest sum of squares; raises ``Unproved``."""
        result, length = Reach(), 0
        for start in range(0, self.steps, self.period):
            rest, begin = min(self.period, self.steps - start), 0
            for level in reversed(range(rest.bit_length())):
                if rest >> level & 1:
                    size = 1 << level
                    node = self.node(size, self._inside(begin, size))
                    result = self._joined(result, length, node, size)
                    begin, length = begin + size, length + size
        return max(result.values())

    def _inside(self, start: int, size: int) -> tuple[int, ...]:
        return tuple(place - start for place in self.places if start <= place < start + size)

    def _node(self, size: int, places: tuple[int, ...]) -> Reach:
        """A complete node with its places, counted from its first step."""
        free, half = self.apart - 1, size // 2
        if size <= self.apart:
            one = {(1, min(at, free), min(size - 1 - at, free)): size.bit_length() for at in places}
            return self._best(one)
        first = tuple(at for at in places if at < half)
        second = tuple(at - half for at in places if at >= half)
        both = self._joined(self.node(half, first), half, self.node(half, second), half)
        return {key: value + key[0] ** 2 for key, value in both.items()}

    def _joined(self, left: Reach, before: int, right: Reach, after: int) -> Reach:
        free = self.apart - 1
        self.work += len(left) * len(right)
        require_affordable(self.work)
        result: Reach = {}
        for (m, first, last), value in left.items():
            key = (m, first, min(free, last + after))
            result[key] = max(value, result.get(key, 0))
        for (m, first, last), value in right.items():
            key = (m, min(free, first + before), last)
            result[key] = max(value, result.get(key, 0))
        for (m, first, end), value in left.items():
            for (n, start, last), more in right.items():
                if end + start >= free and m + n <= self.most:
                    key = (m + n, first, last)
                    result[key] = max(value + more, result.get(key, 0))
        return self._best(result)

    def _best(self, reach: Reach) -> Reach:
        """Without what another with as many participations is nowhere below."""
        result: Reach = {}
        by_value = sorted(reach.items(), key=lambda item: (item[1], item[0]), reverse=True)
        fronts: dict[int, list[tuple[int, int]]] = {}
        for (m, first, last), value in by_value:
            front = fronts.setdefault(m, [])
            if not any(a >= first and b >= last for a, b in front):
                front.append((first, last))
                result[m, first, last] = value
        return result
