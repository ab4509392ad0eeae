"""Signed notes against Go's example, and what Go's reader refuses."""

from __future__ import annotations

import base64
import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from affidavit.trust.log import (
    BadNote,
    NoteKey,
    open_note,
    parse_note,
)
from affidavit.trust.log.note import (
    MAX_NOTE_BYTES,
    UnknownSigner,
    sign_note,
)

# golang.org/x/mod (BSD-3-Clause), sumdb/note/note_test.go.
VERIFIER = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
SEED = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
TEXT = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
)
LINE = (
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdng"
    "otpRZb6KE6RyyBwJnAM=\n"
)
NOTE = TEXT + "\n" + LINE
PETER = NoteKey.parse(VERIFIER)


def test_the_go_example_opens() -> None:
    assert open_note(NOTE, [PETER]) == (TEXT, [PETER])
    assert open_note(NOTE.encode(), [PETER, PETER]) == (TEXT, [PETER])
    assert str(parse_note(NOTE)) == NOTE


def test_the_go_example_is_written_byte_for_byte() -> None:
    private = Ed25519PrivateKey.from_private_bytes(SEED)
    key = NoteKey("PeterNeumann", private.public_key().public_bytes_raw())
    assert str(key) == VERIFIER
    assert key.key_hash.hex() == "c74f20a3"
    assert str(sign_note(TEXT, key, private.sign)) == NOTE


def test_no_part_and_no_change_of_a_verifier_key_is_one() -> None:
    for start in range(len(VERIFIER)):
        for end in range(start + 1, len(VERIFIER) + 1):
            if (start, end) != (0, len(VERIFIER)):
                with pytest.raises(BadNote):
                    NoteKey.parse(VERIFIER[start:end])
    for at, letter in enumerate(VERIFIER):
        with pytest.raises(BadNote):
            NoteKey.parse(VERIFIER[:at] + chr(ord(letter) + 1) + VERIFIER[at + 1 :])
    # A longer key and another algorithm, with the hash that they would have.
    for bad in (
        "PeterNeumann+cc469956+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TWBADKEY==",
        "PeterNeumann+173116ae+ZRpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        VERIFIER + "\n",
        " " + VERIFIER,
    ):
        with pytest.raises(BadNote):
            NoteKey.parse(bad)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "\n",
        "\n\n",
        TEXT,
        TEXT + "\n",
        TEXT + LINE,
        NOTE[:-1],
        NOTE + "\n",
        NOTE + "trailing\n",
        NOTE.replace("\n\n", "\n \n"),
        TEXT + "\n" + LINE.replace("— ", "- "),
        TEXT + "\n" + LINE.replace("— ", "—"),
        TEXT + "\n" + LINE.replace("— PeterNeumann", "— "),
        TEXT + "\n" + LINE.replace("PeterNeumann", "Peter+Neumann"),
        TEXT + "\n" + LINE.replace("PeterNeumann", "Peter\u2003Neumann"),
        TEXT + "\n" + LINE.replace("PeterNeumann ", "PeterNeumann  "),
        TEXT + "\n" + "— PeterNeumann x08g\n",
        TEXT + "\n" + "— PeterNeumann x08go/ZJkuBS9UG\n",
        TEXT + "\n" + LINE.replace("JnAM=", "JnAN="),
        TEXT.replace("the", "t\0he") + "\n" + LINE,
        TEXT.replace("the", "t\rhe") + "\n" + LINE,
        TEXT + "\n" + LINE * 101,
        "x" * MAX_NOTE_BYTES + "\n\n" + LINE,
    ],
)
def test_what_is_no_note_is_refused(bad: str) -> None:
    with pytest.raises(BadNote):
        open_note(bad, [PETER])


def test_bytes_that_are_no_text_are_refused() -> None:
    for bad in (b"\xff" + NOTE.encode(), NOTE.encode("utf-16")):
        with pytest.raises(BadNote):
            open_note(bad, [PETER])


def test_a_changed_text_is_refused_and_a_stranger_does_not_help() -> None:
    for changed in (TEXT.replace("your", "their"), TEXT + TEXT, "\n" + TEXT, TEXT[1:]):
        with pytest.raises(BadNote, match="does not match"):
            open_note(changed + "\n" + LINE, [PETER])
    stranger = made("Stranger")
    with pytest.raises(UnknownSigner):
        open_note(NOTE, [stranger[0]])
    with pytest.raises(UnknownSigner):
        open_note(NOTE, [])
    with pytest.raises(UnknownSigner):
        open_note(NOTE, [NoteKey("Peter", PETER.raw)])


def test_signatures_of_strangers_are_passed_over_and_a_false_one_is_not() -> None:
    ours, private = made("ours")
    line = str(sign_note(TEXT, ours, private.sign)).removeprefix(TEXT + "\n")
    assert open_note(NOTE + line, [ours]) == (TEXT, [ours])
    assert open_note(NOTE + line, [PETER]) == (TEXT, [PETER])
    assert open_note(NOTE + line, [ours, PETER]) == (TEXT, [PETER, ours])
    assert open_note(NOTE + LINE, [PETER]) == (TEXT, [PETER])
    false = str(sign_note("Another text.\n", ours, private.sign)).splitlines()[-1] + "\n"
    with pytest.raises(BadNote, match="does not match"):
        open_note(NOTE + false, [ours, PETER])


def test_two_trusted_keys_that_share_a_hash_are_refused() -> None:
    """Four bytes of hash are a hint; pairs of keys that share them are easily found."""
    first, second = (colliding(number) for number in COLLIDING)
    assert first[0].key_hash == second[0].key_hash
    assert first[0].raw != second[0].raw
    note = str(sign_note(TEXT, first[0], first[1].sign))
    assert open_note(note, [first[0]]) == (TEXT, [first[0]])
    with pytest.raises(BadNote, match="does not match"):
        open_note(note, [second[0]])
    with pytest.raises(BadNote, match="share the hash"):
        open_note(note, [first[0], second[0]])


def made(name: str) -> tuple[NoteKey, Ed25519PrivateKey]:
    private = Ed25519PrivateKey.generate()
    return NoteKey(name, private.public_key().public_bytes_raw()), private


COLLIDING = (5586, 50_967)
"""Of the keys that ``colliding`` makes, the first two with one key hash: a search of seconds."""


def colliding(number: int) -> tuple[NoteKey, Ed25519PrivateKey]:
    private = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"%d" % number).digest())
    return NoteKey("log", private.public_key().public_bytes_raw()), private


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\tb", "a\nb", "\u2003", "a" * 256])
def test_a_name_without_space_or_plus(name: str) -> None:
    with pytest.raises(BadNote):
        NoteKey(name, PETER.raw)


@pytest.mark.parametrize("text", ["", "no newline", "control\x07\n"])
def test_only_a_text_is_signed(text: str) -> None:
    key, private = made("ours")
    with pytest.raises(BadNote):
        sign_note(text, key, private.sign)
