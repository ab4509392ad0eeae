"""Keystreams are ChaCha20 (RFC 8439), and names of streams never share words."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from affidavit.trainer.noise.chacha import (
    MAX_WORDS,
    Ratchet,
    commitment_to,
    derived_key,
    raw_words,
)

COUNTING = bytes(range(32))
VECTORS = {
    "RFC 8439, 2.3.2": (
        COUNTING,
        "000000090000004a00000000",
        1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1 #1": (
        bytes(32),
        "00" * 12,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1 #2": (
        bytes(32),
        "00" * 12,
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "A.1 #3": (
        bytes(31) + b"\x01",
        "00" * 12,
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1 #4": (
        b"\x00\xff" + bytes(30),
        "00" * 12,
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "A.1 #5": (
        bytes(32),
        "00" * 11 + "02",
        0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}


def as_bytes(stream: Tensor) -> bytes:
    """UniformIntegers in little endian."""
    return struct.pack(f"<{len(stream)}i", *stream.tolist())


@pytest.mark.parametrize("name", VECTORS)
def test_is_the_published_keystream(name: str) -> None:
    key, nonce, block, expected = VECTORS[name]
    tensor, step = struct.unpack("<IQ", bytes.fromhex(nonce))
    stream = raw_words(key, step=step, tensor=tensor, count=16, block=block)
    assert as_bytes(stream).hex() == expected


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
def test_ends_with_the_last_block(count: int) -> None:
    last = 2**32 - 70
    long = raw_words(COUNTING, step=3, tensor=4, count=1008, block=last)
    assert torch.equal(raw_words(COUNTING, step=3, tensor=4, count=count, block=last), long[:count])


def test_a_stream_is_named_by_key_step_and_tensor() -> None:
    names = [
        (key, step, tensor)
        for key in (bytes(32), COUNTING)
        for step in (0, 1, 2**32, 2**63)
        for tensor in (0, 1, 2**31)
    ]
    seen = {
        tuple(raw_words(key, step=step, tensor=tensor, count=4).tolist())
        for key, step, tensor in names
    }
    assert len(seen) == len(names)


def test_longer_streams_begin_like_shorter_ones() -> None:
    long = raw_words(COUNTING, step=1, tensor=2, count=4000)
    assert torch.equal(raw_words(COUNTING, step=1, tensor=2, count=33), long[:33])
    assert torch.equal(raw_words(COUNTING, step=1, tensor=2, count=64, block=3), long[48:112])


def test_labels_of_keys_and_commitments_never_change() -> None:
    """Records and resumed runs of earlier versions depend on them."""
    commitment = commitment_to(bytes(32), "data", "sha256:00")
    assert commitment.startswith("sha256:5bde82af4e6b574f1968398c6e30976e")
    assert Ratchet(bytes(32)).reseeded(bytes).key.hex().startswith("63838a6e8853d7b2")


def test_derived_keys_differ_by_key_and_purpose() -> None:
    keys = {derived_key(key, why) for key in (bytes(32), COUNTING) for why in ("noise", "lots")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": bytes(31)}, "32 bytes, not 31"),
        ({"step": -1}, "step=-1 and"),
        ({"step": 2**64}, "must fit in 64 and 32 bits"),
        ({"tensor": 2**32}, "64 and 32 bits"),
        ({"count": -1}, "at most"),
        ({"count": MAX_WORDS + 1}, "at most"),
        ({"block": 2**32, "count": 1}, "at most"),
    ],
)
def test_what_is_no_stream_is_refused(changes: dict[str, object], message: str) -> None:
    provided = {"key": COUNTING, "step": 0, "tensor": 0, "count": 1, "block": 0, **changes}
    with pytest.raises(ValueError, match=message):
        raw_words(**provided)  # type: ignore[arg-type]
