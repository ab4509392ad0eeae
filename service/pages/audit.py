"""``/audit``: the log, its checkpoint, one entry's proof, and a range of entries verified.

Entries come in the order of the log, newest first, in pages that follow a cursor; a search
by kind or subject follows its index. Only what a checkpoint covers is shown; entries that
wait for their place in the tree are counted.

The page also compares a checkpoint that an auditor saved with the log as it is now. A checkpoint
that was saved elsewhere reveals whether the log has been rewritten since: the current tree must
begin with the saved one. The consistency proof (RFC 9162, 2.1.4) is computed from the stored tree
and verified against both roots here. To verify without trusting the service, request
``/v1/log/proof/consistency`` or run ``affidavit verify``, which remembers the last checkpoint that
it saw.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, get_args
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field
from sqlalchemy import Connection, Select, func, select

from affidavit.certificate import PublicKey
from affidavit.certificate.log import (
    MAX_LEAVES,
    BadNote,
    Checkpoint,
    ProofError,
    open_checkpoint,
    read_checkpoint,
    verify_consistency,
)
from affidavit.service.dependencies import Services, TheServices
from affidavit.service.log.audit import snapshot
from affidavit.service.log.entries import EntryKind, log_entries, log_leaves, log_pending
from affidavit.service.log.reader import LogReader
from affidavit.service.log.stored_tree import (
    MAX_RANGE,
    NotLogged,
    RangeCheck,
    last_checkpoint,
    verify_range,
)
from affidavit.service.models import QueryModel
from affidavit.service.pages.access import Auditor
from affidavit.service.pages.response import (
    Rows,
    download,
    is_data,
    is_fragment,
    page,
    respond,
    view_of,
)
from affidavit.service.pages.text import capitalized, short, shortened, words
from affidavit.service.routes.log import TEXT

# ---- a saved checkpoint --------------------------------------------------------------

LONGEST = 10_000
"""Characters of a checkpoint."""


class InvalidCheckpoint(Exception):
    """The text is not a checkpoint of this log; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointComparison:
    """The saved checkpoint of ``then`` entries beside the newest one of ``now``.

    ``extended`` says that the log begins with the saved entries, ``signed`` that a key of this
    service signed the saved checkpoint; ``contradiction`` is empty if there is none.
    """

    then: int
    now: int
    signed_at: datetime | None
    signed: bool
    extended: bool
    contradiction: str


def compare_checkpoint(
    text: str, log: LogReader, keys: Iterable[PublicKey]
) -> CheckpointComparison:
    """Compare the checkpoint in ``text`` with ``log``; raises ``InvalidCheckpoint``."""
    # A form changes line ends, and a text area loses the last one.
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
    return CheckpointComparison(
        then=saved.size,
        now=newest.size,
        signed_at=saved.signed_at,
        signed=_is_signed(note, keys),
        extended=contradiction == "",
        contradiction=contradiction,
    )


