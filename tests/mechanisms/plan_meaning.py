"""The meaning of a plan: what bounds its run, what a record attains of it, and what attacks it.

Releases are counted, and their order does not matter. Plans of one meaning have one bracket.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from affidavit.mechanisms.lowering import Lowered, lower
from affidavit.plan import (
    MalformedPlan,
    RefusedPlan,
    events,
    plan_from,
)

Document = dict[str, Any]
REFUSED = "refused"


def rounded(value: Any) -> Any:
    """``value`` with numbers of nine digits, as something that can be compared and counted."""
    match value:
        case dict():
            return tuple((name, rounded(item)) for name, item in sorted(value.items()))
        case list():
            return tuple(map(rounded, value))
        case float():
            return float(f"{value:.9g}")
    return value


def releases(event: events.Event, times: int = 1) -> Iterator[tuple[Any, int]]:
    """The releases of ``event`` with their counts."""
    match event:
        case events.Repeated(event=inner, count=count):
            yield from releases(inner, times * count)
        case events.Composed(events=members):
            for inner in members:
                yield from releases(inner, times)
        case events.ChainOfNeighbours(event=inner, links=links):
            yield (links, frozenset(map(counted, events.alternatives(inner)))), times
        case _:
            yield event, times


def counted(event: events.Event) -> frozenset[tuple[Any, Any]]:
    """The releases of ``event`` with their counts; Gaussian ones are one by their precision."""
    result: Counter[Any] = Counter()
    precision = 0.0
    for release, count in releases(event):
        if isinstance(release, events.Gaussian):
            precision += count / release.noise_multiplier**2
        else:
            is_chain = isinstance(release, tuple)
            result[release if is_chain else rounded(events.event_document(release))] += count
    return frozenset({**result, "precision": rounded(precision)}.items())


def meaning(document: Document) -> Any:
    """What a plan is lowered to, or ``REFUSED``."""
    try:
        return meaning_of(lower(plan_from(document)))
    except (RefusedPlan, MalformedPlan):
        return REFUSED


def meaning_of(lowered: Lowered) -> Any:
    bounds, attained = lowered.event(), lowered.attained()
    attacks: Counter[Any] = Counter()
    for phase in lowered.phases:
        if phase.attack is not None:
            epoch, number = phase.attack
            attacks[rounded(dataclasses.asdict(epoch))] += number
    return (
        frozenset(map(counted, events.alternatives(bounds))),
        frozenset(map(counted, events.alternatives(attained))),
        attacks,
    )
