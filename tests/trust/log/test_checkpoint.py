"""Checkpoints: C2SP's example, malformed ones, and signing with certificate keys."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

import pytest

from affidavit.trust import SigningKey
from affidavit.trust.dsse import PAYLOAD_TYPE, pre_authentication_encoding
from affidavit.trust.log import (
    BadNote,
    Checkpoint,
    NoteKey,
    merkle_tree,
    note_key,
    open_checkpoint,
    open_note,
    read_checkpoint,
    sign_checkpoint,
)
from affidavit.trust.log.note import BadCheckpoint, UnknownSigner

# C2SP, tlog-checkpoint.md.
EXAMPLE = """example.com/behind-the-sofa
20852163
CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=

— example.com/behind-the-sofa Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=
"""  # noqa: E501  # a signature line is one line
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
ROOT = base64.b64encode(bytes(32)).decode()
KEY = SigningKey.generate("test")


def signed(size: int = 7, origin: str = "example.com/log", key: SigningKey = KEY) -> str:
    return sign_checkpoint(key, origin=origin, size=size, root_hash=bytes(32), at=NOON)


def test_the_example_of_the_specification_is_read() -> None:
    result = read_checkpoint(EXAMPLE)
    assert (result.origin, result.size) == ("example.com/behind-the-sofa", 20852163)
    assert result.root_hash.hex().startswith("0ac5186a91863e8e")
    assert result.extensions == ()
    assert result.signed_at is None
    assert str(result) == EXAMPLE.partition("\n\n")[0] + "\n"


def test_what_is_signed_is_read_back() -> None:
    note = signed()
    text = f"example.com/log\n7\n{ROOT}\ntime 2026-11-21T12:00:00Z\n"
    assert note.startswith(text + "\n— example.com/log ")
    result, signers = open_checkpoint(note, [SigningKey.generate().public, KEY.public])
    assert result == read_checkpoint(note)
    assert result.signed_at == NOON
    assert signers == (KEY.public,)
    # Any reader of signed notes opens it with the verifier key.
    vkey = NoteKey.parse(str(note_key("example.com/log", KEY.public)))
    assert open_note(note, [vkey]) == (text, [vkey])


def test_times_are_in_utc_and_whole_seconds() -> None:
    at = NOON.replace(microsecond=999_999).astimezone(
        datetime.now(UTC).astimezone().tzinfo
    ) + timedelta(0)
    note = sign_checkpoint(KEY, origin="o", size=0, root_hash=merkle_tree.EMPTY_ROOT, at=at)
    assert read_checkpoint(note).signed_at == NOON


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        f"o\n1\n{ROOT}",
        f"o\n1\n{ROOT}\n\n",
        f"o\n1\n{ROOT}\n\nextension\n",
        f"\no\n1\n{ROOT}\n",
        f"\n1\n{ROOT}\n",
        f"o\n\n{ROOT}\n",
        "o\n1\n",
        "o\n1\n\n",
        f"o\n01\n{ROOT}\n",
        f"o\n-1\n{ROOT}\n",
        f"o\n+1\n{ROOT}\n",
        f"o\n1.0\n{ROOT}\n",
        f"o\n 1\n{ROOT}\n",
        f"o\n1e3\n{ROOT}\n",
        f"o\n\u0661\n{ROOT}\n",
        f"o\n{merkle_tree.MAX_LEAVES + 1}\n{ROOT}\n",
        f"o\n{10**30}\n{ROOT}\n",
        f"o\n1\n{ROOT[:-4]}\n",
        f"o\n1\n{ROOT}{ROOT}\n",
        f"o\n1\n{ROOT[:-2]}B=\n",
        f"o\n1\n{bytes(32).hex()}\n",
        f"o o\n1\n{ROOT}\n",
        f"o+o\n1\n{ROOT}\n",
    ],
)
def test_what_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(BadNote):
        Checkpoint.parse(text)


def test_extension_lines_are_kept() -> None:
    text = f"o\n1\n{ROOT}\nanything at all\ntime soon\n"
    result = Checkpoint.parse(text)
    assert result.extensions == ("anything at all", "time soon")
    assert str(result) == text
    with pytest.raises(BadCheckpoint):
        _ = result.signed_at


def test_a_signature_counts_in_the_name_of_the_origin_alone() -> None:
    """A log's key that signs as another log, or a note of another name, is no signature."""
    note = signed(origin="example.com/log")
    other = note.replace("example.com/log\n7", "example.com/other\n7")
    with pytest.raises(UnknownSigner):
        open_checkpoint(other, [KEY.public])
    renamed = note.replace("— example.com/log ", "— example.com/other ")
    with pytest.raises(UnknownSigner):
        open_checkpoint(renamed, [KEY.public])
    # Both renamed: the key hash is that of another name.
    with pytest.raises(UnknownSigner):
        open_checkpoint(note.replace("example.com/log", "example.com/other"), [KEY.public])


@pytest.mark.parametrize(
    ("old", "new"),
    [("\n7\n", "\n8\n"), (ROOT, "B" + ROOT[1:]), ("2026-11", "2026-12"), ("time", "mite")],
)
def test_no_line_can_be_changed(old: str, new: str) -> None:
    with pytest.raises(BadNote, match="does not match"):
        open_checkpoint(signed().replace(old, new), [KEY.public])


def test_no_checkpoint_passes_as_a_certificate_nor_the_other_way_round() -> None:
    """Both are signed with one key; what is signed begins differently, whatever the origin."""
    payload = f"1\n{ROOT}\n".encode()
    certificate = pre_authentication_encoding(PAYLOAD_TYPE, payload)
    assert certificate.startswith(b"DSSEv1 ")
    with pytest.raises(BadNote):
        Checkpoint(origin=certificate.decode().split("\n")[0], size=1, root_hash=bytes(32))
