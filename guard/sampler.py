"""Lots and noise from ChaCha20, and the guarded sampler of Opacus' loader.

Certificates require a cryptographic generator. PyTorch's generators (Mersenne twister, Philox) are
predictable, and Opacus' ``secure_mode`` needs a package that supports no current PyTorch. The lots
and each release have a key from the operating system. It is not stored; the run record has a
commitment to it.

Normal numbers are Box-Muller transforms of 53-bit uniform numbers, in float64. A record is in a lot
if 64 random bits are below ⌊q 2⁶⁴⌋, so its probability is at most q, and at least q - 2⁻⁶⁴.

The loader and a later ``BatchMemoryManager`` keep their sampler object, so the guard changes its
class to a subclass. The subclass stores the sizes of lots that no release has used yet, to detect a
release without a lot, or with more records than any lot. Loaders draw lots in the training process,
with or without worker processes, and may draw ahead.

>>> stream = KeyStream(bytes(32))
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
>>> lots = guard_sampler(sampler, Fraction(1), KeyStream())
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
CHUNK_NUMBERS = 1 << 20
"""Numbers drawn at once, to limit memory."""


class KeyStream:
    """A ChaCha20 key stream; use each key for one stream only."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(KEY_BYTES) if key is None else key
        self._encryptor = Cipher(ChaCha20(self._key, bytes(16)), mode=None).encryptor()

    @property
    def commitment(self) -> str:
        """A commitment to the key, which reveals nothing about it."""
        return compute_commitment(self._key)

    def bits(self, count: int) -> NDArray[np.uint64]:
        """Return (count,) words of 64 random bits."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), dtype="<u8")

    def lot(self, records: int, probability: Fraction) -> list[int]:
        """Draw one Poisson lot: the indices of its records, ascending."""
        threshold = int(probability * 2**64)
        if threshold >= 2**64:
            return list(range(records))
        lot: list[int] = []
        for start in range(0, records, CHUNK_NUMBERS):
            words = self.bits(min(CHUNK_NUMBERS, records - start))
            lot += (start + np.flatnonzero(words < np.uint64(threshold))).tolist()
        return lot

    def normal(self, count: int) -> NDArray[np.float64]:
        """Return (count,) independent standard normal numbers."""
        numbers = np.empty(count)
        for start in range(0, count, CHUNK_NUMBERS):
            part = numbers[start : start + CHUNK_NUMBERS]
            half = (part.size + 1) // 2
            uniform = ((self.bits(2 * half) >> np.uint64(11)) + 0.5) * 2.0**-53
            radius = np.sqrt(-2 * np.log(uniform[:half]))
            angle = 2 * np.pi * uniform[half:]
            part[:half] = radius * np.cos(angle)
            part[half:] = (radius * np.sin(angle))[: part.size - half]
        return numbers


def compute_commitment(key: bytes) -> str:
    """Return a commitment to a secret key, for a run record."""
    return "sha256:" + hashlib.sha256(b"affidavit commitment " + key).hexdigest()


def count_gradients(tensor: Any) -> int:
    """Count the per-record gradients that the next step sums, from one tensor of the optimiser."""
    samples = getattr(tensor, "grad_sample", None)
    if isinstance(samples, list):
        return sum(len(sample) for sample in samples)
    gradients = samples if samples is not None else getattr(tensor, "_norm_sample", None)
    return 0 if gradients is None else len(gradients)


def guard_sampler(sampler: Any, probability: Fraction, stream: KeyStream | None) -> deque[int]:
    """Return a queue of the sizes of the lots that ``sampler`` draws, in abandoned epochs too.

    The lots are drawn from ``stream``, if there is one.
    """
    lots, kind = deque[int](), type(sampler)

    def draw_lots(self: Any) -> Iterator[list[int]]:
        if stream is None:
            for lot in kind.__iter__(self):
                lots.append(len(lot))
                yield lot
            return
        for _ in range(self.steps):
            lot = stream.lot(self.num_samples, probability)
            lots.append(len(lot))
            yield lot

    body = {"__iter__": draw_lots, "__module__": kind.__module__, "__doc__": kind.__doc__}
    sampler.__class__ = type(kind.__name__, (kind,), body)
    return lots
