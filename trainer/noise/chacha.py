"""Keys and their streams: ChaCha20 (RFC 8439), with one key a step.

Keystreams are made on the processor by OpenSSL and on any device by torch.

A stream is named by a 256-bit key, a step and a tensor: the 96-bit nonce is the tensor's
number (32 bits) and the step (64 bits), little endian, so that no two tensors of no two
steps ever share one. Both implementations give the same words. One key serves one purpose:
the key of the noise is never that of the sampler, and ``derived_key`` makes one from another.

>>> words(bytes(32), step=0, tensor=0, count=2).tolist() == [
...     int.from_bytes(bytes.fromhex("76b8e0ad"), "little"),
...     int.from_bytes(bytes.fromhex("a0f13d90"), "little")]
True

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
MOST_WORDS = WORDS_PER_BLOCK * (2**32 - 1)
"""The block counter has 32 bits."""

ZEROS = memoryview(bytes(1 << 20))
"""What is encrypted to have the keystream itself."""

CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
ROUNDS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip


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


def words(key: bytes, *, step: int, tensor: int, count: int, device: str = "cpu") -> Tensor:
    """``count`` words of the keystream, as uint32 values in an int64 tensor. Shape (count,)."""
    raw = raw_words(key, step=step, tensor=tensor, count=count, device=device)
    return raw.long() & 0xFFFFFFFF


def raw_words(
    key: bytes, *, step: int, tensor: int, count: int, device: str = "cpu", block: int = 0
) -> Tensor:
    """``count`` words from the start of a block, their bits in an int32 tensor on ``device``.

    Raises ``ValueError`` for a key of another length, a step above 64 bits, a tensor above 32,
    and words past the end of the stream.

    Shape (count,).
    """
    nonce = _require_stream(key, step, tensor, count, block)
    if torch.device(device).type == "cpu":
        return by_openssl(key, nonce, count, block)
    return by_torch(key, nonce, count, device, block)


def write_words(out: Tensor, key: bytes, *, step: int, tensor: int, block: int = 0) -> None:
    """``raw_words`` into ``out`` of any shape, contiguous int32 anywhere, as many as it holds.

    Raises ``ValueError`` as ``raw_words`` does.
    """
    count = out.numel()
    nonce = _require_stream(key, step, tensor, count, block)
    if out.device.type == "cpu":
        _write_by_openssl(out, key, nonce, block)
    else:
        out.view(-1).copy_(by_torch(key, nonce, count, str(out.device), block))


def by_openssl(key: bytes, nonce: bytes, count: int, block: int = 0) -> Tensor:
    """The keystream from OpenSSL, in memory of the process. Shape (count,), int32."""
    result = torch.empty(count, dtype=torch.int32)
    _write_by_openssl(result, key, nonce, block)
    return result


def _write_by_openssl(out: Tensor, key: bytes, nonce: bytes, block: int) -> None:
    start = struct.pack("<I", block) + nonce
    cipher, into = Cipher(ChaCha20(key, start), mode=None).encryptor(), _memory_of(out)
    for first in range(0, len(into), len(ZEROS)):
        part = into[first : first + len(ZEROS)]
        cipher.update_into(ZEROS[: len(part)], part)


def _memory_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the processor, to be written to."""
    return values.view(-1).numpy().data.cast("B") if values.numel() else memoryview(b"")


def by_torch(key: bytes, nonce: bytes, count: int, device: str, block: int = 0) -> Tensor:
    """The keystream from 32-bit integer arithmetic that every device has. Shape (count,), int32."""
    blocks = -(-count // WORDS_PER_BLOCK)
    counter = torch.arange(block, block + blocks, dtype=torch.int64, device=device)
    fixed = (*CONSTANTS, *struct.unpack("<8I", key), 0, *struct.unpack("<3I", nonce))
    start = [torch.full_like(counter, value).to(torch.int32) for value in map(_signed, fixed)]
    start[12] = counter.to(torch.int32)
    state = [item.clone() for item in start]
    for _ in range(10):
        for places in ROUNDS:
            _quarter_round(state, *places)
    mixed = [one + other for one, other in zip(state, start, strict=True)]
    return torch.stack(mixed, 1).flatten()[:count]


def _require_stream(key: bytes, step: int, tensor: int, count: int, block: int) -> bytes:
    """The nonce of a stream that has the words."""
    _require_key(key)
    if not (count >= 0 and block >= 0 and WORDS_PER_BLOCK * block + count <= MOST_WORDS):
        raise ValueError(f"a stream has at most {MOST_WORDS} words, not {count} after {block=}")
    return nonce_of(step, tensor)


def _require_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _quarter_round(state: list[Tensor], a: int, b: int, c: int, d: int) -> None:
    for one, two, three, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[one] = state[one] + state[two]
        state[three] = _rotated(state[three] ^ state[one], bits)


def _rotated(value: Tensor, bits: int) -> Tensor:
    low = (value >> (32 - bits)) & ((1 << bits) - 1)
    return (value << bits) | low


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
