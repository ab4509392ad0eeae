"""``/audit``: the log's entries with proofs, verified ranges, and a comparison of checkpoints.

Entries are listed newest first, in pages with a cursor. They can be searched by kind, subject,
actor, data set and day; the address of a search is its permalink. A search for an actor reads the
entries in order, the others use an index. Only entries that a checkpoint covers are shown; pending
ones are counted.

The page also compares a checkpoint that an auditor saved elsewhere with the current log, to detect
a rewritten log: the current tree must begin with the saved one. The consistency proof
(RFC 9162, 2.1.4) is computed from the stored tree and verified against both roots. To verify
without trusting the service, request ``/v1/log/proof/consistency``, or run ``affidavit verify``,
which remembers the last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Any, Literal, get_args
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator, Field
from sqlalchemy import ColumnElement, Connection, Row, Select, func, or_, select, union

from affidavit.evidence.log_sentences import sentence_of
from affidavit.plan import canonical_json
from affidavit.service.core.database import snapshot
from affidavit.service.core.errors import NotLogged
from affidavit.service.core.wire_models import QueryModel
from affidavit.service.ledger import repository
from affidavit.service.log.entries import EntryKind
from affidavit.service.log.reader import LoggedEntry, LogReader
from affidavit.service.log.stored_tree import (
    MAX_RANGE,
    RangeCheck,
    last_checkpoint,
    verify_range,
)
from affidavit.service.tables.certificates import certificates
from affidavit.service.tables.ledger import ledgers, reservations
from affidavit.service.tables.log import (
    log_entries,
    log_leaves,
    log_pending,
)
from affidavit.service.tables.runs import runs
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.pages.access import Auditor
from affidavit.service.web.pages.response import (
    download,
    download_csv,
    is_fragment,
    page,
    respond,
)
from affidavit.service.web.pages.text import capitalized
from affidavit.service.web.routes.log import TEXT
from affidavit.trust import PublicKey
from affidavit.trust.log import (
    BadNote,
    Checkpoint,
    merkle_tree,
    open_checkpoint,
    read_checkpoint,
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
        merkle_tree.verify_consistency(
            first=saved.size,
            second=newest.size,
            first_root=saved.root_hash,
            second_root=newest.root_hash,
            proof=log.consistency(saved.size, newest.size).hashes,
        )
    except merkle_tree.ProofError:
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
_OF_CERTIFICATES = frozenset({"certificate", "refusal", "approval", "revocation"})


def _validate_day(text: str) -> str:
    if text:
        _day(text)
    return text


def _day(text: str) -> datetime:
    """Return the beginning of a day in UTC; raises ``ValueError``."""
    return datetime.combine(date.fromisoformat(text), time(), UTC)


Index = Annotated[int, Path(ge=0, le=merkle_tree.MAX_LEAVES)]
Text = Annotated[str, Field(max_length=255)]
Number = Annotated[str, Field(max_length=20)]
Day = Annotated[str, Field(max_length=10), AfterValidator(_validate_day)]


class Search(QueryModel):
    """A search of the log, before an entry; ``since`` and ``until`` are days in UTC, included.

    ``raw`` shows the entries as they were logged instead of in sentences.
    """

    kind: Text = ""
    subject: Text = ""
    actor: Text = ""
    dataset: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    since: Day = ""
    until: Day = ""
    raw: Literal["", "yes"] = ""
    before: Annotated[int, Field(ge=0, le=merkle_tree.MAX_LEAVES)] | None = None

    @property
    def filters(self) -> dict[str, str]:
        """The fields that restrict the search."""
        names = ("kind", "subject", "actor", "dataset", "since", "until")
        return {name: text for name in names if (text := getattr(self, name))}


class AuditQuery(Search):
    """The parameters of ``/audit``; an empty one is like an absent one."""

    start: Number = ""
    end: Number = ""
    saved_checkpoint: Annotated[str, Field(max_length=MAX_CHECKPOINT_LENGTH)] = ""
    done: Text = ""


COLUMNS = ("index", "kind", "subject", "actor", "at", "sentence", "content", "leaf_hash", "page")
"""The columns of the log as CSV."""


@page(router, "/audit")
def audit(
    request: Request, _: Auditor, services: TheServices, parameters: Annotated[AuditQuery, Query()]
) -> Response:
    """List the newest entries, or those of a search."""
    search = Search.model_validate(
        {name: getattr(parameters, name) for name in Search.model_fields}
        | {"subject": parameters.subject.strip(), "actor": parameters.actor.strip()}
    )
    checked, wrong = _verify_requested_range(services, parameters)
    comparison, comparison_error = _checkpoint_comparison(services, parameters.saved_checkpoint)
    with snapshot(services.engine) as connection:
        checkpoint = checkpoint_of(connection)
        rows = _rows(connection, search, checkpoint, PAGE_SIZE + 1)
        waiting = _waiting(connection)
        datasets = repository.dataset_names(connection)
        entries = _read_entries(connection, rows[:PAGE_SIZE])
    cursor = "id" if search.filters else "leaf_index"
    view = {
        "checkpoint": checkpoint,
        "waiting": waiting,
        "search": search,
        "kinds": KINDS,
        "datasets": datasets,
        "entries": entries,
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
    """Download the newest entries, or those of a search."""
    with snapshot(services.engine) as connection:
        rows = _rows(connection, search, checkpoint_of(connection), MAX_EXPORTED)
        entries = _read_entries(connection, rows)
    return download_csv(COLUMNS, entries, "audit.csv")


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
    (entry,) = _read_entries(connection, leaves)
    return {
        "entry": entry,
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
    if not search.filters:
        if search.before is not None:
            query = query.where(log_leaves.c.leaf_index < search.before)
        return query.order_by(log_leaves.c.leaf_index.desc())
    if search.kind:
        query = query.where(log_entries.c.kind == search.kind)
    if search.subject:
        query = query.where(log_entries.c.subject == search.subject)
    if search.actor:
        # The content is canonical JSON, of which the actor is the first field.
        begins = f'{{"actor":{canonical_json(search.actor).decode()},'
        query = query.where(func.substr(log_entries.c.content, 1, len(begins)) == begins)
    if search.dataset:
        query = query.where(_is_about(search.dataset))
    if search.since:
        query = query.where(log_entries.c.at >= _day(search.since))
    if search.until:
        query = query.where(log_entries.c.at < _day(search.until) + timedelta(days=1))
    if search.before is not None:
        query = query.where(log_entries.c.id < search.before)
    return query.order_by(log_entries.c.id.desc())


def _is_about(dataset: str) -> ColumnElement[bool]:
    """Whether an entry's subject is a budget, certificate, reservation or run of a data set."""
    subject = log_entries.c.subject
    of_ledger = ledgers.c.dataset == dataset
    own_reservations = select(reservations.c.id).join(ledgers).where(of_ledger)
    return or_(
        subject == dataset,
        subject.in_(
            select(ledgers.c.dataset + "/" + ledgers.c.unit + "/" + ledgers.c.adjacency).where(
                of_ledger
            )
        ),
        subject.in_(select(certificates.c.id).where(certificates.c.dataset == dataset)),
        subject.in_(own_reservations),
        subject.in_(select(runs.c.id).where(runs.c.reservation_id.in_(own_reservations))),
    )


