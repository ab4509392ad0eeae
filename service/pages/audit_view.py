"""What the pages of the audit log show: the checkpoint, entries, one entry with its proof.

Entries come in the order of the log, newest first, in pages that follow a cursor; a search
by kind or subject follows its index. Only what a checkpoint covers is shown; what waits for
its place is counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args
from urllib.parse import quote

from sqlalchemy import Connection, Select, func, select

from affidavit.service.log.entries import EntryKind
from affidavit.service.log.log_tables import log_entries, log_leaves, log_pending
from affidavit.service.log.reader import InclusionProof, LogReader, NotLogged
from affidavit.service.log.stored_tree import RangeCheck, last_checkpoint
from affidavit.service.pages.kept_checkpoint import Held
from affidavit.service.pages.text import short

KINDS: tuple[str, ...] = get_args(EntryKind)
PAGE = 50
EXPORT = 1000
"""Entries of one answer, on a page and as data."""
MOST_WAITING = 1000
_SAID = 4
_LONGEST = 64
_OF_CERTIFICATES = frozenset({"certificate", "refusal", "approval", "revocation"})
_DULL = frozenset({"key_id", "expires_at", "digest", "envelope", "envelope_digest", "seq"})
"""Fields that say little to a reader; the entry's own page has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointShown:
    """The newest checkpoint, its signature checked."""

    origin: str
    size: int
    root: str
    signed_at: datetime | None
    key_id: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of the log; ``said`` is the beginning of what its body says.

    ``page`` is where its subject is shown, None where it has no page of its own.
    """

    index: int
    kind: str
    subject: str
    actor: str
    at: str
    said: str
    leaf_hash: str
    page: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What of the log is wanted: by kind or subject, and what comes before a place."""

    kind: str = ""
    subject: str = ""
    before: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A part of the log; ``next`` goes on behind it, None where it ends.

    ``checked`` is a stretch that was hashed again, ``held`` the checkpoint ``kept`` by the
    reader and held to the log; ``wrong`` and ``not_held`` say why there is none.
    """

    checkpoint: CheckpointShown | None
    waiting: int
    search: Search
    kinds: tuple[str, ...]
    entries: tuple[Entry, ...]
    next: int | None
    checked: RangeCheck | None = None
    wrong: str = ""
    kept: str = ""
    held: Held | None = None
    not_held: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedEntry:
    """One entry, the very bytes that were hashed, and its way up to the signed root."""

    entry: Entry
    content: str
    proof: tuple[str, ...]
    checkpoint: CheckpointShown


def audit_view(
    connection: Connection,
    search: Search,
    limit: int = PAGE,
    *,
    checked: RangeCheck | None = None,
    wrong: str = "",
) -> Audit:
    """At most ``limit`` entries."""
    checkpoint = checkpoint_of(connection)
    size = 0 if checkpoint is None else checkpoint.size
    query = _query(search, size).limit(limit + 1)
    rows = connection.execute(query).all()
    cursor = "id" if search.kind or search.subject else "leaf_index"
    return Audit(
        checkpoint=checkpoint,
        waiting=_waiting(connection),
        search=search,
        kinds=KINDS,
        entries=tuple(_entry(row.leaf_index, row.leaf_hash, row.content) for row in rows[:limit]),
        next=getattr(rows[limit - 1], cursor) if len(rows) > limit else None,
        checked=checked,
        wrong=wrong,
    )


def entry_view(log: LogReader, connection: Connection, index: int) -> ProvedEntry:
    """The entry at ``index``, its proof verified; raises ``NotLogged``."""
    proof: InclusionProof = log.inclusion(index, None, None)
    found = log.entries(index, index)
    checkpoint = checkpoint_of(connection)
    if not found or checkpoint is None:
        raise NotLogged(f"no such leaf is among the first {proof.size} of the log")
    return ProvedEntry(
        entry=_entry(index, found[0].leaf_hash, found[0].content),
        content=found[0].content,
        proof=tuple(hash_.hex() for hash_ in proof.hashes),
        checkpoint=checkpoint,
    )


def checkpoint_of(connection: Connection) -> CheckpointShown | None:
    """The newest checkpoint; raises ``LogDamaged`` if its signature does not hold."""
    kept = last_checkpoint(connection)
    if kept is None:
        return None
    return CheckpointShown(
        origin=kept.checkpoint.origin,
        size=kept.checkpoint.size,
        root=kept.checkpoint.root_hash.hex(),
        signed_at=kept.checkpoint.signed_at,
        key_id=kept.key.key_id,
        note=kept.note,
    )


def _query(search: Search, size: int) -> Select[Any]:
    columns = (
        log_leaves.c.leaf_index,
        log_leaves.c.leaf_hash,
        log_entries.c.content,
        log_entries.c.id,
    )
    query = select(*columns).select_from(log_leaves.join(log_entries))
    query = query.where(log_leaves.c.leaf_index < size)
    if not search.kind and not search.subject:
        if search.before is not None:
            query = query.where(log_leaves.c.leaf_index < search.before)
        return query.order_by(log_leaves.c.leaf_index.desc())
    if search.kind:
        query = query.where(log_entries.c.kind == search.kind)
    if search.subject:
        query = query.where(log_entries.c.subject == search.subject)
    if search.before is not None:
        query = query.where(log_entries.c.id < search.before)
    return query.order_by(log_entries.c.id.desc())


def _waiting(connection: Connection) -> int:
    """Entries without a place yet, counted up to a bound."""
    some = select(log_pending.c.entry_id).limit(MOST_WAITING + 1).subquery()
    return int(connection.execute(select(func.count()).select_from(some)).scalar_one())


def _entry(index: int, leaf: bytes, content: str) -> Entry:
    said: Mapping[str, Any] = json.loads(content)
    return Entry(
        index=index,
        kind=said["kind"],
        subject=said["subject"],
        actor=said["actor"],
        at=said["at"],
        said=_said(said["body"]),
        leaf_hash=bytes(leaf).hex(),
        page=_page(said["kind"], said["subject"], said["body"]),
    )


def _page(kind: str, subject: str, body: Mapping[str, Any]) -> str | None:
    """Where the subject of an entry is shown.

    >>> _page("run", "4dd9a3c5", {}), _page("budget", "digits/example/add_remove", {})
    ('/runs/4dd9a3c5', '/datasets/digits?ledger=example/add_remove')
    """
    if kind in _OF_CERTIFICATES:
        return f"/certificates/{quote(subject, safe=':')}"
    match kind:
        case "run":
            return f"/runs/{quote(subject, safe='')}"
        case "budget" if subject.count("/") == 2:
            dataset, ledger = subject.split("/", 1)
            return f"/datasets/{quote(dataset, safe='')}?ledger={quote(ledger)}"
        case "policy" if isinstance(body.get("name"), str) and isinstance(body.get("version"), int):
            return f"/policies/{quote(body['name'], safe='')}/{body['version']}"
        case "waiver":
            return "/waivers"
        case "keyset":
            return "/keys"
    return None


def _said(body: Mapping[str, Any]) -> str:
    """The first few plain fields of a body, in one line.

    >>> _said({"action": "created", "name": "ci", "scopes": ["submit"]})
    'action created, name ci'
    """
    plain = [
        f"{name.replace('_', ' ')} {_plain(value)}"
        for name, value in body.items()
        if isinstance(value, str | int | float) and name not in _DULL and value != ""
    ]
    return ", ".join(plain[:_SAID])


def _plain(value: str | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    if text.startswith("sha256:"):
        return short(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
