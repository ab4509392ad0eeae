"""Cosignatures against C2SP's tlog-cosignature byte by byte, and witness requests."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime

import pytest

from affidavit.certificate.keys.key import SigningKey
from affidavit.certificate.log.cosignature import (
    MAX_HASHES,
    WitnessKey,
    cosign,
    read_addition,
)
from affidavit.certificate.log.note import BadNote, parse_note, sign_checkpoint

NAME = "witness.example.com"
AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
LOG, WITNESS = SigningKey.generate("log"), SigningKey.generate("witness")
NOTE = sign_checkpoint(LOG, origin="example.com/log", size=9, root_hash=bytes(32), at=AT)
TEXT = NOTE.partition("\n\n")[0] + "\n"


def cosigned(note: str, name: str, key: SigningKey) -> datetime | None:
    return WitnessKey.of(name, key).cosigned(parse_note(note))


def line_of(kind: bytes, said: str, seconds: int, name: str = NAME) -> str:
    """A signature line over ``said``, its key hash made with the algorithm byte ``kind``."""
    raw = WITNESS.public.key.public_bytes_raw()
    key_hash = hashlib.sha256(name.encode() + b"\n" + kind + raw).digest()[:4]
    signature = key_hash + seconds.to_bytes(8, "big") + WITNESS.sign(said.encode())
    return f"— {name} {base64.b64encode(signature).decode()}\n"


def message(seconds: int) -> str:
    return f"cosignature/v1\ntime {seconds}\n{TEXT}"


def test_a_cosignature_is_that_of_the_specification() -> None:
    seconds = int(AT.timestamp())
    line = cosign(NOTE, NAME, WITNESS, AT)
    assert line == line_of(b"\x04", message(seconds), seconds)
    assert cosigned(NOTE + line, NAME, WITNESS) == AT


def test_only_a_cosignature_of_that_key_and_name_counts() -> None:
    seconds = int(AT.timestamp())
    good = cosign(NOTE, NAME, WITNESS, AT)
    assert cosigned(NOTE, NAME, WITNESS) is None
    assert cosigned(NOTE + good, "another.example.com", WITNESS) is None
    assert cosigned(NOTE + good, NAME, LOG) is None
    # The hash of a log's own key, 0x01, is not a witness's.
    as_a_log = line_of(b"\x01", message(seconds), seconds)
    assert cosigned(NOTE + as_a_log, NAME, WITNESS) is None
    for false in (
        line_of(b"\x04", message(seconds + 1), seconds),
        line_of(b"\x04", TEXT, seconds),
        line_of(b"\x04", message(seconds).replace("\n9\n", "\n8\n"), seconds),
    ):
        with pytest.raises(BadNote, match="does not match"):
            cosigned(NOTE + false, NAME, WITNESS)


def request(first: str = "old 3", hashes: int = 0, note: str = NOTE) -> bytes:
    lines = [first, *[base64.b64encode(bytes([item]) * 32).decode() for item in range(hashes)]]
    return ("\n".join(lines) + "\n\n" + note).encode()


@pytest.mark.parametrize("hashes", [0, 1, MAX_HASHES])
def test_a_request_is_a_size_a_proof_and_a_checkpoint(hashes: int) -> None:
    result = read_addition(request(hashes=hashes))
    assert result.old == 3
    assert result.proof == tuple(bytes([item]) * 32 for item in range(hashes))
    assert (result.note, result.checkpoint.size) == (NOTE, 9)
    assert read_addition(request("old 9")).old == 9


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\xff" + request(), "not UTF-8"),
        (request("new 3"), "'old SIZE'"),
        (request("old 03"), "'old SIZE'"),
        (request("old -1"), "'old SIZE'"),
        (request("old"), "'old SIZE'"),
        (b"old 3", "'old SIZE'"),
        (b"old 3\n" + NOTE.partition("\n\n")[0].encode(), "'old SIZE'"),
        (request(hashes=MAX_HASHES + 1), "'old SIZE'"),
        (b"old 3\nAAAA\n\n" + NOTE.encode(), "invalid hash"),
        (request("old 10"), "exceeds"),
    ],
)
def test_what_is_no_request_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(BadNote, match=said):
        read_addition(raw)
