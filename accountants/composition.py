"""The releases of a composition with their counts.

Every accountant composes with ``leaves``. Counts are only multiplied here, equal leaves are merged,
and the result is sorted, so the order of releases cannot change a number.

>>> from affidavit.plan.events import Composed, Gaussian, Repeated
>>> step = Gaussian(noise_multiplier=2.0)
>>> leaves(Composed(events=(step, Repeated(event=step, count=4))))
((Gaussian(noise_multiplier=2.0), 5),)
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from affidavit.accountants.protocol import Unsupported
from affidavit.plan import events


def leaves(event: events.Event) -> tuple[tuple[events.Leaf, int], ...]:
    """Return the distinct leaves of ``event`` with their counts, in a fixed order.

    Raises ``Unsupported`` for a selection among repetitions. Accountants that bound selections use
    ``parts``.
    """
    result = []
    for part, count in parts(event):
        if isinstance(part, events.RepeatAndSelect):
            raise Unsupported(
                "this accountant has no bound for repeat-and-select.",
                "Use the selection or the rdp accountant.",
            )
        result.append((part, count))
    return tuple(result)


@lru_cache(maxsize=16)
def parts(event: events.Event) -> tuple[tuple[events.Leaf | events.RepeatAndSelect, int], ...]:
    """Return leaves like ``leaves``, with each selection and its repeated run as one part."""
    counts: Counter[events.Leaf | events.RepeatAndSelect] = Counter()
    _count(event, 1, counts)
    return tuple(sorted(((part, n) for part, n in counts.items() if n), key=repr))


def _count(
    event: events.Event, times: int, counts: Counter[events.Leaf | events.RepeatAndSelect]
) -> None:
    match event:
        case events.Repeated(event=inner, count=count):
            _count(inner, times * count, counts)
        case events.Composed(events=members):
            for inner in members:
                _count(inner, times, counts)
        case events.EitherBound(events=bounds):
            _count(bounds[0], times, counts)
        case (
            events.ChainOfNeighbours()
            | events.SampledColumns()
            | events.OverlappingColumns()
            | events.OverlappingBins()
            | events.FixedSizeRun()
        ):
            raise Unsupported(
                f"this accountant has no bound for {type(event).__name__}.",
                "Use the fourier accountant.",
            )
        case _:
            counts[event] += times
