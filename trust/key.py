"""Signing keys: Ed25519 pairs, what each may sign, and their validity windows.

The key id is the sha256 of the public key's SubjectPublicKeyInfo, so that it cannot name another
key. ``development_key`` is for trials: it exists only in memory, is marked in every record, and no
verifier trusts it. ``affidavit.trust.key_store`` stores keys in files.

A key may be limited to one role (``KeyRole``), so that a stolen key forges documents of one kind
only. A record without ``roles`` allows every role, as all records did before roles were added.

References: RFC 8032 (Ed25519); RFC 8410 (its SubjectPublicKeyInfo and its PKCS #8 form); TUF
specification 1.0.33, section 2.1 (roles).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

WINDOW = timedelta(days=730)
"""The length of a new key's validity window."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""The format of times in signed documents: UTC in whole seconds."""


class KeyFailure(Exception):
    """A key cannot be used; the message names the file and the remedy."""


class KeyRole(StrEnum):
    """The kind of document that a key may sign; the values are part of keysets and key records."""

    CERTIFICATE = "certificate"
    CHECKPOINT = "checkpoint"
    STATUS = "status"
    RUN = "run"


SERVICE_ROLES = (KeyRole.CERTIFICATE, KeyRole.CHECKPOINT, KeyRole.STATUS)
"""The roles of a service: certificates, policies and waivers; log checkpoints; status lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicKey:
    """A public key and the window in which its signatures are valid.

    From ``revoked_from`` on, which a keyset may set, they are not. ``roles`` are the roles of the
    key; None is every role.
    """

    key: Ed25519PublicKey = field(repr=False)
    not_before: datetime
    not_after: datetime
    label: str = ""
    development: bool = False
    revoked_from: datetime | None = None
    roles: frozenset[KeyRole] | None = None

    @property
    def key_id(self) -> str:
        """sha256 of the SubjectPublicKeyInfo, in hexadecimal."""
        der = self.key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return hashlib.sha256(der).hexdigest()

    def has_role(self, role: KeyRole) -> bool:
        """Whether the key has the ``role``."""
        return self.roles is None or role in self.roles

    def covers(self, moment: datetime) -> bool:
        """Whether ``moment`` lies in the key's window, and before its revocation."""
        return self.not_before <= moment <= self.not_after and not self.revoked_at(moment)

    def revoked_at(self, moment: datetime) -> bool:
        """Whether the key was revoked at ``moment`` or earlier."""
        return self.revoked_from is not None and moment >= self.revoked_from

    def accepts(self, signature: bytes, message: bytes) -> bool:
        """Whether ``signature`` is a valid signature of ``message`` by this key."""
        try:
            self.key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def as_record(self) -> dict[str, Any]:
        """Return the record of ``GET /v1/keys`` and of the key directory."""
        pem = self.key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return {
            "key_id": self.key_id,
            "algorithm": "ed25519",
            "public_key": pem.decode("ascii"),
            "not_before": format_instant(self.not_before),
            "not_after": format_instant(self.not_after),
            "label": self.label,
            "development": self.development,
            **({} if self.roles is None else {"roles": sorted(self.roles)}),
        }

    @classmethod
    def new(
        cls,
        key: Ed25519PublicKey,
        label: str = "",
        *,
        development: bool = False,
        roles: Collection[KeyRole] | None = None,
    ) -> PublicKey:
        """Return ``key`` with ``roles`` (None is every role) and a window that begins now."""
        now = now_in_seconds()
        return cls(
            key=key,
            not_before=now,
            not_after=now + WINDOW,
            label=label,
            development=development,
            roles=None if roles is None else frozenset(roles),
        )

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> PublicKey:
        """Return the key of a record; raises ``KeyFailure`` if the record is malformed."""
        try:
            key = load_pem_public_key(record["public_key"].encode("ascii"))
            if not isinstance(key, Ed25519PublicKey):
                raise KeyFailure("the record's key is not an Ed25519 key.")
            result = cls(
                key=key,
                not_before=parse_instant(record["not_before"]),
                not_after=parse_instant(record["not_after"]),
                label=str(record.get("label", "")),
                development=bool(record.get("development", False)),
                roles=_roles(record.get("roles")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise KeyFailure(f"this is not a public key record: {error}.") from None
        if result.key_id != record.get("key_id"):
            raise KeyFailure("the record's key id does not match its key.")
        return result


class SigningPort(Protocol):
    """A signer for a public key, wherever the private key is stored."""

    @property
    def public(self) -> PublicKey:
        """The public key, with its window."""

    @property
    def key_id(self) -> str:
        """The id of the public key."""

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of ``message``; raises ``KeyFailure``."""


class PrivateKeySource(Protocol):
    """A store of private keys."""

    def find(self, public: PublicKey) -> SigningPort | None:
        """Return a signer for ``public``, or None; raises ``KeyFailure``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SigningKey:
    """A key pair in memory; the private key never leaves this object except to its own file."""

    private: Ed25519PrivateKey = field(repr=False)
    public: PublicKey

    @property
    def key_id(self) -> str:
        """The id of the public key."""
        return self.public.key_id

    @classmethod
    def generate(
        cls, label: str = "", *, development: bool = False, roles: Collection[KeyRole] | None = None
    ) -> SigningKey:
        """Return a new pair with ``roles`` (None is every role) and a window that begins now."""
        private = Ed25519PrivateKey.generate()
        public = PublicKey.new(private.public_key(), label, development=development, roles=roles)
        return cls(private=private, public=public)

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of ``message``."""
        return self.private.sign(message)


def development_key(role: KeyRole | None = None) -> SigningKey:
    """Return a key for this process alone; certificates that it signs are ``untrusted``."""
    roles = None if role is None else (role,)
    return SigningKey.generate("development", development=True, roles=roles)


def by_id(keys: Iterable[PublicKey]) -> dict[str, PublicKey]:
    """Return the keys by their key id."""
    return {key.key_id: key for key in keys}


def now_in_seconds() -> datetime:
    """Return the current time, in whole seconds."""
    return datetime.now(UTC).replace(microsecond=0)


def format_instant(moment: datetime) -> str:
    """Format a moment as signed documents do, in whole seconds of UTC."""
    return moment.astimezone(UTC).strftime(TIME_FORMAT)


def parse_instant(text: str) -> datetime:
    """Parse a moment of a signed document; raises ``ValueError``."""
    result = datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC)
    if not text.isascii():  # strptime takes the digits of every script
        raise ValueError("a time is written in ASCII")
    return result


def _roles(value: Any) -> frozenset[KeyRole] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError("roles is not a list of what the key may sign")
    return frozenset(KeyRole(item) for item in value)
