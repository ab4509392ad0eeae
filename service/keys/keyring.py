"""The keys that the service signs with, and the keysets that publish and revoke them.

``affidavit keys new`` creates keys in the key directory. The directory is checked for every
certificate, so that a new key or the end of an old one's window needs no restart, and is read
again only after a change. A setting says where private halves are stored
(``trust.signers``). Keys that the published keyset revokes do not sign.

If the directory is empty, development keys of this process sign, and certificates are marked
``untrusted``: nobody else can know these keys, so that their signatures prove nothing. If there
are keys but none of them may sign, nothing is signed, because development keys would conceal the
problem.

The service has no root key and cannot create keysets. It verifies a new keyset as every verifier
does: the roots of the previous version must have signed it. The first version is signed by its own
roots only, which verifiers must obtain from another source.

Both tables are append-only:

``keysets``
    One row per version, without gaps, with the signed document.
``revoked_keys``
    The keys that each version revokes and since when, so that queries can compute the status of
    certificates. Later versions revoke at least as much.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import ConfigDict, Field
from sqlalchemy import Connection, insert, select

from affidavit.client import ResponseModel
from affidavit.service.core.database import (
    Store,
    write,
)
from affidavit.service.identity.actor import Approve, approve_alone
from affidavit.service.log.entries import append
from affidavit.service.tables.keys import keysets, revoked_keys
from affidavit.trust import (
    PAYLOAD_TYPE,
    SERVICE_ROLES,
    KeyFailure,
    KeyRole,
    KeysetError,
    KeyStore,
    PrivateKeySource,
    PublicKey,
    SignedKeyset,
    SigningPort,
    accept_keyset,
    check_keyset,
    development_key,
    now_in_seconds,
    read_envelope,
    read_keyset,
)

log = logging.getLogger("affidavit.service")

Fingerprint = tuple[tuple[str, int, int, int, int], ...]


class Keyring:
    """The keys of one service process.

    Every method raises ``KeyFailure`` if the directory contains an unusable key, or keys none of
    which may sign.
    """

    def __init__(
        self,
        directory: Path,
        halves: PrivateKeySource | None = None,
        revoked: Callable[[], Collection[str]] = frozenset,
        now: Callable[[], datetime] = now_in_seconds,
    ) -> None:
        self._directory = directory
        self._store = KeyStore(directory)
        self._halves = halves or self._store
        self._revoked = revoked
        self.now = now
        self._development = {role: development_key(role) for role in KeyRole}
        self._lock = Lock()
        self._fingerprint: Fingerprint | None = None
        self._records: tuple[PublicKey, ...] = ()
        self._signers: dict[str, SigningPort | None] = {}

    def revoked(self) -> Collection[str]:
        """Return the ids of revoked keys."""
        return self._revoked()

    def current(self, role: KeyRole = KeyRole.CERTIFICATE) -> SigningPort:
        """Return the signer for ``role``; raises ``KeyFailure`` if no key can sign."""
        with self._lock:
            self._refresh()
            if not self._records:
                return self._development[role]
            for public in self._valid(role):
                if public.key_id not in self._signers:
                    self._signers[public.key_id] = self._halves.find(public)
                signer = self._signers[public.key_id]
                if signer is not None:
                    return signer
        raise KeyFailure(
            f"no key in {self._directory} can sign for the role {role} now: there is none, or each "
            "is outside its window, revoked or without its private half; run affidavit keys "
            f"rotate --role {role}."
        )

    def signer(self, role: KeyRole) -> Callable[[], SigningPort]:
        """Return a function that returns the current signer for ``role``."""
        return partial(self.current, role)

    def accepts(self, role: KeyRole, signature: bytes, message: bytes) -> bool:
        """Return whether a key that may sign for ``role`` now made ``signature``."""
        with self._lock:
            self._refresh()
            keys = self._valid(role) if self._records else [self._development[role].public]
        return any(key.accepts(signature, message) for key in keys)

    def signed(self, bundle: bytes) -> bool:
        """Return whether an unrevoked certificate key of the directory signed ``bundle``."""
        envelope = read_envelope(json.loads(bundle)["envelope"])
        with self._lock:
            self._refresh()
            keys = [key for key in self._records if key.has_role(KeyRole.CERTIFICATE)]
        return bool(envelope.signers(keys) - set(self._revoked()))

    def all_current(self) -> tuple[SigningPort, ...]:
        """Return the signer for each role of a service; raises ``KeyFailure`` if one is missing."""
        return tuple(self.current(role) for role in SERVICE_ROLES)

    def public_records(self) -> list[dict[str, Any]]:
        """Return the public records of the directory's keys, or else of the development keys."""
        with self._lock:
            self._refresh()
            development = (key.public for key in self._development.values())
            return [key.as_record() for key in self._records or development]

    def announce(self) -> None:
        """Log which key signs, with a warning if it is a development key."""
        key, *_ = self.all_current()
        if key.public.development:
            log.warning(
                "UNTRUSTED: there is no signing key in %s; certificates are signed by a "
                "development key that nobody can trust. Run: affidavit keys new",
                self._directory,
            )
        else:
            log.info("certificates are signed by key %s", key.key_id)

    def _valid(self, role: KeyRole) -> list[PublicKey]:
        """Return the directory's keys that may sign for ``role`` now, newest first."""
        now, revoked = self.now(), self._revoked()
        may = [key for key in self._records if key.has_role(role) and key.covers(now)]
        return [key for key in reversed(may) if key.key_id not in revoked]

    def _refresh(self) -> None:
        """Read the directory again if a file in it has changed."""
        fingerprint = _fingerprint(self._directory)
        if fingerprint != self._fingerprint:
            self._records = self._store.public_keys()
            self._signers = {}
            self._fingerprint = fingerprint


