"""Checkpoints and cosignatures are exchanged with tlog-scales, an independent implementation."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest
from cryptography.exceptions import InvalidSignature
from tlog_scales.signing import PlainEd25519Signer, Vkey
from tlog_scales.tlog import Checkpoint

from affidavit.trust import SigningKey
from affidavit.trust.log import (
    NoteKey,
    WitnessKey,
    open_note,
    read_checkpoint,
    sign_checkpoint,
)
from tests.support.witness import cosign

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
ORIGIN, WITNESS = "example.com/log", "witness.example.com"


@dataclasses.dataclass(frozen=True)
class Extended(Checkpoint):  # type: ignore[misc]
    """A checkpoint with extension lines, which C2SP allows and theirs does not read."""

    extensions: tuple[str, ...] = ()

    def serialize_body(self) -> str:
        lines = [*super().serialize_body().splitlines(), *self.extensions]
        return "".join(f"{line}\n" for line in lines)


def as_theirs(note: str) -> Extended:
    head, _, signatures = note.partition("\n\n")
    lines = head.splitlines()
    plain = Checkpoint.from_text("\n".join(lines[:3]) + "\n\n" + signatures)
    return Extended(
        plain.origin, plain.size, plain.root_hash, plain.signatures, extensions=tuple(lines[3:])
    )


def test_theirs_verifies_our_checkpoint_and_our_cosignature() -> None:
    log, witness = SigningKey.generate("log"), SigningKey.generate("witness")
    note = sign_checkpoint(log, origin=ORIGIN, size=9, root_hash=bytes(range(32)), at=AT)
    theirs = as_theirs(note + cosign(note, WITNESS, witness, AT))
    of_log = Vkey.from_string(str(NoteKey(ORIGIN, log.public.key.public_bytes_raw())))
    of_witness = Vkey.from_string(str(WitnessKey.of(WITNESS, witness)))
    assert (theirs.size, theirs.root_hash) == (9, bytes(range(32)))
    for vkey in (of_log, of_witness):
        theirs.verify(vkey)
        assert vkey.key_id == Vkey(vkey.name, None, vkey.sig_type, vkey.pubkey).key_id
        with pytest.raises(InvalidSignature):
            dataclasses.replace(theirs, size=8).verify(vkey)
    (cosignature,) = (item for item in theirs.signatures if of_witness.match(item))
    verifier = of_witness.get_verifier()
    assert verifier.get_timestamp(cosignature.payload) == AT.timestamp()


def test_ours_reads_and_verifies_their_checkpoint() -> None:
    signer = PlainEd25519Signer(ORIGIN, bytes(range(32)))
    note = Checkpoint.make_signed(ORIGIN, 700, bytes(32), [signer]).serialize()
    key = NoteKey(signer.vkey.name, signer.vkey.pubkey)
    assert open_note(note, [key])[1] == [key]
    assert str(key) == signer.vkey.serialize()
    checkpoint = read_checkpoint(note)
    assert (checkpoint.origin, checkpoint.size, checkpoint.root_hash) == (ORIGIN, 700, bytes(32))
