"""The head of a ledger, held against the log before anything is added to it.

The last event of a ledger carries the state that the next decision starts from. Whoever owns the
database can rewrite both, so each event puts the digest of its state into the log, which is signed
outside the database: a head is genuine if its row says what its log entry says, and that entry is
under the signed root. A ledger whose newest entry in the log has no event lost its end.

Events of releases before this one have no digest; of those the rest is checked.

>>> LedgerAltered("The head is not the one in the log.", "Restore the ledger.").code
'ledger_altered'
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from sqlalchemy import Connection, bindparam, func, select

from affidavit.certificate.log import LogEntry
from affidavit.service.errors import DomainError
from affidavit.service.ledger.ledger_tables import ledger_events, ledgers
from affidavit.service.ledger.state import LedgerScope
from affidavit.service.log.entries import EntryKind
from affidavit.service.log.log_tables import log_entries, log_leaves
from affidavit.service.log.stored_tree import LogDamaged, verify_range

ENTRY_KINDS: dict[str, EntryKind] = {
    "budget": "budget",
    "reserve": "reservation",
    "commit": "commitment",
    "settle": "settlement",
    "release": "release",
}
"""The log's word for each kind of event."""
NEWEST = 64
"""Entries at the end of the log that are held against the ledgers."""

_HEAD = select(ledger_events).where(
    ledger_events.c.ledger_id == bindparam("ledger"), ledger_events.c.seq == bindparam("last")
)
_ENTRY = (
    select(log_leaves.c.leaf_index)
    .select_from(log_entries)
    .join(log_leaves, isouter=True)
    .where(
        log_entries.c.subject == bindparam("about"), log_entries.c.content == bindparam("content")
    )
)
_NEWEST = (
    select(log_entries.c.content)
    .where(log_entries.c.kind.in_(tuple(ENTRY_KINDS.values())))
    .order_by(log_entries.c.id.desc())
    .limit(NEWEST)
)
_LAST = (
    select(ledgers.c.id, ledgers.c.dataset, ledgers.c.unit, ledgers.c.adjacency)
    .add_columns(func.max(ledger_events.c.seq).label("seq"))
    .join(ledger_events, isouter=True)
    .group_by(ledgers.c.id, ledgers.c.dataset, ledgers.c.unit, ledgers.c.adjacency)
)


class LedgerAltered(DomainError):
    """A ledger is not what the log says of it; nothing is reserved or given back any more."""

    code = "ledger_altered"
    status: ClassVar[int] = 503


def state_digest(state: str) -> str:
    """The digest of a state as it stands in a row, as the log has it."""
    return "sha256:" + hashlib.sha256(state.encode()).hexdigest()


def entry_body(scope: LedgerScope, seq: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the log says of an event."""
    return {"ledger": scope.as_dict(), "seq": seq, **body}


def logged_as(scope: LedgerScope, event: Mapping[str, Any]) -> str:
    """The content of the log entry that was written with the row ``event``."""
    entry = LogEntry(
        kind=ENTRY_KINDS[event["kind"]],
        subject=event["reservation_id"] or str(scope),
        actor=event["actor"],
        at=event["at"],
        body=entry_body(scope, event["seq"], json.loads(event["body"])),
    )
    return entry.content.decode()


def require_unaltered(
    connection: Connection, ledger_id: int, scope: LedgerScope, last: int
) -> None:
    """Raise ``LedgerAltered`` unless event number ``last`` is the head that the log has."""
    fault = _of_head(connection, ledger_id, scope, last)
    fault = fault or _of_end(_newest_in_log(connection).get(scope, 0), last)
    if fault is not None:
        raise _altered(scope, fault)


def require_all_unaltered(connection: Connection) -> None:
    """The same for every ledger; raises ``LedgerAltered`` for the first that was altered."""
    # The log is read first: a ledger that goes on meanwhile is only ever ahead of it.
    logged = _newest_in_log(connection)
    for row in connection.execute(_LAST).all():
        scope = LedgerScope(dataset=row.dataset, unit=row.unit, adjacency=row.adjacency)
        last = row.seq or 0
        fault = _of_end(logged.pop(scope, 0), last) or _of_head(connection, row.id, scope, last)
        if fault is not None:
            raise _altered(scope, fault)
    for scope in logged:
        raise _altered(scope, "the log has it and the database has not")


def _of_head(connection: Connection, ledger_id: int, scope: LedgerScope, last: int) -> str | None:
    event = connection.execute(_HEAD, {"ledger": ledger_id, "last": last}).mappings().first()
    if event is None:
        return "it has no event"
    try:
        digest = json.loads(event["body"]).get("state_digest")
        content = logged_as(scope, dict(event))
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its last event cannot be read"
    if digest is not None and digest != state_digest(event["state"]):
        return "its state is not the one in the log"
    about = event["reservation_id"] or str(scope)
    entry = connection.execute(_ENTRY, {"about": about, "content": content}).first()
    if entry is None:
        return "its last event is not the one in the log"
    if entry.leaf_index is None:
        return None  # it waits for its place in the log, for less than a second
    try:
        proved = verify_range(connection, entry.leaf_index, entry.leaf_index).proved
    except (ValueError, LogDamaged) as error:
        return f"the log cannot show its last event: {error}"
    return None if proved else "the log's entry of its last event is not under the signed root"


def _of_end(logged: int, last: int) -> str | None:
    return None if logged <= last else f"the log has event {logged} and it ends at {last}"


def _newest_in_log(connection: Connection) -> dict[LedgerScope, int]:
    """The number of the last event of each ledger among the newest entries of the log."""
    last: dict[LedgerScope, int] = {}
    for content in connection.execute(_NEWEST).scalars():
        body = json.loads(content)["body"]
        scope = LedgerScope(**body["ledger"])
        last[scope] = max(last.get(scope, 0), int(body["seq"]))
    return last


def _altered(scope: LedgerScope, fault: str) -> LedgerAltered:
    return LedgerAltered(
        f"{scope}: {fault}.", "Tell the operator: run affidavit audit verify, and restore a backup."
    )
