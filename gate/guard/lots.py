"""Lots: the sampler of Opacus' loader, counted, and drawn from a cryptographic generator.

The sampler object stays the one that the loader, and a ``BatchMemoryManager`` made later, hold; it
changes its class to one derived from its own. The sizes of lots that no release has used yet are
kept: a release for which no lot was drawn, or with more records than any of them has, is seen.
Loaders draw lots in the process that trains, worker processes or not, and may draw ahead.

>>> class Sampler:
...     num_samples, steps = 4, 2
...     def __iter__(self):
...         return iter([[0], [3]])
>>> sampler = Sampler()
>>> lots = guarded_lots(sampler, Fraction(1), stream=None)
>>> list(sampler), list(lots.sizes), type(sampler).__name__
([[0], [3]], [1, 1], 'Sampler')
>>> sampler = Sampler()
>>> lots = guarded_lots(sampler, Fraction(1), Stream())
>>> list(sampler)
[[0, 1, 2, 3], [0, 1, 2, 3]]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from affidavit.gate.guard.randomness import Stream


@dataclass(slots=True)
class Lots:
    """The sizes of lots that were drawn and not used; those of an abandoned epoch stay."""

    sizes: deque[int] = field(default_factory=deque)


def rows_of(tensor: Any) -> int:
    """How many records' gradients the next step sums, by one tensor of an Opacus optimiser."""
    samples = getattr(tensor, "grad_sample", None)
    if isinstance(samples, list):
        return sum(len(sample) for sample in samples)
    found = samples if samples is not None else getattr(tensor, "_norm_sample", None)
    return 0 if found is None else len(found)


def guarded_lots(sampler: Any, probability: Fraction, stream: Stream | None) -> Lots:
    """Count the lots of ``sampler`` from now on; with ``stream`` draw them from it."""
    lots, kind = Lots(), type(sampler)

    def drawn(self: Any) -> Iterator[list[int]]:
        if stream is None:
            for lot in kind.__iter__(self):
                lots.sizes.append(len(lot))
                yield lot
            return
        for _ in range(self.steps):
            lot = stream.lot(self.num_samples, probability)
            lots.sizes.append(len(lot))
            yield lot

    body = {"__iter__": drawn, "__module__": kind.__module__, "__doc__": kind.__doc__}
    sampler.__class__ = type(kind.__name__, (kind,), body)
    return lots
