"""Keyset versions in the database: published once, in order, and served as they were signed.

The service cannot make a keyset, for it has no root key. It checks one before it keeps it
as every verifier does: by the version before, whose roots have to have signed it. The very
first version has only its own roots to vouch for it; verifiers, who are to have the roots
from elsewhere, do not rely on the service for that.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, Engine, insert, select
from sqlalchemy.exc import IntegrityError

from affidavit.certificate import KeysetError, SignedKeyset, accept, read_keyset
from affidavit.service.database import reader, writer
from affidavit.service.keysets.keyset_tables import keysets, revoked_keys
from affidavit.service.log import entries


class KeysetStore:
    """Keysets behind one engine; safe to call from several threads and processes."""

    def __init__(self, engine: Engine) -> None:
        self._reader = reader(engine)
        self._writer = writer(engine)

    def newest(self) -> bytes | None:
        """The newest version, byte for byte."""
        with self._reader.connect() as connection:
            return _newest(connection)

    def find(self, version: int) -> bytes | None:
        """That version, byte for byte."""
        query = select(keysets.c.document).where(keysets.c.version == version)
        with self._reader.connect() as connection:
            return connection.execute(query).scalar_one_or_none()

    def publish(self, raw: bytes, *, actor: str, at: datetime) -> tuple[SignedKeyset, bool]:
        """Keep the keyset of ``raw``; returns it and whether it is new here.

        Raises ``KeysetError``: of ``accept``, or ``keyset_gap`` when a version between is
        missing. The version that is the newest already is no error.
        """
        found = read_keyset(raw)
        try:
            return found, self._keep(found, raw, actor, at)
        except IntegrityError:  # somebody was quicker: look again at what is newest now
            return found, self._keep(found, raw, actor, at)

    def _keep(self, found: SignedKeyset, raw: bytes, actor: str, at: datetime) -> bool:
        with self._writer.begin() as connection:
            newest = _newest(connection)
            last = None if newest is None else read_keyset(newest)
            accept([found], last, at)
            wanted = 1 if last is None else last.keyset.version + 1
            version = found.keyset.version
            if last is not None and found.digest == last.digest:
                return False
            if version != wanted:
                raise KeysetError(
                    "keyset_gap",
                    f"the keyset is version {version}, and version {wanted} is to come next.",
                    "Publish the versions between first, oldest first.",
                )
            _write(connection, found, raw, actor, at)
            return True


def _write(
    connection: Connection, found: SignedKeyset, raw: bytes, actor: str, at: datetime
) -> None:
    version = found.keyset.version
    connection.execute(
        insert(keysets).values(
            version=version,
            follows=None if version == 1 else version - 1,
            digest=found.digest,
            document=raw,
            published_at=at,
            publisher=actor,
        )
    )
    revoked = [
        {"version": version, "key_id": key_id, "since": since}
        for key_id, since in found.keyset.revoked_since().items()
    ]
    if revoked:
        connection.execute(insert(revoked_keys), revoked)
    said = {
        "version": version,
        "digest": found.digest,
        "keys": [key.key_id for key in found.keyset.keys],
        "revoked": [item.model_dump(mode="json") for item in found.keyset.revoked],
    }
    entries.append(connection, "keyset", f"keyset:{version}", said, actor=actor, at=at)


def _newest(connection: Connection) -> bytes | None:
    query = select(keysets.c.document).order_by(keysets.c.version.desc()).limit(1)
    return connection.execute(query).scalar_one_or_none()
