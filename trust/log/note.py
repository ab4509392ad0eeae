"""C2SP signed notes, as Go's sumdb writes them, and log checkpoints, which are such notes.

A note is text, a blank line, and signature lines:

::

    the text, which ends in a newline

    — name base64(key hash || signature)

The key hash is the first four bytes of ``SHA-256(name || 0x0A || 0x01 || public key)``, where 0x01
is Ed25519; it is a hint, not an identity. A signature of an unknown key is ignored. An invalid
signature with a known name and key hash makes the note invalid, and so do two trusted keys with the
same name and hash, because the signer is ambiguous. A verifier key is written
``name+hash+base64(0x01 || key)``.

A checkpoint has the log's origin, size and root hash:

::

    affidavit.example.com/log
    1204
    qINS1GRFhWHwdkUeqLEoP4yEMkTBBzxBkGwGQlVlVcs=
    time 2026-11-21T10:00:00Z

    — affidavit.example.com/log Az3grl...

The first line, the origin, names the log and its key's signatures. The fourth is an extension line
with the time of signing in UTC, because a key is valid only within its window.

A key with every role signs certificates too. Neither passes for the other: a certificate's signed
bytes begin with ``DSSEv1`` and a space, which no origin may contain.

References: C2SP, signed-note.md and tlog-checkpoint.md; golang.org/x/mod/sumdb/note.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from affidavit.trust.dsse import decode_base64, encode_base64
from affidavit.trust.key import (
    KeyRole,
    PublicKey,
    SigningPort,
    format_instant,
    parse_instant,
)
from affidavit.trust.log import merkle_tree

MAX_NOTE_BYTES = 1_000_000
MAX_SIGNATURES = 100
_LINE = re.compile("— ([^ ]+) ([^ ]+)")
_NOT_IN_NAMES = frozenset({"Cc", "Cf", "Cs", "Co", "Zs", "Zl", "Zp"})


class BadNote(Exception):
    """The text is not a signed note, or no known key signed it."""


class UnknownSigner(BadNote):
    """No trusted key signed the note."""


@dataclass(frozen=True, slots=True)
class NoteSignature:
    """One signature line; ``key_hash`` has four bytes."""

    name: str
    key_hash: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Note:
    """A text and its signature lines, which are not verified."""

    text: str
    signatures: tuple[NoteSignature, ...]

    def __str__(self) -> str:
        lines = (
            f"— {signature.name} {encode_base64(signature.key_hash + signature.signature)}\n"
            for signature in self.signatures
        )
        return f"{self.text}\n{''.join(lines)}"


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """A public key of 32 bytes and the name under which it signs; ``kind`` is its type."""

    name: str
    raw: bytes
    kind: ClassVar[bytes]

    def __post_init__(self) -> None:
        require_name(self.name)

    @property
    def key_hash(self) -> bytes:
        """Four bytes that identify the key; they do not resist an attacker."""
        content = self.name.encode() + b"\n" + self.kind + self.raw
        return hashlib.sha256(content).digest()[:4]

    def __str__(self) -> str:
        return f"{self.name}+{self.key_hash.hex()}+{encode_base64(self.kind + self.raw)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a verifier key; raises ``BadNote``."""
        name, _, rest = text.partition("+")
        key_hash, _, encoded = rest.partition("+")
        raw = bytes_of(encoded, "the verifier key")
        if len(raw) != 33 or raw[:1] != cls.kind:
            raise BadNote(f"the verifier key is not an Ed25519 key of type 0x{cls.kind.hex()}")
        result = cls(name, raw[1:])
        if result.key_hash.hex() != key_hash:
            raise BadNote("the verifier key's hash is not that of its name and key")
        return result


class NoteKey(VerifierKey):
    """A key that signs notes."""

    __slots__ = ()
    kind = b"\x01"

    def accepts(self, line: NoteSignature, text: str) -> bool:
        """Whether ``line`` is a valid signature of ``text`` by this key."""
        try:
            key = Ed25519PublicKey.from_public_bytes(self.raw)
            key.verify(line.signature, text.encode())
        except InvalidSignature:
            return False
        return True


def sign_note(text: str, key: NoteKey, sign: Callable[[bytes], bytes]) -> Note:
    """Sign ``text`` with the private key of ``key``; raises ``BadNote`` for an invalid text."""
    if not text.endswith("\n") or _validated_text(text) != text:
        raise BadNote("a note's text ends in a newline")
    return Note(text, (NoteSignature(key.name, key.key_hash, sign(text.encode())),))


def parse_note(raw: str | bytes) -> Note:
    """Parse a note; its signatures are not verified. Raises ``BadNote``."""
    text = _validated_text(raw)
    body, separator, lines = text.rpartition("\n\n")
    if not separator or not lines.endswith("\n"):
        raise BadNote("the note has no signature below a blank line")
    result = tuple(_signature(line) for line in lines[:-1].split("\n"))
    if len(result) > MAX_SIGNATURES:
        raise BadNote(f"the note has more than {MAX_SIGNATURES} signatures")
    return Note(body + "\n", result)


