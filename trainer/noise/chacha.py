"""Keys and their streams: ChaCha20 (RFC 8439), with one key per step.

OpenSSL computes keystreams on the CPU; they are copied to the device that uses them.

A stream is named by a 256-bit key, a step and a tensor. The 96-bit nonce is the tensor's
number (32 bits) and the step (64 bits), little endian, so that no two tensors of no two
steps share a nonce. A key serves one purpose: the noise never uses the sampler's key, and
``derived_key`` makes one from another.

>>> raw_words(bytes(32), step=0, tensor=0, count=2).numpy().tobytes().hex()
'76b8e0ada0f13d90'

The ratchet has one key per step, each derived from the one before, so that none can be computed
from a later one: K_(t+1) = H(K_t), where H derives a key (HKDF). All draws of step t use keys that
are derived from K_t by purpose: its noise, and its lot if lots are independent. A checkpoint holds
only the next key, so a reader learns nothing about noise that was already drawn. A resumed run
mixes in fresh entropy, so that no two runs from one checkpoint, or from a copy of its folder, share
a key.

>>> ratchet = Ratchet(bytes(32))
>>> ratchet.next().key == derived_key(bytes(32), "affidavit next")
True
>>> len({Ratchet.fresh().commitment for _ in range(3)})
3

References: RFC 8439, sections 2.3 and 2.4; RFC 5869, section 2.3 (HKDF, derived keys).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from torch import Tensor

KEY_BYTES = 32
WORDS_PER_BLOCK = 16
MAX_WORDS = WORDS_PER_BLOCK * (2**32 - 1)
"""Limit of a stream: the block counter has 32 bits."""

ZERO_BYTES = memoryview(bytes(1 << 20))
"""Encrypting zeros gives the keystream."""


def build_nonce(step: int, tensor: int) -> bytes:
    """Return the nonce of one tensor at one step.

    Raises ``ValueError`` for a step above 64 bits or a tensor number above 32 bits.
    """
    if not (0 <= tensor < 1 << 32 and 0 <= step < 1 << 64):
        raise ValueError(f"{step=} and {tensor=} must fit in 64 and 32 bits")
    return struct.pack("<IQ", tensor, step)


def derived_key(key: bytes, purpose: str) -> bytes:
    """Derive a key for one purpose, from which ``key`` cannot be computed."""
    _require_key(key)
    return HKDFExpand(algorithm=SHA256(), length=KEY_BYTES, info=purpose.encode()).derive(key)


def raw_words(
    key: bytes, *, step: int, tensor: int, count: int, device: str = "cpu", block: int = 0
) -> Tensor:
    """Return ``count`` words from the start of a block, as the bits of an int32 tensor, (count,).

    Raises ``ValueError`` for a key of another length, a step above 64 bits, a tensor number above
    32 bits, and words past the end of the stream.
    """
    return raw_words_of(key, step=step, spans=[(tensor, block, count)]).to(device)


def raw_words_of(key: bytes, *, step: int, spans: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the words of several streams of a step one after the other, as an int32 (words,).

    ``spans`` has the tensor, the first block and the number of words of each. Raises ``ValueError``
    like ``raw_words``.
    """
    starts = [_require_stream(key, step, tensor, count, block) for tensor, block, count in spans]
    words = torch.empty(sum(count for _, _, count in spans), dtype=torch.int32)
    if not len(words):
        return words
    memory, begin = words.numpy().data.cast("B"), 0
    encryptor = Cipher(ChaCha20(key, starts[0]), mode=None).encryptor()
    for start, (_, _, count) in zip(starts, spans, strict=True):
        encryptor.reset_nonce(start)
        end = begin + words.itemsize * count
        for first in range(begin, end, len(ZERO_BYTES)):
            part = memory[first : min(end, first + len(ZERO_BYTES))]
            encryptor.update_into(ZERO_BYTES[: len(part)], part)
        begin = end
    return words


def _require_stream(key: bytes, step: int, tensor: int, count: int, block: int) -> bytes:
    """Return the first block's number and the nonce of a stream that has the words."""
    _require_key(key)
    if not (count >= 0 and block >= 0 and WORDS_PER_BLOCK * block + count <= MAX_WORDS):
        raise ValueError(f"a stream has at most {MAX_WORDS} words, not {count} after {block=}")
    return struct.pack("<I", block) + build_nonce(step, tensor)


def _require_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")


Entropy = Callable[[int], bytes]
"""Returns the given number of fresh bytes; ``os.urandom`` except in tests."""


@dataclass(frozen=True, slots=True)
class Ratchet:
    """The key of one step."""

    key: bytes = field(repr=False)

    @classmethod
    def fresh(cls, entropy: Entropy = os.urandom) -> Ratchet:
        """Draw the first key of a run."""
        return cls(entropy(KEY_BYTES))

    def next(self) -> Ratchet:
        """Derive the key of the next step."""
        return Ratchet(derived_key(self.key, "affidavit next"))

    def reseeded(self, entropy: Entropy = os.urandom) -> Ratchet:
        """Derive a key from this one and fresh entropy."""
        fresh = hashlib.sha256(self.key + entropy(KEY_BYTES)).digest()
        return Ratchet(derived_key(fresh, "affidavit stirred"))

    def key_for(self, purpose: str) -> bytes:
        """Derive this step's key for one purpose."""
        return derived_key(self.key, f"affidavit step {purpose}")

    @property
    def commitment(self) -> str:
        """The commitment to the key in a run record, which only equal keys share."""
        value = derived_key(self.key, "affidavit commitment")
        return "sha256:" + hashlib.sha256(value).hexdigest()


def commitment_to(secret: bytes, about: str, value: str) -> str:
    """Return a commitment to ``value``, which can be recomputed with ``secret``."""
    key = derived_key(secret, f"affidavit committed {about}")
    return "sha256:" + hashlib.sha256(key + value.encode()).hexdigest()
