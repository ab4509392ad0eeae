"""Policies and waivers in the database: kept as they were signed, checked whenever read.

A row whose columns, document or signature do not fit each other raises ``Altered``; nothing
is certified then, because what the rules are is not known. Reading the rulebook costs one
small query as long as nothing was added: the last one read is kept, under its head.

What changes the rules and what is judged by them exclude each other (``change``, ``rely``):
when a new version becomes visible, no certificate by the old one can still appear.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, Engine, RowMapping, Select, func, insert, select
from sqlalchemy.exc import IntegrityError

from affidavit.certificate import KeyFailure, PublicKey, SigningPort
from affidavit.certificate.policy import (
    MalformedPolicy,
    NotAsSigned,
    Policy,
    Waiver,
    opened,
    policy_from,
    sealed,
)
from affidavit.service.database import hold, reader, writer
from affidavit.service.policies.policy_tables import (
    policies,
    waiver_revocations,
    waiver_uses,
    waivers,
)
from affidavit.service.policies.rulebook import Head, Rulebook
from affidavit.service.tables import signing_keys

LOCK = "affidavit.policies"


class Altered(Exception):
    """A policy or waiver in the database is not what was signed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPolicy:
    """A version of a policy, with who set it, when, and the signed envelope."""

    policy: Policy
    created_by: str
    created_at: datetime
    envelope: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptWaiver:
    """A waiver with its signed envelope, and its revocation if there was one."""

    waiver: Waiver
    envelope: bytes
    revoked_by: str | None = None
    revoked_at: datetime | None = None
    revoked_because: str | None = None


