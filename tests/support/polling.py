"""Waiting for what another process or thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_SECONDS = 600.0
"""Seconds for what takes moments: a busy machine makes no test fail, and a hang ends."""


def wait_until(
    holds: Callable[[], object],
    seconds: float = TIMEOUT_SECONDS,
    *,
    often: float = 0.02,
    said: Callable[[], object] = lambda: "it did not come about in time",
) -> None:
    """Return once ``holds()``, asked each ``often`` seconds; fail with ``said()`` else."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, said()
        time.sleep(often)
