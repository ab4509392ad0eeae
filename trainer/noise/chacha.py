"""Keys and their streams: ChaCha20 (RFC 8439), with one key a step.

Keystreams are made on the processor by OpenSSL, and copied to where they are used.

A stream is named by a 256-bit key, a step and a tensor: the 96-bit nonce is the tensor's
number (32 bits) and the step (64 bits), little endian, so that no two tensors of no two
steps ever share one. One key serves one purpose: the key of the noise is never that of the
sampler, and ``derived_key`` makes one from another.

>>> raw_words(bytes(32), step=0, tensor=0, count=2).numpy().tobytes().hex()
'76b8e0ada0f13d90'

The ratchet has one key a step, each made from the one before and none found from a later one:
K_(t+1) = H(K_t), with H a derived key (HKDF). Step t has the key K_t, from which what it draws
is derived by purpose: its noise, and its lot where lots are independent. A checkpoint holds
the next key alone, so that whoever reads it learns nothing of noise that was already drawn.
A run that goes on stirs fresh entropy in, so that no two runs from one checkpoint, or from
a copy of its folder, ever share a key.

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
from collections.abc import Callable
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
"""The block counter has 32 bits."""

ZEROS = memoryview(bytes(1 << 20))
"""What is encrypted to have the keystream itself."""


def nonce_of(step: int, tensor: int) -> bytes:
    """The nonce of one tensor at one step; both are part of the stream's name.

    Raises ``ValueError`` for a step above 64 bits or a tensor above 32.
    """
    if not (0 <= tensor < 1 << 32 and 0 <= step < 1 << 64):
        raise ValueError(f"{step=} and {tensor=} must fit in 64 and 32 bits")
    return struct.pack("<IQ", tensor, step)


def derived_key(key: bytes, purpose: str) -> bytes:
    """A key of its own for each purpose and phase, from which ``key`` cannot be found."""
    _require_key(key)
    return HKDFExpand(algorithm=SHA256(), length=KEY_BYTES, info=purpose.encode()).derive(key)


def raw_words(
    key: bytes, *, step: int, tensor: int, count: int, device: str = "cpu", block: int = 0
) -> Tensor:
    """``count`` words from the start of a block, their bits in an int32 tensor on ``device``.

    Raises ``ValueError`` for a key of another length, a step above 64 bits, a tensor above 32,
    and words past the end of the stream.

    Shape (count,).
    """
    _require_stream(key, step, tensor, count, block)
    out = torch.empty(count, dtype=torch.int32, device=device)
    write_words(out, key, step=step, tensor=tensor, block=block)
    return out


def write_words(out: Tensor, key: bytes, *, step: int, tensor: int, block: int = 0) -> None:
    """``raw_words`` into ``out`` of any shape, contiguous int32 anywhere, as many as it holds.

    Raises ``ValueError`` as ``raw_words`` does.
    """
    nonce = _require_stream(key, step, tensor, out.numel(), block)
    here = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=torch.int32)
    start = struct.pack("<I", block) + nonce
    cipher, into = Cipher(ChaCha20(key, start), mode=None).encryptor(), _memory_of(here)
    for first in range(0, len(into), len(ZEROS)):
        part = into[first : first + len(ZEROS)]
        cipher.update_into(ZEROS[: len(part)], part)
    if here is not out:
        out.copy_(here)


def _memory_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the processor, to be written to."""
    return values.view(-1).numpy().data.cast("B") if values.numel() else memoryview(b"")


def _require_stream(key: bytes, step: int, tensor: int, count: int, block: int) -> bytes:
    """The nonce of a stream that has the words."""
    _require_key(key)
    if not (count >= 0 and block >= 0 and WORDS_PER_BLOCK * block + count <= MAX_WORDS):
        raise ValueError(f"a stream has at most {MAX_WORDS} words, not {count} after {block=}")
    return nonce_of(step, tensor)


def _require_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")


Entropy = Callable[[int], bytes]
"""From a number of bytes to as many fresh ones; ``os.urandom`` but in tests."""


@dataclass(frozen=True, slots=True)
class Ratchet:
    """The key of one step."""

    key: bytes = field(repr=False)

    @classmethod
    def fresh(cls, entropy: Entropy = os.urandom) -> Ratchet:
        """The first key of a run."""
        return cls(entropy(KEY_BYTES))

    def next(self) -> Ratchet:
        """The key of the next step."""
        return Ratchet(derived_key(self.key, "affidavit next"))

    def stirred(self, entropy: Entropy = os.urandom) -> Ratchet:
        """A key that depends on this one and on fresh entropy."""
        fresh = hashlib.sha256(self.key + entropy(KEY_BYTES)).digest()
        return Ratchet(derived_key(fresh, "affidavit stirred"))

    def key_for(self, purpose: str) -> bytes:
        """This step's key for one purpose."""
        return derived_key(self.key, f"affidavit step {purpose}")

    @property
    def commitment(self) -> str:
        """The commitment to the key in a run record; equal only for equal keys."""
        stated = derived_key(self.key, "affidavit commitment")
        return "sha256:" + hashlib.sha256(stated).hexdigest()


def committed(secret: bytes, about: str, value: str) -> str:
    """A commitment to ``value``; whoever has ``secret`` can recompute it."""
    key = derived_key(secret, f"affidavit committed {about}")
    return "sha256:" + hashlib.sha256(key + value.encode()).hexdigest()