def _contradiction(saved: Checkpoint, newest: Checkpoint, log: LogReader) -> str:
    """Why the log of ``newest`` does not extend the log of ``saved``; empty if it does."""
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
PAGE = 20
EXPORT = 1000
"""Entries on a page, and in one export."""
MAX_WAITING = 1000
_SUMMARY_FIELDS = 3
_SUMMARY_LENGTH = 64
_OF_CERTIFICATES = frozenset({"certificate", "refusal", "approval", "revocation"})
_DULL = frozenset(
    {"key_id", "expires_at", "digest", "envelope", "envelope_digest", "state_digest", "seq"}
    | {"certain", "fence", "issue", "plan_digest"}
)
"""Fields that say little in a summary; the entry's own page has them."""
_EVENT = frozenset({"event", "action", "verdict", "decision", "code"})
_ID = re.compile(r"sha256:[0-9a-f]{64}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CODE = re.compile(r"[a-z]+(_[a-z]+)+")

Index = Annotated[int, Path(ge=0, le=MAX_LEAVES)]
Text = Annotated[str, Field(max_length=255)]
Number = Annotated[str, Field(max_length=20)]


class Search(QueryModel):
    """A search of the log by kind or subject, before a place in it."""

    kind: Text = ""
    subject: Text = ""
    before: Annotated[int, Field(ge=0, le=MAX_LEAVES)] | None = None


class AuditQuery(Search):
    """The parameters of ``/audit``; an empty field is the same as none."""

    start: Number = ""
    end: Number = ""
    saved_checkpoint: Annotated[str, Field(max_length=LONGEST)] = ""
    done: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of the log, with a summary of its body.

    ``page`` is the page of its subject, None if it has none.
    """

    index: int
    kind: str
    subject: str
    actor: str
    at: str
    summary: str
    leaf_hash: str
    page: str | None


@page(router, "/audit")
def audit(
    request: Request, _: Auditor, services: TheServices, parameters: Annotated[AuditQuery, Query()]
) -> Response:
    """The newest entries, or those of a kind or about a subject."""
    search = Search(
        kind=parameters.kind, subject=parameters.subject.strip(), before=parameters.before
    )
    checked, wrong = _checked_range(services, parameters)
    comparison, comparison_error = _checkpoint_comparison(services, parameters.saved_checkpoint)
    limit = EXPORT if is_data(request) else PAGE
    with snapshot(services.engine) as connection:
        checkpoint = checkpoint_of(connection)
        size = 0 if checkpoint is None else checkpoint["size"]
        rows = connection.execute(_entries(search, size).limit(limit + 1)).all()
        waiting = _waiting(connection)
    cursor = "id" if search.kind or search.subject else "leaf_index"
    entries = [_entry(row.leaf_index, row.leaf_hash, row.content) for row in rows[:limit]]
    view = {
        "checkpoint": checkpoint,
        "waiting": waiting,
        "search": search,
        "kinds": KINDS,
        "entries": entries,
        # Where it goes on.
        "next": getattr(rows[limit - 1], cursor) if len(rows) > limit else None,
        # A range that was hashed again, or what is wrong with the one requested.
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
        rows=Rows(Entry, entries),
        # htmx does not show a response that is an error.
        status=422 if (wrong or comparison_error) and not is_fragment(request) else 200,
    )


@router.get("/audit/checkpoint", include_in_schema=False, response_class=Response)
def checkpoint(_: Auditor, services: TheServices) -> Response:
    """The newest checkpoint as a file, to be saved somewhere else."""
    note = services.log.latest().note
    return download(note, f"{TEXT}; charset=utf-8", "checkpoint.txt")


@page(router, "/audit/{index}")
def entry(request: Request, _: Auditor, services: TheServices, index: Index) -> Response:
    """One entry and its proof."""
    with snapshot(services.engine) as connection:
        view = proved_entry(services.log, connection, index)
    return respond(request, view, template="audit_entry.html", rows=Rows(Entry, (view["entry"],)))


def proved_entry(log: LogReader, connection: Connection, index: int) -> dict[str, Any]:
    """The entry at ``index``, the bytes that were hashed, and its proof, which is verified.

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
    """The newest checkpoint; raises ``LogDamaged`` if its signature is wrong."""
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
    """Entries without a place in the tree, counted up to a bound."""
    some = select(log_pending.c.entry_id).limit(MAX_WAITING + 1).subquery()
    return int(connection.execute(select(func.count()).select_from(some)).scalar_one())


def _entry(index: int, leaf: bytes, content: str) -> Entry:
    entry: Mapping[str, Any] = json.loads(content)
    return view_of(
        Entry,
        entry,
        index=index,
        summary=_summary(entry["body"]),
        leaf_hash=bytes(leaf).hex(),
        page=_page(entry["kind"], entry["subject"], entry["body"]),
    )


def _page(kind: str, subject: str, body: Mapping[str, Any]) -> str | None:
    """The page of the subject of an entry.

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
    """The first few plain fields of a body, in one line, its event first.

    >>> _summary({"name": "ci", "action": "created", "scopes": ["submit"]})
    'action: created, name: ci'
    """
    plain = [
        f"{name.replace('_', ' ')}: {_plain(value)}"
        for name, value in sorted(body.items(), key=lambda field: field[0] not in _EVENT)
        if isinstance(value, str | int | float) and name not in _DULL and value != ""
    ]
    return ", ".join(plain[:_SUMMARY_FIELDS])


def _plain(value: str | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    if _ID.fullmatch(text):
        return short(text)
    return words(text) if _CODE.fullmatch(text) else shortened(text, _SUMMARY_LENGTH + 1)


def _checked_range(services: Services, query: AuditQuery) -> tuple[RangeCheck | None, str]:
    """The requested range, hashed again; or what is wrong with the request."""
    if not query.start and not query.end:
        return None, ""
    start, end = (_number(text) for text in (query.start, query.end))
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


def _checkpoint_comparison(
    services: Services, text: str
) -> tuple[CheckpointComparison | None, str]:
    """The saved checkpoint compared with the log; or why that is not possible."""
    if not text.strip():
        return None, ""
    keys = map(PublicKey.from_record, services.key_records())
    try:
        return compare_checkpoint(text, services.log, keys), ""
    except InvalidCheckpoint as error:
        return None, f"{capitalized(str(error))}."


def _number(text: str) -> int | None:
    plain = text.strip().replace(",", "")
    return int(plain) if plain.isascii() and plain.isdecimal() and len(plain) < 17 else None