def _waiting(connection: Connection) -> int:
    """Return the number of entries that are not in the tree, at most ``MAX_WAITING + 1``."""
    waiting = select(log_pending.c.entry_id).limit(MAX_WAITING + 1).subquery()
    return int(connection.execute(select(func.count()).select_from(waiting)).scalar_one())


def _read_entries(
    connection: Connection, leaves: Sequence[Row[Any] | LoggedEntry]
) -> list[dict[str, Any]]:
    """Return log entries in sentences that begin with their actors, and their content as logged.

    ``page`` is that of an entry's subject, or None, and ``plan`` the name of its plan, if any.
    """
    entries = [json.loads(leaf.content) for leaf in leaves]
    plans = _plan_names(connection, {entry["subject"] for entry in entries})
    return [
        {
            **entry,
            "index": leaf.leaf_index,
            "plan": plans.get(entry["subject"]),
            "sentence": sentence_of(entry, plans.get(entry["subject"])),
            "content": leaf.content,
            "leaf_hash": bytes(leaf.leaf_hash).hex(),
            "page": _page(entry["kind"], entry["subject"], entry["body"]),
        }
        for entry, leaf in zip(entries, leaves, strict=True)
    ]


def _plan_names(connection: Connection, subjects: Collection[str]) -> dict[str, str]:
    """Return the names of the plans of certificates, reservations and runs, by id."""
    same = reservations.c.certificate_id == certificates.c.id
    reserved = reservations.join(certificates, same)
    query = union(
        *(
            select(id_, certificates.c.name).select_from(source).where(id_.in_(subjects))
            for id_, source in (
                (certificates.c.id, certificates),
                (reservations.c.id, reserved),
                (runs.c.id, reserved.join(runs)),
            )
        )
    )
    return {id_: name for id_, name in connection.execute(query) if name}


def _page(kind: str, subject: str, body: Mapping[str, Any]) -> str | None:
    """Return the path of the page of an entry's subject, or None.

    >>> ledger = {"dataset": "digits", "unit": "example", "adjacency": "add_remove"}
    >>> _page("run", "4dd9a3c5", {}), _page("budget", "digits", {"ledger": ledger})
    ('/runs/4dd9a3c5', '/datasets/digits?ledger=example/add_remove')
    """
    if kind in _OF_CERTIFICATES:
        return f"/certificates/{quote(subject, safe=':')}"
    match kind:
        case "run" | "replay" | "audit":
            return f"/runs/{quote(subject, safe='')}"
        case "budget" | "reservation" | "commitment" | "settlement" | "release":
            ledger = body["ledger"]
            scope = quote(f"{ledger['unit']}/{ledger['adjacency']}")
            return f"/datasets/{quote(ledger['dataset'], safe='')}?ledger={scope}"
        case "grant":
            return f"/datasets/{quote(subject, safe='')}"
        case "token":
            return "/tokens"
        case "policy" if isinstance(body.get("name"), str) and isinstance(body.get("version"), int):
            return f"/policies/{quote(body['name'], safe='')}/{body['version']}"
        case "waiver":
            return "/waivers"
        case "keyset":
            return "/keys"
    return None


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
