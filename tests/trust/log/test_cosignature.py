"""Cosignatures against C2SP's tlog-cosignature byte by byte."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime

import pytest

from affidavit.trust import SigningKey
from affidavit.trust.log import (
    BadNote,
    WitnessKey,
    parse_note,
    sign_checkpoint,
)

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
    line = line_of(b"\x04", message(seconds), seconds)
    assert cosigned(NOTE + line, NAME, WITNESS) == AT


def test_only_a_cosignature_of_that_key_and_name_counts() -> None:
    seconds = int(AT.timestamp())
    good = line_of(b"\x04", message(seconds), seconds)
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
