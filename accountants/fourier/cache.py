"""The cache that plans of a sweep share, and the ladders that make their parameters equal.

Plans that differ in their target or their clip norms have the same releases: the cache holds their
answers by releases, δ (or ε) and width. Plans that differ in δ and the number of steps have
releases of the same law. Their tilts, steps and cuts are rounded to ladders, powers of two and of
its roots, so that they share measures and transforms: a parameter that is a few per cent off
costs a bracket next to nothing.

A cached value follows from its key alone, so no answer depends on earlier requests. The least
recently used values are evicted. Threads may share a ``SharedCache``: while one reads or writes
it another computes for itself instead of waiting, so that a fork at any moment leaves no lock
to wait for.

>>> cache = SharedCache(10)
>>> cache.get(("key",), lambda: 1.0, lambda value: 1)
1.0
>>> cache.get(("key",), lambda: 9.0, lambda value: 1)
1.0
>>> down(0.3, 1), up(0.3, 1), nearest(1.04, 16)
(0.25, 0.5, 1.0442737824274138)

A rung stays where it is, whatever its logarithm is rounded to.

>>> down(2**0.75, 4) == up(2**0.75, 4) == 2**0.75
True
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

MAX_LAWS = 20_000
"""Laws of releases in the questions whose answers are kept, some ten megabytes."""
MAX_BYTES = 1 << 25
"""Of the measures and transforms that are kept."""
SMALL = 500
"""Bytes of what has no arrays, with its key."""


class SharedCache:
    """A bounded store: of all that is kept the sizes add up to at most ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[SharedCache], tuple[int]]:
        """A copy, in another process or not, begins empty."""
        return SharedCache, (self._most,)

    def __len__(self) -> int:
        """How many things are kept."""
        return len(self._kept)

    def get(self, key: Hashable, compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """What ``compute`` returns, as kept under ``key``, or computed if it is not.

        ``key`` has to say everything that it follows from. What ``compute`` raises is raised,
        and not kept.
        """
        result, there = self._find(key)
        if not there:
            result = compute()
            self._keep(key, result, size(result))
        return result  # type: ignore[no-any-return]

    def _find(self, key: Hashable) -> tuple[Any, bool]:
        if not self._lock.acquire(blocking=False):
            return None, False
        try:
            if key not in self._kept:
                return None, False
            self._kept.move_to_end(key)
            return self._kept[key][0], True
        finally:
            self._lock.release()

    def _keep(self, key: Hashable, found: Any, size: int) -> None:
        # One that is so large would drive out nearly all others.
        if size > self._most // 4 or not self._lock.acquire(blocking=False):
            return
        try:
            _, before = self._kept.pop(key, (found, 0))
            self._kept[key] = found, size
            self._size += size - before
            while self._size > self._most:
                _, (_, freed) = self._kept.popitem(last=False)
                self._size -= freed
        finally:
            self._lock.release()


_ROUNDED = 1e-9
"""More, of a rung, than rounding moves a logarithm."""


def down(value: float, rungs: float) -> float:
    """The highest rung not above ``value``, of so many an octave; raises ValueError unless > 0."""
    return float(2.0 ** (math.floor(rungs * math.log2(value) + _ROUNDED) / rungs))


def up(value: float, rungs: float) -> float:
    """The lowest rung not below ``value``, of so many an octave; raises ValueError unless > 0."""
    return float(2.0 ** (math.ceil(rungs * math.log2(value) - _ROUNDED) / rungs))


def nearest(value: float, rungs: float) -> float:
    """The rung nearest to ``value``, of so many an octave; raises ``ValueError`` unless > 0."""
    return float(2.0 ** (round(rungs * math.log2(value)) / rungs))
