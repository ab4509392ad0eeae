"""Lots: the sampler of Opacus' loader, counted, and drawn from a cryptographic generator.

The sampler object stays the one that the loader, and a ``BatchMemoryManager`` made later, hold; it
changes its class to one derived from its own. ``drawn`` counts lots, so that a release for which
no lot was drawn, or several, is seen. Loaders draw lots in the process that trains, worker
processes or not.

>>> class Sampler:
...     num_samples, steps = 4, 2
...     def __iter__(self):
...         return iter([[0], [3]])
>>> sampler = Sampler()
>>> lots = guarded_lots(sampler, Fraction(1), stream=None)
>>> list(sampler), lots.drawn, type(sampler).__name__
([[0], [3]], 2, 'Sampler')
>>> sampler = Sampler()
>>> lots = guarded_lots(sampler, Fraction(1), Stream())
>>> list(sampler)
[[0, 1, 2, 3], [0, 1, 2, 3]]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from affidavit.gate.guard.randomness import Stream


@dataclass(slots=True)
class Lots:
    """How many lots the guarded sampler has drawn."""

    drawn: int = 0


def guarded_lots(sampler: Any, probability: Fraction, stream: Stream | None) -> Lots:
    """Count the lots of ``sampler`` from now on; with ``stream`` draw them from it."""
    lots, kind = Lots(), type(sampler)

    def drawn(self: Any) -> Iterator[list[int]]:
        if stream is None:
            for lot in kind.__iter__(self):
                lots.drawn += 1
                yield lot
            return
        for _ in range(self.steps):
            lots.drawn += 1
            yield stream.lot(self.num_samples, probability)

    body = {"__iter__": drawn, "__module__": kind.__module__, "__doc__": kind.__doc__}
    sampler.__class__ = type(kind.__name__, (kind,), body)
    return lots
