"""The cache that plans of a sweep share, and the ladders that make their parameters equal.

Plans that differ in their target or their clip norms have the same releases: the cache holds their
answers by releases, δ (or ε) and width. Plans that differ in δ and the number of steps have
releases of the same law. Their tilts, steps and cuts are rounded to ladders of powers of two and
its roots, so that they share measures: a parameter that is a few per cent off costs a bracket next
to nothing.

A cached value follows from its key alone, so no answer depends on earlier requests. The least
recently used values are evicted. Threads may share a ``SharedCache``: while one reads or writes
it, another computes for itself instead of waiting, so that a fork never copies a lock that is
waited for.

>>> cache = SharedCache(10)
>>> cache.get(("key",), lambda: 1.0, lambda value: 1)
1.0
>>> cache.get(("key",), lambda: 9.0, lambda value: 1)
1.0
>>> down(0.3, 1), up(0.3, 1), nearest(1.04, 16)
(0.25, 0.5, 1.0442737824274138)

A rung is stable against the rounding of its logarithm.

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

MAX_CACHE_BYTES = 1 << 25
LAW_BYTES = 500
"""Bytes of the law of a release in a key."""
_RUNG_MARGIN = 1e-9
"""Relative margin that bounds the rounding of a logarithm, in rungs."""


class SharedCache:
    """A bounded store whose values' sizes add up to at most ``max_size`` (bytes)."""

    def __init__(self, max_size: int = MAX_CACHE_BYTES) -> None:
        self._max_size = max_size
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[SharedCache], tuple[int]]:
        """Copy the cache as an empty one, within a process and to another."""
        return SharedCache, (self._max_size,)

    def __len__(self) -> int:
        """Return the number of cached values."""
        return len(self._entries)

    def get(self, key: Hashable, compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return the value under ``key``, or call ``compute`` and cache its result.

        ``key`` has to include everything that the value follows from. Exceptions of ``compute``
        propagate and are not cached.
        """
        if self._lock.acquire(blocking=False):
            try:
                if key in self._entries:
                    self._entries.move_to_end(key)
                    return self._entries[key][0]  # type: ignore[no-any-return]
            finally:
                self._lock.release()
        value = compute()
        self._store(key, value, size(value))
        return value

    def _store(self, key: Hashable, value: Any, size: int) -> None:
        # A very large value would evict nearly all others.
        if size > self._max_size // 4 or not self._lock.acquire(blocking=False):
            return
        try:
            _, before = self._entries.pop(key, (value, 0))
            self._entries[key] = value, size
            self._size += size - before
            while self._size > self._max_size:
                _, (_, freed) = self._entries.popitem(last=False)
                self._size -= freed
        finally:
            self._lock.release()


def down(value: float, rungs: float) -> float:
    """Return the highest rung not above ``value``, of ``rungs`` per octave.

    Raises ``ValueError`` unless ``value`` is positive.
    """
    return float(2.0 ** (math.floor(rungs * math.log2(value) + _RUNG_MARGIN) / rungs))


def up(value: float, rungs: float) -> float:
    """Return the lowest rung not below ``value``; raises ``ValueError`` unless it is positive."""
    return float(2.0 ** (math.ceil(rungs * math.log2(value) - _RUNG_MARGIN) / rungs))


def nearest(value: float, rungs: float) -> float:
    """Return the rung nearest to ``value``; raises ``ValueError`` unless it is positive."""
    return float(2.0 ** (round(rungs * math.log2(value)) / rungs))