def open_note(raw: str | bytes, keys: Iterable[NoteKey]) -> tuple[str, list[NoteKey]]:
    """Return the text of a note and those of ``keys`` that signed it, at least one.

    Raises ``BadNote``.
    """
    note = parse_note(raw)
    trusted = set(keys)
    signers: list[NoteKey] = []
    for line in note.signatures:
        known = [
            item for item in trusted if (item.name, item.key_hash) == (line.name, line.key_hash)
        ]
        if len(known) > 1:
            raise BadNote(f"two keys that you trust share the hash of {line.name}'s signature")
        for key in known:
            if not key.accepts(line, note.text):
                raise BadNote(f"the signature of {line.name} does not match the text")
            if key not in signers:
                signers.append(key)
    if not signers:
        raise UnknownSigner("no key that you trust signed the note")
    return note.text, signers


def require_name(name: str) -> None:
    """Raise ``BadNote`` for a name that is empty or has white space, a plus or a control.

    Characters without a category pass, because later versions of Unicode give them one.
    """
    bad = any(item == "+" or unicodedata.category(item) in _NOT_IN_NAMES for item in name)
    if not name or bad or len(name.encode(errors="replace")) > 255:
        raise BadNote("a key's name is 1 to 255 characters without space, plus or control")


def bytes_of(text: str, what: str) -> bytes:
    """Decode canonical base64; raises ``BadNote`` that names ``what`` is malformed."""
    try:
        return decode_base64(text)
    except ValueError as error:
        raise BadNote(f"{what} is {error}") from None


def _signature(line: str) -> NoteSignature:
    result = _LINE.fullmatch(line)
    if result is None:
        raise BadNote("a signature line does not have the form '— name base64'")
    require_name(result[1])
    raw = bytes_of(result[2], "a signature")
    if len(raw) < 5:
        raise BadNote("a signature is too short")
    return NoteSignature(result[1], raw[:4], raw[4:])


def _validated_text(raw: str | bytes) -> str:
    try:
        content = raw.encode() if isinstance(raw, str) else raw
        if len(content) > MAX_NOTE_BYTES:
            raise BadNote("the note is too long")
        text = content.decode()
    except UnicodeError:
        raise BadNote("the note is not UTF-8") from None
    if any(item < " " and item != "\n" for item in text):
        raise BadNote("the note has control characters")
    return text


_SIZE = re.compile(r"0|[1-9][0-9]{0,15}")
_TIME_PREFIX = "time "


class BadCheckpoint(BadNote):
    """The note is not a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state of a log at a moment: ``size`` leaves under ``root_hash``."""

    origin: str
    size: int
    root_hash: bytes
    extensions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_name(self.origin)
        if (
            not 0 <= self.size <= merkle_tree.MAX_LEAVES
            or len(self.root_hash) != merkle_tree.HASH_BYTES
        ):
            raise BadCheckpoint("a checkpoint has a size and a hash of 32 bytes")

    @property
    def signed_at(self) -> datetime | None:
        """The time of signing by the checkpoint itself, or None.

        Raises ``BadCheckpoint`` for a malformed time.
        """
        for line in self.extensions:
            if line.startswith(_TIME_PREFIX):
                try:
                    return parse_instant(line.removeprefix(_TIME_PREFIX))
                except ValueError:
                    raise BadCheckpoint("the checkpoint's time cannot be read") from None
        return None

    def __str__(self) -> str:
        lines = (self.origin, str(self.size), encode_base64(self.root_hash), *self.extensions)
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """Parse the text of a note; raises ``BadNote``."""
        lines = text.split("\n")
        if len(lines) < 4 or lines.pop() != "" or not all(lines):
            raise BadCheckpoint("a checkpoint has three lines or more, none of them empty")
        origin, size, root, *extensions = lines
        if _SIZE.fullmatch(size) is None:
            raise BadCheckpoint("a checkpoint's second line is its size, in decimal")
        return cls(
            origin=origin,
            size=int(size),
            root_hash=bytes_of(root, "the root hash"),
            extensions=tuple(extensions),
        )


def note_key(origin: str, key: PublicKey) -> NoteKey:
    """Return ``key`` as the note key of a log; its ``str`` is the verifier key."""
    return NoteKey(origin, key.key.public_bytes_raw())


def sign_checkpoint(
    key: SigningPort, *, origin: str, size: int, root_hash: bytes, at: datetime
) -> str:
    """Return the signed note of a log that has ``size`` leaves at the time ``at``."""
    time = f"{_TIME_PREFIX}{format_instant(at)}"
    result = Checkpoint(origin=origin, size=size, root_hash=root_hash, extensions=(time,))
    return str(sign_note(str(result), note_key(origin, key.public), key.sign))


def read_checkpoint(note: str | bytes) -> Checkpoint:
    """Parse the checkpoint in ``note`` without verifying its signatures; raises ``BadNote``."""
    return Checkpoint.parse(parse_note(note).text)


def open_checkpoint(
    note: str | bytes, trusted: Iterable[PublicKey]
) -> tuple[Checkpoint, tuple[PublicKey, ...]]:
    """Return the checkpoint in ``note`` and the trusted checkpoint keys that signed it.

    Raises ``BadNote`` if it is malformed or no such key signed it.
    """
    result = read_checkpoint(note)
    known = {
        note_key(result.origin, item): item for item in trusted if item.has_role(KeyRole.CHECKPOINT)
    }
    _, signers = open_note(note, known)
    return result, tuple(known[signer] for signer in signers)
