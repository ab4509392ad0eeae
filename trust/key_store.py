"""The key directory: create, store, rotate and retire key pairs as files.

A key is two files in the key directory: ``<key id>.pem``, the private key, readable by its owner
alone, and ``<key id>.json``, the public record for verifiers. The directory is ``keys`` under
``$AFFIDAVIT_HOME``, by default ``~/.affidavit``.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from affidavit.plan import read_limited
from affidavit.trust.atomic_write import write_atomically
from affidavit.trust.key import (
    SERVICE_ROLES,
    KeyFailure,
    KeyRole,
    PrivateKeySource,
    PublicKey,
    SigningKey,
    SigningPort,
    now_in_seconds,
)

OVERLAP = timedelta(days=30)
"""How long older keys may sign after a rotation, by default."""


@dataclass(frozen=True, slots=True)
class KeyStore:
    """The key directory."""

    directory: Path

    def find(self, public: PublicKey) -> SigningKey | None:
        """Return the pair of ``public`` if its private key is a file; raises ``KeyFailure``."""
        path = self.directory / f"{public.key_id}.pem"
        if not path.exists():
            return None
        private = _private_key(path)
        if private.public_key() != public.key:
            raise KeyFailure(f"{path} does not belong to the public record beside it.")
        return SigningKey(private=private, public=public)

    def new(self, label: str = "", *, roles: Collection[KeyRole] | None = None) -> SigningKey:
        """Create and store a key pair with ``roles``; only its owner can read the private file."""
        key = SigningKey.generate(label, roles=roles)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The private key first: a public record without it would never sign.
        write_private(self.directory / f"{key.key_id}.pem", key.private)
        self.save(key.public)
        return key

    def save(self, public: PublicKey) -> None:
        """Write the record of ``public`` and replace an existing one."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = json.dumps(public.as_record(), indent=2) + "\n"
        write_atomically(self.directory / f"{public.key_id}.json", record.encode())

    def public_keys(self) -> tuple[PublicKey, ...]:
        """Return every public record of the directory, oldest first; raises ``KeyFailure``."""
        result = [_record_file(path) for path in sorted(self.directory.glob("*.json"))]
        return tuple(sorted(result, key=lambda key: (key.not_before, key.key_id)))

    def signing_key(
        self, source: PrivateKeySource | None = None, *, role: KeyRole = KeyRole.CERTIFICATE
    ) -> SigningPort | None:
        """Return the newest key with ``role`` inside its window that can sign, or None.

        ``source`` has the private keys, by default the files of this directory.
        """
        now = datetime.now(UTC)
        usable = (
            key for key in reversed(self.public_keys()) if key.has_role(role) and key.covers(now)
        )
        signers = map((source or self).find, usable)
        return next((signer for signer in signers if signer is not None), None)

    def rotate(
        self, overlap: timedelta, label: str = "", *, role: KeyRole | None = None
    ) -> tuple[SigningKey, int]:
        """Create a key and close the windows of the replaced keys ``overlap`` from now.

        Returns the new key and the number of shortened windows. With ``role`` the new key replaces
        the keys of that role, and keys with every role if each role has a key of its own; without
        it, all keys. Keys for certificates alone keep their windows, because their certificates
        expire with them: they no longer sign, because the newest key signs.

        During the overlap both may sign, so that a service on another host continues until it has
        the new key. Signatures inside a window stay valid. Revoke a stolen key by a keyset instead,
        because its holder can write any date.
        """
        earlier = self.public_keys()
        key = self.new(label, roles=None if role is None else (role,))
        end = now_in_seconds() + overlap
        replaced = [public for public in earlier if role is None or self._is_replaced(public, role)]
        shortened = [_closed(public, end) for public in replaced if public.not_after > end]
        for public in shortened:
            self.save(public)
        return key, len(shortened)

    def _is_replaced(self, public: PublicKey, role: KeyRole) -> bool:
        if public.roles is not None:
            return public.roles == {role} and role is not KeyRole.CERTIFICATE
        roles = {item for key in self.public_keys() for item in key.roles or ()}
        return roles.issuperset(SERVICE_ROLES)

    def retire(self, prefix: str) -> PublicKey:
        """Close the window of the key whose id begins with ``prefix``; it no longer signs.

        The certificates of a key for certificates alone expire with its window. Raises
        ``KeyFailure`` unless exactly one key matches and another key can sign.
        """
        keys = self.public_keys()
        matches = [key for key in keys if prefix and key.key_id.startswith(prefix)]
        if len(matches) != 1:
            count = "no key id begins" if not matches else f"{len(matches)} key ids begin"
            raise KeyFailure(
                f"{count} with {prefix!r} in {self.directory}; give a whole key id, as "
                "`affidavit keys list` shows it."
            )
        (key,) = matches
        now = now_in_seconds()
        others = [other for other in keys if other.key_id != key.key_id and other.covers(now)]
        roles = key.roles or {KeyRole.CERTIFICATE}
        if not all(any(other.has_role(role) for other in others) for role in roles):
            raise KeyFailure(
                "it is the only key that may sign now; run `affidavit keys rotate`, which makes "
                "another first."
            )
        retired = _closed(key, now)
        self.save(retired)
        return retired

    def add(
        self, pem: bytes, label: str = "", *, roles: Collection[KeyRole] | None = None
    ) -> PublicKey:
        """Store the record of a key whose private key is elsewhere; its window begins now.

        Raises ``KeyFailure`` if ``pem`` is not an Ed25519 public key, or is already known.
        """
        try:
            key = load_pem_public_key(pem)
        except (ValueError, TypeError):
            raise KeyFailure("this is not the PEM of a public key.") from None
        if not isinstance(key, Ed25519PublicKey):
            raise KeyFailure("this key is not an Ed25519 key.")
        public = PublicKey.new(key, label, roles=roles)
        if public.key_id in {known.key_id for known in self.public_keys()}:
            raise KeyFailure(f"the key {public.key_id[:16]} already exists.")
        self.save(public)
        return public


