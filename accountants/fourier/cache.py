"""What an accountant keeps for the plans of a sweep, which ask for the same things again.

Plans that differ in their target, their clip norms or what is not accounted at all have the
same releases: their answers are kept by these, with δ (or ε) and the width. Plans that differ
in δ and the number of steps have releases of the same law, and the tilts, steps and cuts that
steer them stand on ladders (``ladders.py``): the measures and transforms are kept by these.

What is kept under a key follows from the key alone, so no answer depends on what was asked
before. What was used least recently is forgotten. Threads may share a ``Kept``: while one
reads or writes it another computes for itself instead of waiting, so that a fork at any
moment leaves no lock to wait for.

>>> kept = Kept(10)
>>> kept.get(("question",), lambda: 1.0, lambda found: 1)
1.0
>>> kept.get(("question",), lambda: 9.0, lambda found: 1)
1.0

Ladders: powers of two, and of its roots, that what steers is moved to.

A tilt, step or cut that is a few per cent off costs a bracket next to nothing, and two plans
whose own values are near to one another then ask for the same measures and transforms.

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

MOST_LAWS = 20_000
"""Laws of releases in the questions whose answers are kept, some ten megabytes."""
MOST_BYTES = 1 << 25
"""Of the measures and transforms that are kept."""
SMALL = 500
"""Bytes of what has no arrays, with its key."""


class Kept:
    """A bounded store: of all that is kept the sizes add up to at most ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Kept], tuple[int]]:
        """A copy, in another process or not, begins empty."""
        return Kept, (self._most,)

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