def _fingerprint(directory: Path) -> Fingerprint:
    try:
        files = [(entry.name, entry.stat()) for entry in os.scandir(directory)]
    except OSError:
        return ()
    return tuple(
        sorted((name, st.st_ino, st.st_mtime_ns, st.st_size, st.st_mode) for name, st in files)
    )


FRESH_SECONDS = 1.0
"""Time after which revoked keys are read again."""


class KeysetStore(Store):
    """Reads and publishes keysets."""

    def newest(self) -> bytes | None:
        """Return the signed bytes of the newest version, or None."""
        return self.read(_newest)[1]

    def signed(self) -> SignedKeyset | None:
        """Return the newest version, or None."""
        return self.read(_newest)[0]

    def administrators(self) -> int:
        """Return how many people must agree to a budget or policy; 1 without a keyset."""
        newest = self.signed()
        return 1 if newest is None else newest.keyset.administrators or 1

    def find(self, version: int) -> bytes | None:
        """Return the signed bytes of a version, or None."""
        query = select(keysets.c.document).where(keysets.c.version == version)
        with self._reader.connect() as connection:
            return connection.execute(query).scalar_one_or_none()

    def publish(
        self, content: bytes, *, actor: str, at: datetime, approve: Approve = approve_alone
    ) -> tuple[SignedKeyset, bool]:
        """Store the keyset in ``content`` and return it, with whether it is new.

        Publishing the newest version again is not an error. Raises the ``KeysetError`` of
        ``accept_keyset``, or ``keyset_gap`` if a version in between is missing.
        """
        signed = read_keyset(content)

        def work(connection: Connection) -> bool:
            last, _ = _newest(connection)
            accept_keyset([signed], last, at)
            if last is not None and signed.digest == last.digest:
                return False
            version = signed.keyset.version
            expected = 1 if last is None else last.keyset.version + 1
            if version != expected:
                raise KeysetError(
                    "keyset_gap",
                    f"The keyset has version {version}, but the next version is {expected}.",
                    "Publish the versions between first, oldest first.",
                )
            approve(connection)
            _insert_rows(connection, signed, content, actor, at)
            return True

        return signed, write(self._engine, work)


def _insert_rows(
    connection: Connection, signed: SignedKeyset, content: bytes, actor: str, at: datetime
) -> None:
    version = signed.keyset.version
    connection.execute(
        insert(keysets).values(
            version=version,
            follows=None if version == 1 else version - 1,
            digest=signed.digest,
            document=content,
            published_at=at,
            publisher=actor,
        )
    )
    revoked = [
        {"version": version, "key_id": key_id, "since": since}
        for key_id, since in signed.keyset.revoked_since().items()
    ]
    if revoked:
        connection.execute(insert(revoked_keys), revoked)
    body = {
        "version": version,
        "digest": signed.digest,
        "keys": [key.key_id for key in signed.keyset.keys],
        "revoked": [key.model_dump(mode="json") for key in signed.keyset.revoked],
    }
    append(connection, "keyset", f"keyset:{version}", body, actor=actor, at=at)


def _newest(connection: Connection) -> tuple[SignedKeyset | None, bytes | None]:
    """Return the newest version to which an unbroken chain of root signatures leads, and its bytes.

    Versions after a break are ignored: an attacker with write access to the database inserted them.
    """
    newest, content = None, None
    for document in connection.execute(_DOCUMENTS).scalars():
        try:
            signed = read_keyset(document)
            check_keyset(signed, newest)
        except KeysetError:
            break
        newest, content = signed, document
    return newest, content


_DOCUMENTS = select(keysets.c.document).order_by(keysets.c.version)


class RevokedKeys:
    """The keys that the newest keyset revokes, cached for ``FRESH_SECONDS``."""

    def __init__(
        self, store: KeysetStore, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._store = store
        self._now = now
        self._read_at: float | None = None
        self._key_ids: Collection[str] = frozenset()

    def __call__(self) -> Collection[str]:
        """Return key ids; raises SQLAlchemy's errors if the database cannot be reached."""
        now = time.monotonic()
        if self._read_at is None or now - self._read_at >= FRESH_SECONDS:
            self._key_ids = _revoked_keys(self._store.signed(), self._now())
            self._read_at = now
        return self._key_ids


def _revoked_keys(newest: SignedKeyset | None, now: datetime) -> frozenset[str]:
    if newest is None:
        return frozenset()
    since = newest.keyset.revoked_since()
    return frozenset(key_id for key_id, start in since.items() if start <= now)


class EnvelopeSignature(ResponseModel):
    """A signature of a DSSE envelope."""

    model_config = ConfigDict(extra="forbid")

    keyid: str
    sig: str = Field(json_schema_extra={"format": "byte"})


class SignedKeysetEnvelope(ResponseModel):
    """A DSSE envelope; its payload is the canonical JSON of a keyset version.

    That is root keys and threshold, signing keys with windows, revoked keys, and dates.
    """

    model_config = ConfigDict(extra="forbid")

    payload: str = Field(json_schema_extra={"format": "byte"})
    payload_type: str = Field(alias="payloadType", json_schema_extra={"const": PAYLOAD_TYPE})
    signatures: list[EnvelopeSignature]
