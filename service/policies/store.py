"""Policies and waivers in the database: stored as signed, and verified whenever they are read.

A row whose columns, document and signature do not match raises ``PolicyTampered``. Nothing is
certified then, because the policies in force are unknown. The last policy set is cached under its
head, so reading it costs one small query until something is added.

Transactions that change the policy set and transactions that rely on it exclude each other
(``lock_policies``): once a new version is visible, no certificate can appear by the old one.

The tables are append-only:

``policies``
    Every version of every policy with its signed envelope. The highest version of a name is active;
    a version is superseded, never withdrawn.
``waivers``
    Every waiver with its signed envelope, identified by the digest of its content.
``waiver_revocations``
    Revocations of waivers, at most one for each.
``waiver_uses``
    The certificates that rely on a waiver, to be revoked with it.

One transaction at a time writes the first three (``lock_policies``), so that their ids grow in the
order in which they become visible.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import ValidationError
from sqlalchemy import Connection, Engine, Row, Select, func, insert, select, tuple_

from affidavit.certificate.policy import (
    BUILT_IN,
    BadSignedDocument,
    MalformedPolicy,
    Policy,
    Waiver,
    open_document,
    policy_from,
    sign_document,
)
from affidavit.plan import Plan
from affidavit.service.core.database import (
    Store,
    hold,
)
from affidavit.service.core.errors import PolicyTampered
from affidavit.service.core.teams import TEAM, acting_for
from affidavit.service.identity.actor import CommandContext
from affidavit.service.log.entries import insert_logged, is_logged
from affidavit.service.log.signing_keys import insert_signing_key
from affidavit.service.policies.policy_set import (
    CertificationRequest,
    Head,
    PoliciesChanged,
    PolicySet,
)
from affidavit.service.tables.certificates import signing_keys
from affidavit.service.tables.log import log_entries
from affidavit.service.tables.policies import policies, waiver_revocations, waiver_uses, waivers
from affidavit.trust import (
    KeyFailure,
    PublicKey,
    SigningPort,
    read_envelope,
)
from affidavit.trust.log import LogEntry

LOCK = "affidavit.policies"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPolicy:
    """A version of a policy with its creator, time and signed envelope.

    The built-in policy has none of these.
    """

    policy: Policy
    created_by: str | None = None
    created_at: datetime | None = None
    envelope: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWaiver:
    """A waiver of ``team`` with its signed envelope, and its revocation, if any."""

    waiver: Waiver
    envelope: bytes
    team: str
    revoked_by: str | None = None
    revoked_at: datetime | None = None
    revocation_reason: str | None = None

    def status_at(self, now: datetime) -> Literal["in_force", "expired", "revoked"]:
        """Return the waiver's status at ``now``."""
        if self.revoked_at is not None:
            return "revoked"
        return "in_force" if now < self.waiver.expires else "expired"


