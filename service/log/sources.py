"""Which rows stand behind which entries, and what of a row the log says.

A source turns a row into the entry that must tell of it: kind, subject, actor, time, and
of the body whatever the row holds too. The same part is taken of the entries' bodies;
both sides then have to be equal, each way, to the second.

A new table whose rows are logged is a source here. An entry of a kind without a source is
held to the tree alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, Table, select

from affidavit.certificate import read_envelope
from affidavit.certificate.log import Entry
from affidavit.plan import canonical_json
from affidavit.service.identity.tables import token_revocations, tokens
from affidavit.service.keysets.tables import keysets
from affidavit.service.ledger.rows import ENTRY_KINDS, Scope, entry_body
from affidavit.service.ledger.tables import ledger_events, ledgers
from affidavit.service.lifecycle.tables import approvals, revocations
from affidavit.service.log.entries import entry_of
from affidavit.service.policies.tables import policies, waiver_revocations, waivers
from affidavit.service.runs.rows import entry_body as run_entry_body
from affidavit.service.runs.tables import run_events
from affidavit.service.tables import certificates

Body = Mapping[str, Any]
Part = Callable[[Body], Body | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A table, the kinds of entries that tell of its rows, and what they have in common.

    ``entry`` makes of a row what its entry must say; ``part`` takes the same out of an
    entry's body, and is None for one that is about another table.
    """

    table: Table
    kinds: tuple[str, ...]
    entry: Callable[[Any], Entry]
    part: Part

    @property
    def query(self) -> Select[Any]:
        """All rows of the table, with what ``entry`` needs of others."""
        columns = [*self.table.columns]
        if self.table is ledger_events:
            columns += [ledgers.c.dataset, ledgers.c.unit, ledgers.c.adjacency]
            return select(*columns).join(ledgers).order_by(*self.table.primary_key)
        return select(*columns).order_by(*self.table.primary_key)

    def where(self, row: Any) -> str:
        """The name of a row."""
        keys = (str(getattr(row, column.name)) for column in self.table.primary_key)
        return f"{self.table.name} {', '.join(keys)}"

    def of_row(self, row: Any) -> bytes:
        """What must be said of a row."""
        entry = self.entry(row)
        return _spelled(entry.kind, entry.subject, entry.actor, entry.at, entry.body)

    def of_entry(self, content: Mapping[str, Any]) -> bytes | None:
        """What an entry says; None if it is about another table."""
        body = self.part(content["body"]) if content["kind"] in self.kinds else None
        if body is None:
            return None
        at = datetime.fromisoformat(content["at"])
        return _spelled(content["kind"], content["subject"], content["actor"], at, body)


def _spelled(kind: str, subject: str, actor: str, at: datetime, body: Body) -> bytes:
    second = at.astimezone(UTC).isoformat(timespec="seconds")
    return canonical_json([kind, subject, actor, second, dict(body)])


def _only(*names: str) -> Part:
    """The body's fields of these names."""
    return lambda body: {name: body.get(name) for name in names}


def _of(field: str, value: str, *names: str) -> Part:
    """The same, of bodies whose ``field`` is ``value``."""
    only = _only(*names)
    return lambda body: only(body) if body.get(field) == value else None


def _certificate(row: Any) -> Entry:
    return entry_of(bytes(row.bundle))


def _approval(row: Any) -> Entry:
    body = {
        "issue": row.issue,
        "envelope": row.envelope_digest,
        "decision": row.decision,
        "comment": row.comment,
    }
    return _entry("approval", row.certificate_id, row.approver, row.at, body)


def _revocation(row: Any) -> Entry:
    body = {
        "issue": row.issue,
        "envelope": row.envelope_digest,
        "code": row.code,
        "reason": row.reason,
    }
    return _entry("revocation", row.certificate_id, row.revoked_by, row.at, body)


def _revoked(body: Body) -> Body:
    envelope = body.get("envelope", body.get("envelope_digest"))
    return {**{name: body.get(name) for name in ("issue", "code", "reason")}, "envelope": envelope}


def _policy(row: Any) -> Entry:
    body = {
        "name": row.name,
        "version": row.version,
        "digest": row.digest,
        "key_id": row.key_id,
        "policy": _payload(row.envelope)["predicate"],
    }
    return _entry("policy", row.digest, row.created_by, row.created_at, body)


def _waiver(row: Any) -> Entry:
    body = {"key_id": row.key_id, "waiver": _payload(row.envelope)["predicate"]}
    return _entry("waiver", row.waiver_id, row.created_by, row.created_at, body)


def _waiver_revocation(row: Any) -> Entry:
    return _entry("waiver", row.waiver_id, row.revoked_by, row.at, {"reason": row.reason})


def _token(row: Any) -> Entry:
    body = {
        "name": row.name,
        "scopes": row.scopes.split(),
        "expires_at": row.expires_at.isoformat(timespec="microseconds"),
        "person": row.person,
    }
    return _entry("token", row.id, row.created_by, row.created_at, body)


def _token_revocation(row: Any) -> Entry:
    return _entry("token", row.token_id, row.revoked_by, row.revoked_at, {"reason": row.reason})


def _keyset(row: Any) -> Entry:
    body = {"version": row.version, "digest": row.digest}
    return _entry("keyset", f"keyset:{row.version}", row.publisher, row.published_at, body)


def _ledger_event(row: Any) -> Entry:
    scope = Scope(dataset=row.dataset, unit=row.unit, adjacency=row.adjacency)
    body = entry_body(scope, row.seq, json.loads(row.body))
    subject = row.reservation_id or str(scope)
    return _entry(ENTRY_KINDS[row.kind], subject, row.actor, row.at, body)


def _run_event(row: Any) -> Entry:
    body = run_entry_body(row.kind, row.seq, json.loads(row.body))
    return _entry("run", row.run_id, row.actor, row.at, body)


def _entry(kind: str, subject: str, actor: str, at: datetime, body: Body) -> Entry:
    return Entry(kind=kind, subject=subject, actor=actor, at=at, body=body)


def _payload(envelope: bytes) -> Any:
    return json.loads(read_envelope(json.loads(envelope)).payload)


_APPROVAL = _only("issue", "envelope", "decision", "comment")
_POLICY = _only("name", "version", "digest", "key_id", "policy")
_GRANTED = _of("event", "granted", "key_id", "waiver")
_CREATED = _of("action", "created", "name", "scopes", "expires_at", "person")

SOURCES = (
    Source(table=certificates, kinds=("certificate", "refusal"), entry=_certificate, part=dict),
    Source(table=approvals, kinds=("approval",), entry=_approval, part=_APPROVAL),
    Source(table=revocations, kinds=("revocation",), entry=_revocation, part=_revoked),
    Source(table=policies, kinds=("policy",), entry=_policy, part=_POLICY),
    Source(table=waivers, kinds=("waiver",), entry=_waiver, part=_GRANTED),
    Source(
        table=waiver_revocations,
        kinds=("waiver",),
        entry=_waiver_revocation,
        part=_of("event", "revoked", "reason"),
    ),
    Source(table=tokens, kinds=("token",), entry=_token, part=_CREATED),
    Source(
        table=token_revocations,
        kinds=("token",),
        entry=_token_revocation,
        part=_of("action", "revoked", "reason"),
    ),
    Source(table=keysets, kinds=("keyset",), entry=_keyset, part=_only("version", "digest")),
    Source(
        table=ledger_events,
        kinds=tuple(ENTRY_KINDS.values()),
        entry=_ledger_event,
        part=dict,
    ),
    Source(table=run_events, kinds=("run",), entry=_run_event, part=dict),
)
