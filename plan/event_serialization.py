"""Events as JSON data and back, so that what was accounted can be accounted again.

>>> event = Repeated(event=Gaussian(noise_multiplier=2.0), count=3)
>>> event_document(event)
{'kind': 'Repeated', 'event': {'kind': 'Gaussian', 'noise_multiplier': 2.0}, 'count': 3}
>>> event_from(event_document(event)) == event
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, assert_never

from affidavit.plan.events import (
    BallsInBinsGaussian,
    Composed,
    Event,
    Gaussian,
    Gram,
    Laplace,
    PoissonSubsampledGaussian,
    RandomAllocationGaussian,
    RepeatAndSelect,
    Repeated,
    TruncatedPoissonGaussian,
    WithoutReplacementGaussian,
)

_LEAVES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Gaussian,
        Laplace,
        PoissonSubsampledGaussian,
        WithoutReplacementGaussian,
        TruncatedPoissonGaussian,
        RandomAllocationGaussian,
    )
}


def event_document(event: Event) -> dict[str, Any]:
    """``event`` as JSON data; an infinite number is written as a string."""
    kind = type(event).__name__
    match event:
        case Repeated(event=inner, count=count):
            return {"kind": kind, "event": event_document(inner), "count": count}
        case Composed(events=events):
            return {"kind": kind, "events": [event_document(item) for item in events]}
        case RepeatAndSelect(event=inner, mean=mean, shape=shape):
            run = event_document(inner)
            return {"kind": kind, "event": run, "mean": mean, "shape": _written(shape)}
        case BallsInBinsGaussian(gram=gram, noise_multiplier=sigma):
            rows = [list(row) for row in gram.rows]
            return {"kind": kind, "gram": rows, "noise_multiplier": sigma}
        case (
            Gaussian()
            | Laplace()
            | PoissonSubsampledGaussian()
            | WithoutReplacementGaussian()
            | TruncatedPoissonGaussian()
            | RandomAllocationGaussian()
        ):
            values = {field.name: _written(getattr(event, field.name)) for field in fields(event)}
            return {"kind": kind, **values}
        case _:
            assert_never(event)


def event_from(document: Mapping[str, Any]) -> Event:
    """The event of ``event_document``; raises ``ValueError``, ``KeyError`` or ``TypeError``."""
    given = dict(document)
    kind = given.pop("kind")
    if kind == "Repeated":
        return Repeated(event=event_from(given["event"]), count=given["count"])
    if kind == "Composed":
        return Composed(events=tuple(event_from(item) for item in given["events"]))
    if kind == "RepeatAndSelect":
        return RepeatAndSelect(
            event=event_from(given["event"]), mean=given["mean"], shape=float(given["shape"])
        )
    if kind == "BallsInBinsGaussian":
        gram = Gram(tuple(tuple(row) for row in given["gram"]))
        return BallsInBinsGaussian(gram=gram, noise_multiplier=given["noise_multiplier"])
    if kind not in _LEAVES:
        raise ValueError(f"{kind!r} is no kind of event")
    found: Event = _LEAVES[kind](**{name: _read(value) for name, value in given.items()})
    return found


def _written(value: Any) -> Any:
    return "Infinity" if isinstance(value, float) and math.isinf(value) else value


def _read(value: Any) -> Any:
    return math.inf if value == "Infinity" else value
