"""Waiting for what another process or thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    holds: Callable[[], object],
    seconds: float = 30.0,
    *,
    often: float = 0.02,
    said: Callable[[], object] = lambda: "it did not come about in time",
) -> None:
    """Return once ``holds()``, asked each ``often`` seconds; fail with ``said()`` else."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, said()
        time.sleep(often)
