"""How long something takes, on a machine that may do other work meanwhile."""

from __future__ import annotations

import math
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
    fewest = math.inf
    for _ in range(3):
        begun = clock()
        result = work()
        fewest = min(fewest, clock() - begun)
        if fewest < limit:
            break
    return result, fewest
