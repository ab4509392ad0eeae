"""How long something takes, on a machine that may do other work meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def best_of_three(
    work: Callable[[], T], limit: float, clock: Callable[[], float]
) -> tuple[T, float]:
    """What ``work`` returns, and the fewest seconds of up to three tries.

    Other work on the machine makes the same work take longer; none makes it take less. Once it
    stays below ``limit`` it is not tried again.
    """
    took: list[float] = []
    while len(took) < 3 and min(took, default=limit) >= limit:
        begun = clock()
        found = work()
        took.append(clock() - begun)
    return found, min(took)
