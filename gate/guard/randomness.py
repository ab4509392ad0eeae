"""Lots and noise from ChaCha20, for a loop whose own generator is a statistical one.

A certificate obliges to a cryptographic generator. PyTorch's is a Mersenne twister or Philox,
from whose outputs the others can be worked out, and the package that Opacus' ``secure_mode``
asks for is made for no current PyTorch. A key is drawn from the operating system for each
release and for the lots, and stands in no file; what a run record has is a commitment to it.

Normal numbers are Box and Muller's of 53-bit uniform ones, in float64. A record is in a lot if
64 random bits are below ⌊q 2⁶⁴⌋, so that the probability is at most q, and less by at most 2⁻⁶⁴.

>>> stream = Stream(bytes(32))
>>> stream.lot(10, Fraction(1))
[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
>>> stream.normal(3).shape
(3,)
"""

from __future__ import annotations

import hashlib
import os
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

KEY_BYTES = 32
CHUNK = 1 << 20
"""Numbers that are drawn at once, so that memory does not grow with a tensor."""


class Stream:
    """One ChaCha20 key stream; a key has one stream only."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(KEY_BYTES) if key is None else key
        self._encryptor = Cipher(ChaCha20(self._key, bytes(16)), mode=None).encryptor()

    @property
    def commitment(self) -> str:
        """Equal for equal keys alone, and tells nothing of the key."""
        return "sha256:" + hashlib.sha256(b"affidavit commitment " + self._key).hexdigest()

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
        found = np.empty(count)
        for start in range(0, count, CHUNK):
            part = found[start : start + CHUNK]
            half = (part.size + 1) // 2
            uniform = ((self.bits(2 * half) >> np.uint64(11)) + 0.5) * 2.0**-53
            radius = np.sqrt(-2 * np.log(uniform[:half]))
            angle = 2 * np.pi * uniform[half:]
            part[:half] = radius * np.cos(angle)
            part[half:] = (radius * np.sin(angle))[: part.size - half]
        return found