class PolicyStore:
    """Policies and waivers behind one engine; ``keys`` gives the keys that may have signed."""

    def __init__(self, engine: Engine, keys: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self.reader = reader(engine)
        self.writer = writer(engine)
        self._keys = keys
        self._last = Rulebook()

    def rulebook(self) -> Rulebook:
        """What is in force now; raises ``Altered``."""
        with self.reader.connect() as connection:
            return self.rulebook_in(connection)

    def rulebook_in(self, connection: Connection) -> Rulebook:
        """What is in force as ``connection`` sees it; raises ``Altered``."""
        head = _head(connection)
        last = self._last
        if head != last.head:
            last = self._read(connection, head)
            self._last = last
        return last

    def versions(self) -> list[KeptPolicy]:
        """Every version of every policy, newest first."""
        with self.reader.connect() as connection:
            rows = connection.execute(_with_key(policies).order_by(policies.c.id.desc()))
            known = self._known()
            return [_policy(row, known) for row in rows.mappings()]

    def version(self, name: str, version: int) -> KeptPolicy | None:
        """One version of a policy, or None."""
        query = _with_key(policies).where(policies.c.name == name, policies.c.version == version)
        with self.reader.connect() as connection:
            row = connection.execute(query).mappings().first()
            return None if row is None else _policy(row, self._known())

    def granted(self) -> list[KeptWaiver]:
        """Every waiver, newest first."""
        with self.reader.connect() as connection:
            rows = connection.execute(_waivers().order_by(waivers.c.id.desc())).mappings()
            known = self._known()
            return [_waiver(row, known) for row in rows]

    def waiver(self, waiver_id: str) -> KeptWaiver | None:
        """One waiver, or None."""
        with self.reader.connect() as connection:
            return self.waiver_in(connection, waiver_id)

    def waiver_in(self, connection: Connection, waiver_id: str) -> KeptWaiver | None:
        """One waiver, or None."""
        query = _waivers().where(waivers.c.waiver_id == waiver_id)
        row = connection.execute(query).mappings().first()
        return None if row is None else _waiver(row, self._known())

    def _read(self, connection: Connection, head: Head) -> Rulebook:
        known = self._known()
        newest = select(func.max(policies.c.id)).group_by(policies.c.name)
        rows = connection.execute(_with_key(policies).where(policies.c.id.in_(newest))).mappings()
        active = [_policy(row, known).policy for row in rows]
        unrevoked = _waivers().where(waiver_revocations.c.id.is_(None))
        granted = [_waiver(row, known).waiver for row in connection.execute(unrevoked).mappings()]
        return Rulebook(head, {item.name: item for item in active}, tuple(granted))

    def _known(self) -> dict[str, Mapping[str, Any]]:
        return {record["key_id"]: record for record in self._keys()}


# ---- in the transaction of a connection ----------------------------------------------


def change(connection: Connection) -> None:
    """Let nobody else change the rules, or keep what was judged by them, until we are done."""
    hold(connection, LOCK)


def rely(connection: Connection) -> None:
    """Let nobody change the rules until we are done."""
    hold(connection, LOCK, shared=True)


def keep_policy(
    connection: Connection, policy: Policy, key: SigningPort, actor: str, at: datetime
) -> KeptPolicy:
    """Sign ``policy`` and keep it."""
    envelope = sealed("policy", policy.as_document(), key)
    _keep_key(connection, key, at)
    connection.execute(
        insert(policies).values(
            name=policy.name,
            version=policy.version,
            digest=policy.digest(),
            envelope=envelope,
            key_id=key.key_id,
            created_by=actor,
            created_at=at,
        )
    )
    return KeptPolicy(policy=policy, created_by=actor, created_at=at, envelope=envelope)


def keep_waiver(
    connection: Connection, waiver: Waiver, key: SigningPort, at: datetime
) -> KeptWaiver:
    """Sign ``waiver`` and keep it."""
    envelope = sealed("waiver", waiver.as_document(), key)
    _keep_key(connection, key, at)
    connection.execute(
        insert(waivers).values(
            waiver_id=waiver.id,
            envelope=envelope,
            key_id=key.key_id,
            owner=waiver.owner,
            created_by=waiver.created_by,
            created_at=at,
            expires_at=waiver.expires,
        )
    )
    return KeptWaiver(waiver=waiver, envelope=envelope)


def note_use(
    connection: Connection, certificate_id: str, used: Iterable[Waiver], at: datetime
) -> None:
    """Remember which waivers a certificate rests on."""
    for waiver in {item.id for item in used}:
        connection.execute(
            insert(waiver_uses).values(waiver_id=waiver, certificate_id=certificate_id, at=at)
        )


def certificates_by(connection: Connection, waiver_id: str) -> list[str]:
    """The ids of the certificates that rest on a waiver."""
    query = select(waiver_uses.c.certificate_id).where(waiver_uses.c.waiver_id == waiver_id)
    return sorted(set(connection.execute(query).scalars()))


# Built once: this is asked for every plan, and building it costs more than running it.
_HEAD = select(
    *(
        select(func.coalesce(func.max(table.c.id), 0)).scalar_subquery()
        for table in (policies, waivers, waiver_revocations)
    )
)


def _head(connection: Connection) -> Head:
    found = connection.execute(_HEAD).one()
    return int(found[0]), int(found[1]), int(found[2])


def _with_key(table: Any) -> Select[Any]:
    return select(table, signing_keys.c.record.label("key_record")).join_from(
        table, signing_keys, table.c.key_id == signing_keys.c.key_id
    )


def _waivers() -> Select[Any]:
    revoked = waiver_revocations.c
    return (
        _with_key(waivers)
        .outerjoin(waiver_revocations, revoked.waiver_id == waivers.c.waiver_id)
        .add_columns(revoked.revoked_by, revoked.at.label("revoked_at"), revoked.reason)
    )


def _policy(row: RowMapping, known: Mapping[str, Mapping[str, Any]]) -> KeptPolicy:
    what = f"the policy {row['name']} version {row['version']}"
    document = _opened("policy", row, known, what)
    try:
        policy = policy_from(document)
    except MalformedPolicy as error:
        raise Altered(f"{what} cannot be read: {error.reasons[0]}") from None
    if (policy.name, policy.version, policy.digest()) != (
        row["name"],
        row["version"],
        row["digest"],
    ):
        raise Altered(f"{what} is not what was signed under that name")
    return KeptPolicy(
        policy=policy,
        created_by=row["created_by"],
        created_at=row["created_at"],
        envelope=bytes(row["envelope"]),
    )


def _waiver(row: RowMapping, known: Mapping[str, Mapping[str, Any]]) -> KeptWaiver:
    what = f"the waiver {row['waiver_id']}"
    document = _opened("waiver", row, known, what)
    try:
        waiver = Waiver.model_validate(document)
    except ValidationError as error:
        raise Altered(f"{what} cannot be read: {error.error_count()} errors") from None
    if (waiver.id, waiver.owner, waiver.created_by, waiver.expires) != (
        row["waiver_id"],
        row["owner"],
        row["created_by"],
        row["expires_at"],
    ):
        raise Altered(f"{what} is not what was signed under that id")
    return KeptWaiver(
        waiver=waiver,
        envelope=bytes(row["envelope"]),
        revoked_by=row["revoked_by"],
        revoked_at=row["revoked_at"],
        revoked_because=row["reason"],
    )


def _opened(
    kind: Any, row: RowMapping, known: Mapping[str, Mapping[str, Any]], what: str
) -> dict[str, Any]:
    """The signed document; the key directory's record of a key counts before the database's."""
    try:
        record = known.get(row["key_id"]) or json.loads(row["key_record"])
        return opened(kind, bytes(row["envelope"]), PublicKey.from_record(dict(record)))
    except (NotAsSigned, KeyFailure, ValueError) as error:
        raise Altered(f"{what} is not what was signed: {error}") from None


def _keep_key(connection: Connection, key: SigningPort, at: datetime) -> None:
    known = select(signing_keys.c.key_id).where(signing_keys.c.key_id == key.key_id)
    if connection.execute(known).first() is not None:
        return
    record = json.dumps(key.public.as_record(), sort_keys=True)
    try:
        with connection.begin_nested():
            connection.execute(
                insert(signing_keys).values(key_id=key.key_id, record=record, first_used_at=at)
            )
    except IntegrityError:
        return  # a certificate was quicker to keep it
