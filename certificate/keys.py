"""Signing keys: Ed25519 pairs, the windows in which they sign, and where they are kept.

A key is two files in the key directory: ``<key id>.pem``, the private half, readable by
its owner alone, and ``<key id>.json``, the public record that verifiers are given. The key
id is the sha256 of the public key's SubjectPublicKeyInfo, so that it cannot name another
key. ``development_key`` is for trying things out: it lives in memory, is marked in every
record and trusted by nobody.

The directory is ``keys`` under ``$AFFIDAVIT_HOME``, by default ``~/.affidavit``.

References: RFC 8032 (Ed25519); RFC 8410 (its SubjectPublicKeyInfo and its PKCS #8 form).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from affidavit.certificate.atomic_write import write_atomically

WINDOW = timedelta(days=730)
"""How long a new key may sign."""
OVERLAP = timedelta(days=30)
"""How long older keys may sign after a rotation, unless another time is given."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""UTC in whole seconds, as every signed document writes it."""


class KeyFailure(Exception):
    """A key that cannot be used; the message says which file and what to do."""


def home() -> Path:
    """Where keys and the embedded database are kept."""
    return Path(os.environ.get("AFFIDAVIT_HOME") or Path.home() / ".affidavit")


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicKey:
    """The public half of a key, and the window in which its signatures count.

    ``revoked_from`` is from when on they do not, where a keyset says so.
    """

    key: Ed25519PublicKey = field(repr=False)
    not_before: datetime
    not_after: datetime
    label: str = ""
    development: bool = False
    revoked_from: datetime | None = None

    @property
    def key_id(self) -> str:
        """sha256 of the SubjectPublicKeyInfo, in hexadecimal."""
        der = self.key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return hashlib.sha256(der).hexdigest()

    def covers(self, moment: datetime) -> bool:
        """Whether ``moment`` lies in the key's window, and before its revocation."""
        return self.not_before <= moment <= self.not_after and not self.revoked_at(moment)

    def revoked_at(self, moment: datetime) -> bool:
        """Whether the key was revoked from ``moment`` or earlier on."""
        return self.revoked_from is not None and moment >= self.revoked_from

    def accepts(self, signature: bytes, message: bytes) -> bool:
        """Whether ``signature`` is this key's over ``message``."""
        try:
            self.key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def as_record(self) -> dict[str, Any]:
        """The record that ``GET /v1/keys`` and the key directory hold."""
        pem = self.key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return {
            "key_id": self.key_id,
            "algorithm": "ed25519",
            "public_key": pem.decode("ascii"),
            "not_before": format_instant(self.not_before),
            "not_after": format_instant(self.not_after),
            "label": self.label,
            "development": self.development,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> PublicKey:
        """The key of a record; raises ``KeyFailure`` when the record does not hold one."""
        try:
            key = load_pem_public_key(record["public_key"].encode("ascii"))
            if not isinstance(key, Ed25519PublicKey):
                raise KeyFailure("the record holds a key that is not Ed25519.")
            result = cls(
                key=key,
                not_before=parse_instant(record["not_before"]),
                not_after=parse_instant(record["not_after"]),
                label=str(record.get("label", "")),
                development=bool(record.get("development", False)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise KeyFailure(f"this is not a public key record: {error}.") from None
        if result.key_id != record.get("key_id"):
            raise KeyFailure("the record's key id is not that of its key.")
        return result


class SigningPort(Protocol):
    """Whoever can sign for a public key, wherever the private half is kept.

    ``sign`` returns the 64-byte Ed25519 signature of a message of any length, or raises
    ``KeyFailure``; whoever asks for a signature takes one of these and nothing narrower.
    """

    @property
    def public(self) -> PublicKey:
        """The public half, with its window."""

    @property
    def key_id(self) -> str:
        """The public half's key id."""

    def sign(self, message: bytes) -> bytes:
        """The signature of ``message``."""


class PrivateKeySource(Protocol):
    """Where private halves are kept."""

    def find(self, public: PublicKey) -> SigningPort | None:
        """Whoever can sign for ``public``, or None; raises ``KeyFailure``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SigningKey:
    """A key pair in memory; the private half never leaves this object but to its own file."""

    private: Ed25519PrivateKey = field(repr=False)
    public: PublicKey

    @property
    def key_id(self) -> str:
        """The public half's key id."""
        return self.public.key_id

    @classmethod
    def generate(cls, label: str = "", *, development: bool = False) -> SigningKey:
        """A fresh pair whose window opens now."""
        private = Ed25519PrivateKey.generate()
        now = _now()
        public = PublicKey(
            key=private.public_key(),
            not_before=now,
            not_after=now + WINDOW,
            label=label,
            development=development,
        )
        return cls(private=private, public=public)

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of ``message``."""
        return self.private.sign(message)


def development_key() -> SigningKey:
    """A key for this process alone; certificates that it signs say ``untrusted``."""
    return SigningKey.generate("development", development=True)


@dataclass(frozen=True, slots=True)
class KeyStore:
    """The key directory."""

    directory: Path

    def find(self, public: PublicKey) -> SigningKey | None:
        """The pair of ``public`` whose private half is a file here; raises ``KeyFailure``."""
        path = self.directory / f"{public.key_id}.pem"
        if not path.exists():
            return None
        return SigningKey(private=_private_file(path, public), public=public)

    def new(self, label: str = "") -> SigningKey:
        """Create a key pair and keep it; the private file is readable by its owner alone."""
        key = SigningKey.generate(label)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The private half first: a public record without it would never sign.
        write_private(self.directory / f"{key.key_id}.pem", key.private)
        self.keep(key.public)
        return key

    def keep(self, public: PublicKey) -> None:
        """Write the record of ``public``, in place of any that is there."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = json.dumps(public.as_record(), indent=2) + "\n"
        write_atomically(self.directory / f"{public.key_id}.json", record.encode())

    def public_keys(self) -> tuple[PublicKey, ...]:
        """Every public record of the directory, oldest first."""
        result = [_record_file(path) for path in sorted(self.directory.glob("*.json"))]
        return tuple(sorted(result, key=lambda key: (key.not_before, key.key_id)))

    def signing_key(self, halves: PrivateKeySource | None = None) -> SigningPort | None:
        """The newest key that is inside its window and whose private half is kept.

        ``halves`` says where: in files here, unless another place is given.
        """
        now = datetime.now(UTC)
        for public in reversed(self.public_keys()):
            if public.covers(now) and (result := (halves or self).find(public)) is not None:
                return result
        return None

    def rotate(self, overlap: timedelta, label: str = "") -> tuple[SigningKey, int]:
        """Create a key and close the other keys' windows ``overlap`` from now, if still open.

        Returns the new key and the number of shortened windows. During the overlap both may
        sign, so a service on another host continues until it has the new key. What an old key
        signed inside its window keeps counting. A key that a stranger may have is revoked by a
        keyset instead, because its holder can write any date into a certificate.
        """
        earlier = self.public_keys()
        key = self.new(label)
        end = _now() + overlap
        shortened = [_closed(public, end) for public in earlier if public.not_after > end]
        for public in shortened:
            self.keep(public)
        return key, len(shortened)

    def retire(self, prefix: str) -> PublicKey:
        """Close the window of the key whose id begins with ``prefix``; it no longer signs.

        Raises ``KeyFailure`` unless exactly one key matches and another key can sign.
        """
        keys = self.public_keys()
        matches = [key for key in keys if prefix and key.key_id.startswith(prefix)]
        if len(matches) != 1:
            what = "no key" if not matches else f"{len(matches)} keys"
            raise KeyFailure(
                f"{what} in {self.directory} begin with {prefix!r}; give a whole key id."
            )
        (key,) = matches
        now = _now()
        if not any(other.covers(now) for other in keys if other.key_id != key.key_id):
            raise KeyFailure(
                "it is the only key that may sign now; run `affidavit keys rotate`, which makes "
                "another first."
            )
        retired = _closed(key, now)
        self.keep(retired)
        return retired

    def add(self, pem: bytes, label: str = "") -> PublicKey:
        """Keep the record of a key whose private half is elsewhere; its window opens now.

        Raises ``KeyFailure`` if ``pem`` is not an Ed25519 public key, or is already known.
        """
        try:
            key = load_pem_public_key(pem)
        except (ValueError, TypeError):
            raise KeyFailure("this is not the PEM of a public key.") from None
        if not isinstance(key, Ed25519PublicKey):
            raise KeyFailure("this key is not an Ed25519 key.")
        now = _now()
        public = PublicKey(key=key, not_before=now, not_after=now + WINDOW, label=label)
        if public.key_id in {known.key_id for known in self.public_keys()}:
            raise KeyFailure(f"the key {public.key_id[:16]} is there already.")
        self.keep(public)
        return public


def read_public_keys(path: Path) -> tuple[PublicKey, ...]:
    """Keys of a record file, of a list of records, or of what ``GET /v1/keys`` answers.

    Raises ``KeyFailure``.
    """
    document = _json_file(path)
    records = document.get("keys", [document]) if isinstance(document, dict) else document
    if not isinstance(records, list) or not all(isinstance(item, dict) for item in records):
        raise KeyFailure(f"{path} does not hold public key records.")
    return tuple(PublicKey.from_record(record) for record in records)


def read_root_key(path: Path) -> SigningKey:
    """The key pair of a private file that has no record beside it; raises ``KeyFailure``."""
    try:
        private = _private_key(path)
    except OSError as error:
        raise KeyFailure(f"{path} cannot be read: {error.strerror}.") from None
    now = _now()
    public = PublicKey(key=private.public_key(), not_before=now, not_after=now + WINDOW)
    return SigningKey(private=private, public=public)


def by_id(keys: Iterable[PublicKey]) -> dict[str, PublicKey]:
    """Keys by their key id."""
    return {key.key_id: key for key in keys}


def _json_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeyFailure(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise KeyFailure(f"{path} is not a JSON file of public key records.") from None


def _record_file(path: Path) -> PublicKey:
    record = _json_file(path)
    if not isinstance(record, dict):
        raise KeyFailure(f"{path} is not a public key record.")
    try:
        return PublicKey.from_record(record)
    except KeyFailure as failure:
        raise KeyFailure(f"{path}: {failure}") from None


def _private_file(path: Path, public: PublicKey) -> Ed25519PrivateKey:
    private = _private_key(path)
    if private.public_key() != public.key:
        raise KeyFailure(f"{path} does not belong to the public record beside it.")
    return private


def _private_key(path: Path) -> Ed25519PrivateKey:
    require_private(path)
    try:
        private = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError):
        raise KeyFailure(f"{path} is not a private key; restore it or make a new key.") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise KeyFailure(f"{path} is not an Ed25519 private key.")
    return private


def require_private(path: Path) -> None:
    """Raise ``KeyFailure`` if others than the owner of ``path`` may read or change it."""
    if path.stat().st_mode & 0o077:
        raise KeyFailure(f"{path} is readable by others; run chmod 600 on it, or make a new key.")


def write_private(path: Path, private: Ed25519PrivateKey) -> None:
    """Write a private half for its owner alone."""
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(path, pem, mode=0o600)


def _closed(key: PublicKey, end: datetime) -> PublicKey:
    return replace(key, not_after=max(key.not_before, min(key.not_after, end)))


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def format_instant(moment: datetime) -> str:
    """A moment as records write it, in whole seconds of UTC."""
    return moment.astimezone(UTC).strftime(TIME_FORMAT)


def parse_instant(text: str) -> datetime:
    """The moment of a record; raises ``ValueError``."""
    return datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC)
