"""Signing keys: Ed25519 pairs, what each may sign, and their validity windows.

The key id is the sha256 of the public key's SubjectPublicKeyInfo, so that it cannot name another
key. ``development_key`` is for trying things out: it lives in memory, is marked in every
record and trusted by nobody. ``affidavit.certificate.keys.key_store`` keeps keys in files.

A key may be for one role (``KeyRole``), so that a stolen one forges documents of one kind only.
A record without ``roles`` is for each of them, as all were before there were roles.

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
"""How long a new key may sign."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""UTC in whole seconds, as every signed document writes it."""


class KeyFailure(Exception):
    """A key that cannot be used; the message says which file and what to do."""


class KeyRole(StrEnum):
    """What a key may sign; the values are part of keysets and key records."""

    CERTIFICATE = "certificate"
    CHECKPOINT = "checkpoint"
    STATUS = "status"
    RUN = "run"
    WITNESS = "witness"


SERVICE_ROLES = (KeyRole.CERTIFICATE, KeyRole.CHECKPOINT, KeyRole.STATUS)
"""What a service signs: certificates with policies and waivers, the log, and status lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicKey:
    """The public half of a key, and the window in which its signatures count.

    ``revoked_from`` is from when on they do not, where a keyset says so. ``roles`` is what it may
    sign; None is everything.
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

    def may(self, role: KeyRole) -> bool:
        """Whether the key is for ``role``."""
        return self.roles is None or role in self.roles

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
            **({} if self.roles is None else {"roles": sorted(self.roles)}),
        }

    @classmethod
    def opened(
        cls,
        key: Ed25519PublicKey,
        label: str = "",
        *,
        development: bool = False,
        roles: Collection[KeyRole] | None = None,
    ) -> PublicKey:
        """``key`` for ``roles``, or None for each, with a window that opens now."""
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
        """The key of a record; raises ``KeyFailure`` when the record does not hold one."""
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
    """A signer for a public key, wherever its private half is stored.

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
    """A place that stores private halves."""

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
    def generate(
        cls, label: str = "", *, development: bool = False, roles: Collection[KeyRole] | None = None
    ) -> SigningKey:
        """A fresh pair for ``roles``, or None for each, whose window opens now."""
        private = Ed25519PrivateKey.generate()
        public = PublicKey.opened(private.public_key(), label, development=development, roles=roles)
        return cls(private=private, public=public)

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of ``message``."""
        return self.private.sign(message)


def development_key(role: KeyRole | None = None) -> SigningKey:
    """A key for this process alone; certificates that it signs say ``untrusted``."""
    roles = None if role is None else (role,)
    return SigningKey.generate("development", development=True, roles=roles)


def by_id(keys: Iterable[PublicKey]) -> dict[str, PublicKey]:
    """Keys by their key id."""
    return {key.key_id: key for key in keys}


def now_in_seconds() -> datetime:
    """The present, in whole seconds."""
    return datetime.now(UTC).replace(microsecond=0)


def format_instant(moment: datetime) -> str:
    """A moment as records write it, in whole seconds of UTC."""
    return moment.astimezone(UTC).strftime(TIME_FORMAT)


def parse_instant(text: str) -> datetime:
    """The moment of a record; raises ``ValueError``."""
    return datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC)


def _roles(value: Any) -> frozenset[KeyRole] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError("roles is not a list of what the key may sign")
    return frozenset(KeyRole(item) for item in value)
