"""CheckpointSchedule: how often to do again what only costs time, such as a checkpoint.

Every so many steps where the user says so; else as often as takes ``SHARE`` of the time: after
something that took a second, not before twenty have passed.

>>> often = CheckpointSchedule(every=3)
>>> [often.due(done) for done in range(1, 7)]
[False, False, True, False, False, True]
>>> CheckpointSchedule(every=None).due(1)
True
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

SHARE = 0.05
"""Of the time of a run."""


class CheckpointSchedule:
    """``due`` asks, ``timed`` surrounds the doing."""

    def __init__(self, every: int | None) -> None:
        self._every, self._cost, self._last = every, 0.0, monotonic()

    def due(self, done: int) -> bool:
        """Whether it is time again after ``done`` steps."""
        if self._every is not None:
            return done % self._every == 0
        return monotonic() - self._last >= self._cost / SHARE

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What takes the time."""
        begun = monotonic()
        yield
        self._last = monotonic()
        self._cost = self._last - begun