class PolicyStore(Store):
    """Policies and waivers.

    ``keys`` returns the keys of the key directory, and ``now`` the time at which waivers expire.
    """

    def __init__(
        self,
        engine: Engine,
        keys: Callable[[], Iterable[Mapping[str, Any]]],
        now: Callable[[], datetime],
    ) -> None:
        super().__init__(engine)
        self._keys = keys
        self._now = now
        self._last: dict[str | None, PolicySet] = {}

    def policy_set(self) -> PolicySet:
        """Return the policy set in force; raises ``PolicyTampered``."""
        return self.read(self.policy_set_in)

    def policy_set_in(self, connection: Connection) -> PolicySet:
        """Return the policy set in force for ``connection``; raises ``PolicyTampered``."""
        head, team = _head(connection), TEAM.get()
        last = self._last.get(team, PolicySet())
        if head != last.head:
            last = self._load(connection, head)
            self._last[team] = last
        return last

    def certification_request(self, plan: Plan, requester: str, team: str) -> CertificationRequest:
        """Build the request under the policy set of ``team``; raises ``PolicyTampered``."""
        with acting_for(team):
            return CertificationRequest.under(self.policy_set(), plan, requester, team)

    def require_unchanged(self, connection: Connection, *requests: CertificationRequest) -> None:
        """Lock the policy set until the transaction ends.

        Raises ``PoliciesChanged`` and ``PolicyTampered``.
        """
        lock_policies(connection, shared=True)
        policies = self.policy_set_in(connection)
        if any(
            CertificationRequest.under(policies, request.plan, request.requester, request.team)
            != request
            for request in requests
        ):
            raise PoliciesChanged

    def versions(self) -> list[StoredPolicy]:
        """Return every version of every policy, newest first, and the built-in policy last."""
        stored = self.read(self._policies, _with_key(policies).order_by(policies.c.id.desc()))
        return [*stored, StoredPolicy(policy=BUILT_IN)]

    def version(self, name: str, version: int) -> StoredPolicy | None:
        """Return one version of a policy, if it exists."""
        if (name, version) == (BUILT_IN.name, BUILT_IN.version):
            return StoredPolicy(policy=BUILT_IN)
        query = _with_key(policies).where(policies.c.name == name, policies.c.version == version)
        return next(iter(self.read(self._policies, query)), None)

    def granted(self) -> list[StoredWaiver]:
        """Return every waiver, newest first."""
        return self.read(self._waivers, _waivers_query().order_by(waivers.c.id.desc()))

    def waiver(self, waiver_id: str) -> StoredWaiver | None:
        """Return a waiver, if it exists."""
        return self.read(self.waiver_in, waiver_id)

    def waiver_in(self, connection: Connection, waiver_id: str) -> StoredWaiver | None:
        """Return a waiver, if it exists."""
        query = _waivers_query().where(waivers.c.waiver_id == waiver_id)
        return next(iter(self._waivers(connection, query)), None)

    def _load(self, connection: Connection, head: Head) -> PolicySet:
        # The log is read first, so that concurrent changes are only in the rows.
        logged = _newest_in_log(connection)
        columns = (policies.c.name, policies.c.version)
        last = select(columns[0], func.max(columns[1])).group_by(columns[0])
        newest = tuple_(*columns).in_(last)
        active = [
            item.policy for item in self._policies(connection, _with_key(policies).where(newest))
        ]
        unrevoked = _waivers_query().where(waiver_revocations.c.id.is_(None))
        granted = [item.waiver for item in self._waivers(connection, unrevoked)]
        by_name = {policy.name: policy for policy in active}
        for name, version in logged.items():
            if name not in by_name or by_name[name].version < version:
                raise PolicyTampered(f"version {version} of the policy {name} is gone")
        return PolicySet(head, by_name, tuple(granted), self._now)

    def _policies(self, connection: Connection, query: Select[Any]) -> list[StoredPolicy]:
        keys, stored = self._key_records(), []
        for row in connection.execute(query).all():
            stored.append(_policy_of_row(row, keys))
            _require_logged(connection, policy_entry(row))
        return stored

    def _waivers(self, connection: Connection, query: Select[Any]) -> list[StoredWaiver]:
        # The log is read first, so that concurrent revocations are only in the rows.
        keys, stored, revoked = self._key_records(), [], _revoked_in_log(connection)
        for row in connection.execute(query).all():
            stored.append(_waiver_of_row(row, keys))
            _require_logged(connection, waiver_entry(row))
            if row.revoked_at is None and row.waiver_id in revoked:
                raise PolicyTampered(f"the revocation of the waiver {row.waiver_id} is gone")
        return stored

    def _key_records(self) -> dict[str, Mapping[str, Any]]:
        return {record["key_id"]: record for record in self._keys()}


# ---- in the transaction of a connection ----------------------------------------------


def find_tampered(connection: Connection) -> Iterator[str]:
    """Yield the mismatches of policies and waivers, revoked ones included, with stored keys."""
    for query, read in ((_with_key(policies), _policy_of_row), (_waivers_query(), _waiver_of_row)):
        for row in connection.execute(query):
            try:
                read(row, {})
            except PolicyTampered as error:
                yield str(error)


def lock_policies(connection: Connection, *, shared: bool = False) -> None:
    """Lock the policy set until the transaction ends; ``shared`` only prevents changes."""
    hold(connection, LOCK, shared=shared)


def insert_policy(
    connection: Connection, policy: Policy, key: SigningPort, context: CommandContext
) -> StoredPolicy:
    """Sign ``policy``, store it and log it."""
    envelope = sign_document("policy", policy.as_document(), key)
    insert_signing_key(connection, key.public.as_record(), context.at)
    created: dict[str, Any] = {"created_by": context.actor, "created_at": context.at}
    row = {
        **policy.reference(),
        "envelope": envelope,
        "key_id": key.key_id,
        **created,
    }
    insert_logged(connection, policies, row, policy_entry)
    return StoredPolicy(policy=policy, envelope=envelope, **created)


def insert_waiver(
    connection: Connection, waiver: Waiver, team: str, key: SigningPort, at: datetime
) -> StoredWaiver:
    """Sign ``waiver``, store it for plans of ``team`` and log it."""
    envelope = sign_document("waiver", waiver.as_document(), key)
    insert_signing_key(connection, key.public.as_record(), at)
    row = {
        "waiver_id": waiver.id,
        "envelope": envelope,
        "key_id": key.key_id,
        "owner": waiver.owner,
        "created_by": waiver.created_by,
        "created_at": at,
        "expires_at": waiver.expires,
        "team": team,
    }
    insert_logged(connection, waivers, row, waiver_entry)
    return StoredWaiver(waiver=waiver, envelope=envelope, team=team)


def record_waivers(
    connection: Connection, certificate_id: str, used: Iterable[Waiver], at: datetime
) -> None:
    """Record the waivers that a certificate relies on."""
    for waiver_id in {waiver.id for waiver in used}:
        connection.execute(
            insert(waiver_uses).values(waiver_id=waiver_id, certificate_id=certificate_id, at=at)
        )


def certificates_with_waiver(connection: Connection, waiver_id: str) -> list[str]:
    """Return the ids of the certificates that rely on a waiver."""
    query = select(waiver_uses.c.certificate_id).where(waiver_uses.c.waiver_id == waiver_id)
    return sorted(set(connection.execute(query).scalars()))


