"""Lots and noise from ChaCha20, and the guarded sampler of Opacus' loader.

Certificates require a cryptographic generator. PyTorch's is a Mersenne twister or Philox, whose
outputs are predictable, and Opacus' ``secure_mode`` needs a package that supports no current
PyTorch. A key from the operating system is used for the lots and for each release. It is never
stored; the run record has a commitment to it.

Normal numbers are Box-Muller transforms of 53-bit uniform ones, in float64. A record is in a lot
if 64 random bits are below ⌊q 2⁶⁴⌋, so the probability is at most q, and less by at most 2⁻⁶⁴.

The loader and a later ``BatchMemoryManager`` keep their sampler object, so the guard changes its
class to a subclass. It stores the sizes of lots that no release has used yet, and so detects a
release without a lot, or with more records than any lot. Loaders draw lots in the training
process, with or without worker processes, and may draw ahead.

>>> stream = Stream(bytes(32))
>>> stream.lot(10, Fraction(1))
[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
>>> stream.normal(3).shape
(3,)
>>> class Sampler:
...     num_samples, steps = 4, 2
...     def __iter__(self):
...         return iter([[0], [3]])
>>> sampler = Sampler()
>>> lots = guard_sampler(sampler, Fraction(1), stream=None)
>>> list(sampler), list(lots), type(sampler).__name__
([[0], [3]], [1, 1], 'Sampler')
>>> sampler = Sampler()
>>> lots = guard_sampler(sampler, Fraction(1), Stream())
>>> list(sampler)
[[0, 1, 2, 3], [0, 1, 2, 3]]
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

KEY_BYTES = 32
CHUNK = 1 << 20
"""Numbers drawn at once, to bound memory."""


class Stream:
    """A ChaCha20 key stream; use each key for one stream only."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(KEY_BYTES) if key is None else key
        self._encryptor = Cipher(ChaCha20(self._key, bytes(16)), mode=None).encryptor()

    @property
    def commitment(self) -> str:
        """A commitment: equal only for equal keys, and reveals nothing about the key."""
        return commitment_to(self._key)

    def bits(self, count: int) -> NDArray[np.uint64]:
        """(count,) words of 64 random bits."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), dtype="<u8")

    def lot(self, records: int, probability: Fraction) -> list[int]:
        """The records of one Poisson lot, in their order."""
        threshold = int(probability * 2**64)
        if threshold >= 2**64:
            return list(range(records))
        drawn: list[int] = []
        for start in range(0, records, CHUNK):
            words = self.bits(min(CHUNK, records - start))
            drawn += (start + np.flatnonzero(words < np.uint64(threshold))).tolist()
        return drawn

    def normal(self, count: int) -> NDArray[np.float64]:
        """(count,) independent standard normal numbers."""
        numbers = np.empty(count)
        for start in range(0, count, CHUNK):
            part = numbers[start : start + CHUNK]
            half = (part.size + 1) // 2
            uniform = ((self.bits(2 * half) >> np.uint64(11)) + 0.5) * 2.0**-53
            radius = np.sqrt(-2 * np.log(uniform[:half]))
            angle = 2 * np.pi * uniform[half:]
            part[:half] = radius * np.cos(angle)
            part[half:] = (radius * np.sin(angle))[: part.size - half]
        return numbers


def commitment_to(key: bytes) -> str:
    """A commitment to a secret key, for a run record."""
    return "sha256:" + hashlib.sha256(b"affidavit commitment " + key).hexdigest()


def gradient_rows(tensor: Any) -> int:
    """Number of per-record gradients that the next step sums, from one tensor of the optimiser."""
    samples = getattr(tensor, "grad_sample", None)
    if isinstance(samples, list):
        return sum(len(sample) for sample in samples)
    gradients = samples if samples is not None else getattr(tensor, "_norm_sample", None)
    return 0 if gradients is None else len(gradients)


def guard_sampler(sampler: Any, probability: Fraction, stream: Stream | None) -> deque[int]:
    """The sizes of lots that ``sampler`` drew, those of an abandoned epoch too.

    With ``stream`` they are drawn from it.
    """
    lots, kind = deque[int](), type(sampler)

    def drawn(self: Any) -> Iterator[list[int]]:
        if stream is None:
            for lot in kind.__iter__(self):
                lots.append(len(lot))
                yield lot
            return
        for _ in range(self.steps):
            lot = stream.lot(self.num_samples, probability)
            lots.append(len(lot))
            yield lot

    body = {"__iter__": drawn, "__module__": kind.__module__, "__doc__": kind.__doc__}
    sampler.__class__ = type(kind.__name__, (kind,), body)
    return lots