def read_public_keys(path: Path) -> tuple[PublicKey, ...]:
    """Read the keys of a record, a list of records, or an answer of ``GET /v1/keys``.

    Raises ``KeyFailure``.
    """
    # Imported here because it loads a reader of YAML, which no other use of keys needs.
    from affidavit.plan import MalformedPlan, load_json

    try:
        document = load_json(read_limited(path)).data
    except OSError as error:
        raise KeyFailure(f"{path} cannot be read: {error.strerror}.") from None
    except MalformedPlan as error:
        raise KeyFailure(f"{path} is not a JSON file of public key records: {error}") from None
    records = document.get("keys", [document]) if isinstance(document, dict) else document
    if not isinstance(records, list) or not all(isinstance(item, dict) for item in records):
        raise KeyFailure(f"{path} does not contain public key records.")
    return tuple(PublicKey.from_record(record) for record in records)


def read_root_key(path: Path) -> SigningKey:
    """Read the key pair of a private file without a record; raises ``KeyFailure``."""
    try:
        private = _private_key(path)
    except OSError as error:
        raise KeyFailure(f"{path} cannot be read: {error.strerror}.") from None
    return SigningKey(private=private, public=PublicKey.new(private.public_key()))


def _json_file(path: Path) -> Any:
    try:
        return json.loads(read_limited(path))
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


def _private_key(path: Path) -> Ed25519PrivateKey:
    require_private(path)
    try:
        private = load_pem_private_key(read_limited(path), password=None)
    except (ValueError, TypeError):
        raise KeyFailure(f"{path} is not a private key; restore it or make a new key.") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise KeyFailure(f"{path} is not an Ed25519 private key.")
    return private


def require_private(path: Path) -> None:
    """Raise ``KeyFailure`` if other users than the owner may read or change ``path``."""
    if path.stat().st_mode & 0o077:
        raise KeyFailure(f"{path} is readable by others; run chmod 600 on it, or make a new key.")


def write_private(path: Path, private: Ed25519PrivateKey) -> None:
    """Write a private key to a file that only its owner can read."""
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(path, pem, mode=0o600)


def _closed(key: PublicKey, end: datetime) -> PublicKey:
    return replace(key, not_after=max(key.not_before, min(key.not_after, end)))
