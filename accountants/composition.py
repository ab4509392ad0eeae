"""The one walk over a composition.

Every accountant composes through ``leaves``: counts are multiplied here and nowhere
else, equal leaves are merged, and the result is sorted, so that the order of releases
cannot change a number.

>>> from affidavit.plan.events import Composed, Gaussian, Repeated
>>> step = Gaussian(noise_multiplier=2.0)
>>> leaves(Composed(events=(step, Repeated(event=step, count=4))))
((Gaussian(noise_multiplier=2.0), 5),)
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from affidavit.plan.events import (
    Composed,
    Event,
    Gaussian,
    Leaf,
    PoissonSubsampledGaussian,
    Repeated,
    WithoutReplacementGaussian,
)


def leaves(event: Event) -> tuple[tuple[Leaf, int], ...]:
    """The distinct leaves of ``event`` with how often each runs, in a fixed order."""
    counts: Counter[Leaf] = Counter()
    _count(event, 1, counts)
    return tuple(sorted(((leaf, n) for leaf, n in counts.items() if n), key=repr))


def _count(event: Event, times: int, counts: Counter[Leaf]) -> None:
    match event:
        case Gaussian() | PoissonSubsampledGaussian() | WithoutReplacementGaussian():
            counts[event] += times
        case Repeated(event=inner, count=count):
            _count(inner, times * count, counts)
        case Composed(events=events):
            for inner in events:
                _count(inner, times, counts)
        case _:
            assert_never(event)