# Built once, because it runs for every plan and building it takes longer than running it.
_HEAD = select(
    *(
        select(func.coalesce(func.max(table.c.id), 0)).scalar_subquery()
        for table in (policies, waivers, waiver_revocations)
    )
)


def _head(connection: Connection) -> Head:
    policy_id, waiver_id, revocation_id = connection.execute(_HEAD).one()
    return int(policy_id), int(waiver_id), int(revocation_id)


def _with_key(table: Any) -> Select[Any]:
    return select(table, signing_keys.c.record.label("key_record")).join_from(
        table, signing_keys, table.c.key_id == signing_keys.c.key_id, isouter=True
    )


def _waivers_query() -> Select[Any]:
    revoked = waiver_revocations.c
    return (
        _with_key(waivers)
        .outerjoin(waiver_revocations, revoked.waiver_id == waivers.c.waiver_id)
        .add_columns(revoked.revoked_by, revoked.at.label("revoked_at"), revoked.reason)
    )


def policy_entry(row: Any) -> LogEntry:
    """Build the log entry of a row of ``policies``."""
    body = {
        "name": row.name,
        "version": row.version,
        "digest": row.digest,
        "key_id": row.key_id,
        "policy": _predicate(row.envelope),
    }
    return _entry("policy", row.digest, row, body)


def waiver_entry(row: Any) -> LogEntry:
    """Build the log entry of a row of ``waivers``."""
    body = {
        "event": "granted",
        "key_id": row.key_id,
        "team": row.team,
        "waiver": _predicate(row.envelope),
    }
    return _entry("waiver", row.waiver_id, row, body)


def _entry(kind: str, subject: str, row: Any, body: Mapping[str, Any]) -> LogEntry:
    actor, at = row.created_by, row.created_at
    return LogEntry(kind=kind, subject=subject, actor=actor, at=at, body=body)


def _predicate(envelope: bytes) -> Any:
    return json.loads(read_envelope(json.loads(envelope)).payload)["predicate"]


def _require_logged(connection: Connection, entry: LogEntry) -> None:
    # A signature alone is not enough, because somebody who inserts rows can also insert a key.
    if not is_logged(connection, entry):
        raise PolicyTampered(f"the {entry.kind} {entry.subject} was not logged")


def _revoked_in_log(connection: Connection) -> set[str]:
    """Return the ids of the waivers whose revocation was logged."""
    query = select(log_entries.c.content).where(log_entries.c.kind == "waiver")
    entries = map(json.loads, connection.execute(query).scalars())
    return {entry["subject"] for entry in entries if entry["body"].get("event") == "revoked"}


def _newest_in_log(connection: Connection) -> dict[str, int]:
    """Return the newest version of each policy that was logged."""
    query = select(log_entries.c.content).where(log_entries.c.kind == "policy")
    newest: dict[str, int] = {}
    for content in connection.execute(query).scalars():
        body = json.loads(content)["body"]
        newest[body["name"]] = max(newest.get(body["name"], 0), body["version"])
    return newest


def _policy_of_row(row: Row[Any], keys: Mapping[str, Mapping[str, Any]]) -> StoredPolicy:
    label = f"the policy {row.name} version {row.version}"
    document = _open_document("policy", row, keys, label)
    try:
        policy = policy_from(document)
    except MalformedPolicy as error:
        raise PolicyTampered(f"{label} cannot be read: {error.reasons[0]}") from None
    if (policy.name, policy.version, policy.digest()) != (
        row.name,
        row.version,
        row.digest,
    ):
        raise PolicyTampered(f"{label} does not match its signed document")
    return StoredPolicy(
        policy=policy,
        created_by=row.created_by,
        created_at=row.created_at,
        envelope=bytes(row.envelope),
    )


def _waiver_of_row(row: Row[Any], keys: Mapping[str, Mapping[str, Any]]) -> StoredWaiver:
    label = f"the waiver {row.waiver_id}"
    document = _open_document("waiver", row, keys, label)
    try:
        waiver = Waiver.model_validate(document)
    except ValidationError as error:
        raise PolicyTampered(f"{label} cannot be read: {error.error_count()} errors") from None
    if (waiver.id, waiver.owner, waiver.created_by, waiver.expires) != (
        row.waiver_id,
        row.owner,
        row.created_by,
        row.expires_at,
    ):
        raise PolicyTampered(f"{label} does not match its signed document")
    return StoredWaiver(
        waiver=waiver,
        envelope=bytes(row.envelope),
        team=row.team,
        revoked_by=row.revoked_by,
        revoked_at=row.revoked_at,
        revocation_reason=row.reason,
    )


def _open_document(
    kind: Any, row: Row[Any], keys: Mapping[str, Mapping[str, Any]], label: str
) -> dict[str, Any]:
    """Open the signed document; the key directory's record of a key takes precedence."""
    try:
        record = keys.get(row.key_id) or json.loads(row.key_record)
        return open_document(kind, bytes(row.envelope), PublicKey.from_record(dict(record)))
    except (BadSignedDocument, KeyFailure, ValueError, TypeError) as error:
        raise PolicyTampered(f"{label} does not match its signature: {error}") from None
