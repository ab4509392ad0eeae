"""``/audit``: the log's entries with proofs, verified ranges, and a comparison of checkpoints.

Entries are listed newest first, in pages with a cursor; searches by kind or subject use an index.
Only entries that a checkpoint covers are shown; pending ones are counted.

The page also compares a checkpoint that an auditor saved elsewhere with the current log, to detect
a rewritten log: the current tree must begin with the saved one. The consistency proof
(RFC 9162, 2.1.4) is computed from the stored tree and verified against both roots. To verify
without trusting the service, request ``/v1/log/proof/consistency``, or run ``affidavit verify``,
which remembers the last checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field
from sqlalchemy import Connection, Row, Select, func, select

from affidavit.evidence.log_sentences import sentence_of
from affidavit.service.core.database import snapshot
from affidavit.service.core.errors import NotLogged
from affidavit.service.core.wire_models import QueryModel
from affidavit.service.log.entries import EntryKind
from affidavit.service.log.reader import LogReader
from affidavit.service.log.stored_tree import (
    MAX_RANGE,
    RangeCheck,
    last_checkpoint,
    verify_range,
)
from affidavit.service.tables.log import (
    log_entries,
    log_leaves,
    log_pending,
)
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.pages.access import Auditor
from affidavit.service.web.pages.response import (
    download,
    download_csv,
    is_fragment,
    page,
    respond,
    view_of,
)
from affidavit.service.web.pages.text import (
    capitalized,
    short_id,
    truncate,
    words,
)
from affidavit.service.web.routes.log import TEXT
from affidavit.trust import PublicKey
from affidavit.trust.log import (
    MAX_LEAVES,
    BadNote,
    Checkpoint,
    ProofError,
    open_checkpoint,
    read_checkpoint,
    verify_consistency,
)

# ---- a saved checkpoint --------------------------------------------------------------

MAX_CHECKPOINT_LENGTH = 10_000
"""Characters of a saved checkpoint."""


class InvalidCheckpoint(Exception):
    """The text is not a checkpoint of this log, for the reason in the message."""


def compare_checkpoint(text: str, log: LogReader, keys: Iterable[PublicKey]) -> dict[str, Any]:
    """Compare the checkpoint in ``text``, of ``then`` entries, with the newest one, of ``now``.

    ``extended``: the log begins with the saved entries. ``signed``: one of ``keys`` signed the
    saved checkpoint. ``contradiction`` is empty if there is none. Raises ``InvalidCheckpoint``.
    """
    # Browsers change line ends, and drop the last one of a text area.
    note = text.strip().replace("\r\n", "\n") + "\n"
    try:
        saved = read_checkpoint(note)
        newest = log.latest().checkpoint
    except BadNote as error:
        raise InvalidCheckpoint(f"not a checkpoint: {error}") from None
    except NotLogged:
        raise InvalidCheckpoint("this log has no checkpoint to compare with yet") from None
    if saved.origin != newest.origin:
        raise InvalidCheckpoint(
            f"the checkpoint is of another log, {saved.origin}; this one is {newest.origin}"
        )
    contradiction = _contradiction(saved, newest, log)
    return {
        "then": saved.size,
        "now": newest.size,
        "signed_at": saved.signed_at,
        "signed": _is_signed(note, keys),
        "extended": contradiction == "",
        "contradiction": contradiction,
    }


def _contradiction(saved: Checkpoint, newest: Checkpoint, log: LogReader) -> str:
    """Return why ``newest`` does not extend ``saved``; empty if it does."""
    if saved.size > newest.size:
        return f"it has {saved.size:,} entries but the log has {newest.size:,}: entries are missing"
    if saved.size == 0:
        return ""
    try:
        verify_consistency(
            first=saved.size,
            second=newest.size,
            first_root=saved.root_hash,
            second_root=newest.root_hash,
            proof=log.consistency(saved.size, newest.size).hashes,
        )
    except ProofError:
        return f"the first {saved.size:,} entries of the log have changed since"
    return ""


def _is_signed(note: str, keys: Iterable[PublicKey]) -> bool:
    try:
        open_checkpoint(note, keys)
    except BadNote:
        return False
    return True


# ---- the pages -----------------------------------------------------------------------

router = APIRouter()

KINDS: tuple[str, ...] = get_args(EntryKind)
PAGE_SIZE, MAX_EXPORTED = 20, 1000
"""Entries on a page, and in an export."""
MAX_WAITING = 1000
"""Waiting entries that are counted."""
_SUMMARY_FIELDS = 3
_SUMMARY_LENGTH = 64
_OF_CERTIFICATES = frozenset({"certificate", "refusal", "approval", "revocation"})
_OMITTED_FIELDS = frozenset(
    {"key_id", "expires_at", "digest", "envelope", "envelope_digest", "state_digest", "seq"}
    | {"certain", "fence", "issue", "plan_digest"}
)
"""Fields that summaries omit; the entry's own page shows them."""
_FIRST_FIELDS = frozenset({"event", "action", "verdict", "decision", "code"})
_ID = re.compile(r"sha256:[0-9a-f]{64}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CODE = re.compile(r"[a-z]+(_[a-z]+)+")

Index = Annotated[int, Path(ge=0, le=MAX_LEAVES)]
Text = Annotated[str, Field(max_length=255)]
Number = Annotated[str, Field(max_length=20)]


class Search(QueryModel):
    """A search of the log by kind or subject, before an entry."""

    kind: Text = ""
    subject: Text = ""
    before: Annotated[int, Field(ge=0, le=MAX_LEAVES)] | None = None


class AuditQuery(Search):
    """The parameters of ``/audit``; an empty one is like an absent one."""

    start: Number = ""
    end: Number = ""
    saved_checkpoint: Annotated[str, Field(max_length=MAX_CHECKPOINT_LENGTH)] = ""
    done: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A log entry in a sentence and a summary of its body; ``page`` is its subject's, or None."""

    index: int
    kind: str
    subject: str
    actor: str
    at: str
    sentence: str
    summary: str
    leaf_hash: str
    page: str | None


@page(router, "/audit")
def audit(
    request: Request, _: Auditor, services: TheServices, parameters: Annotated[AuditQuery, Query()]
) -> Response:
    """List the newest entries, or those of a kind or subject."""
    search = Search(
        kind=parameters.kind, subject=parameters.subject.strip(), before=parameters.before
    )
    checked, wrong = _verify_requested_range(services, parameters)
    comparison, comparison_error = _checkpoint_comparison(services, parameters.saved_checkpoint)
    with snapshot(services.engine) as connection:
        checkpoint = checkpoint_of(connection)
        rows = _rows(connection, search, checkpoint, PAGE_SIZE + 1)
        waiting = _waiting(connection)
    cursor = "id" if search.kind or search.subject else "leaf_index"
    view = {
        "checkpoint": checkpoint,
        "waiting": waiting,
        "search": search,
        "kinds": KINDS,
        "entries": [_entry(row.leaf_index, row.leaf_hash, row.content) for row in rows[:PAGE_SIZE]],
        # The cursor of the next page.
        "next": getattr(rows[PAGE_SIZE - 1], cursor) if len(rows) > PAGE_SIZE else None,
        # A verified range, or the error of the request.
        "checked": checked,
        "wrong": wrong,
        "saved_checkpoint": parameters.saved_checkpoint,
        "comparison": comparison,
        "comparison_error": comparison_error,
    }
    return respond(
        request,
        view,
        template="audit.html",
        # htmx ignores error responses.
        status=422 if (wrong or comparison_error) and not is_fragment(request) else 200,
    )


@page(router, "/audit.csv")
def audit_csv(_: Auditor, services: TheServices, search: Annotated[Search, Query()]) -> Response:
    """Download the newest entries, or those of a kind or subject."""
    with snapshot(services.engine) as connection:
        rows = _rows(connection, search, checkpoint_of(connection), MAX_EXPORTED)
    return download_csv(
        Entry, [_entry(row.leaf_index, row.leaf_hash, row.content) for row in rows], "audit.csv"
    )


@router.get("/audit/checkpoint", include_in_schema=False, response_class=Response)
def checkpoint(_: Auditor, services: TheServices) -> Response:
    """Download the newest checkpoint, to save it elsewhere."""
    note = services.log.latest().note
    return download(note, f"{TEXT}; charset=utf-8", "checkpoint.txt")


@page(router, "/audit/{index}")
def entry(request: Request, _: Auditor, services: TheServices, index: Index) -> Response:
    """Show one entry and its proof."""
    with snapshot(services.engine) as connection:
        view = proved_entry(services.log, connection, index)
    return respond(request, view, template="audit_entry.html")


def proved_entry(log: LogReader, connection: Connection, index: int) -> dict[str, Any]:
    """Return the entry at ``index`` with its hashed bytes and a verified proof.

    Raises ``NotLogged``.
    """
    proof = log.inclusion(index, None, None)
    leaves = log.entries(index, index)
    checkpoint = checkpoint_of(connection)
    if not leaves or checkpoint is None:
        raise NotLogged(f"the leaf is not among the first {proof.size} entries of the log")
    return {
        "entry": _entry(index, leaves[0].leaf_hash, leaves[0].content),
        "content": leaves[0].content,
        "proof": [hash_.hex() for hash_ in proof.hashes],
        "checkpoint": checkpoint,
    }


def checkpoint_of(connection: Connection) -> dict[str, Any] | None:
    """Return the newest checkpoint or None; raises ``LogDamaged`` if its signature is invalid."""
    signed = last_checkpoint(connection)
    if signed is None:
        return None
    return {
        "origin": signed.checkpoint.origin,
        "size": signed.checkpoint.size,
        "root": signed.checkpoint.root_hash.hex(),
        "signed_at": signed.checkpoint.signed_at,
        "key_id": signed.key.key_id,
        "note": signed.note,
    }


def _rows(
    connection: Connection, search: Search, checkpoint: dict[str, Any] | None, limit: int
) -> Sequence[Row[Any]]:
    """Return index, leaf hash, content and id of the newest entries below ``checkpoint``."""
    size = 0 if checkpoint is None else checkpoint["size"]
    return connection.execute(_entries(search, size).limit(limit)).all()


def _entries(search: Search, size: int) -> Select[Any]:
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
    """Return the number of entries that are not in the tree, at most ``MAX_WAITING + 1``."""
    waiting = select(log_pending.c.entry_id).limit(MAX_WAITING + 1).subquery()
    return int(connection.execute(select(func.count()).select_from(waiting)).scalar_one())


def _entry(index: int, leaf: bytes, content: str) -> Entry:
    entry: Mapping[str, Any] = json.loads(content)
    return view_of(
        Entry,
        entry,
        index=index,
        sentence=sentence_of(entry),
        summary=_summary(entry["body"]),
        leaf_hash=bytes(leaf).hex(),
        page=_page(entry["kind"], entry["subject"], entry["body"]),
    )


def _page(kind: str, subject: str, body: Mapping[str, Any]) -> str | None:
    """Return the path of the page of an entry's subject, or None.

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


def _summary(body: Mapping[str, Any]) -> str:
    """Return the first scalar fields of a body in one line, its event first.

    >>> _summary({"name": "ci", "action": "created", "scopes": ["submit"]})
    'action: created, name: ci'
    """
    plain = [
        f"{name.replace('_', ' ')}: {_plain(value)}"
        for name, value in sorted(body.items(), key=lambda field: field[0] not in _FIRST_FIELDS)
        if isinstance(value, str | int | float) and name not in _OMITTED_FIELDS and value != ""
    ]
    return ", ".join(plain[:_SUMMARY_FIELDS])


def _plain(value: str | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    if _ID.fullmatch(text):
        return short_id(text)
    return words(text) if _CODE.fullmatch(text) else truncate(text, _SUMMARY_LENGTH + 1)


def _verify_requested_range(services: Services, query: AuditQuery) -> tuple[RangeCheck | None, str]:
    """Verify the requested range; returns the result or the error of the request."""
    if not query.start and not query.end:
        return None, ""
    start, end = (_index(text) for text in (query.start, query.end))
    if start is None or end is None or end < start:
        return None, "Enter the first and the last entry as whole numbers, the first not larger."
    if end - start >= MAX_RANGE:
        return (
            None,
            f"At most {MAX_RANGE:,} entries can be verified at a time; choose a shorter range.",
        )
    try:
        with snapshot(services.engine) as connection:
            return verify_range(connection, start, end), ""
    except ValueError as error:
        return None, f"{capitalized(str(error))}."


def _checkpoint_comparison(services: Services, text: str) -> tuple[dict[str, Any] | None, str]:
    """Compare a saved checkpoint with the log; returns the result or the error."""
    if not text.strip():
        return None, ""
    keys = map(PublicKey.from_record, services.key_records())
    try:
        return compare_checkpoint(text, services.log, keys), ""
    except InvalidCheckpoint as error:
        return None, f"{capitalized(str(error))}."


def _index(text: str) -> int | None:
    plain = text.strip().replace(",", "")
    return int(plain) if plain.isascii() and plain.isdecimal() and len(plain) < 17 else None
