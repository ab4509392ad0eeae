"""``/audit``: the log, its checkpoint, one entry's proof, and a stretch hashed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from affidavit.certificate import PublicKey
from affidavit.certificate.log import MOST_LEAVES
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.log.audit import snapshot
from affidavit.service.log.reader import NotLogged
from affidavit.service.log.stored_tree import MAX_RANGE, RangeCheck, verify_range
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import PRIVATE, answer, page
from affidavit.service.pages.audit_view import EXPORT, PAGE, Entry, Search, audit_view, entry_view
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.pages.kept_checkpoint import LONGEST, Held, NoCheckpoint, hold
from affidavit.service.pages.wishes import is_data
from affidavit.service.problems import Problem
from affidavit.service.routes.log_checkpoint import TEXT, not_logged
from affidavit.service.services import Services, TheServices

router = APIRouter()

Auditor = Annotated[Actor, page_actor(Scope.AUDIT)]
Index = Annotated[int, Path(ge=0, le=MOST_LEAVES)]
Text = Annotated[str, Field(max_length=255)]
Number = Annotated[str, Field(max_length=20)]


class Wanted(BaseModel):
    """The parameters; an empty field of a form is one that was left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Text = ""
    subject: Text = ""
    before: Annotated[int, Field(ge=0, le=MOST_LEAVES)] | None = None
    start: Number = ""
    end: Number = ""
    kept: Annotated[str, Field(max_length=LONGEST)] = ""
    done: Text = ""


@page(router, "/audit")
def audit(
    request: Request, _: Auditor, services: TheServices, wanted: Annotated[Wanted, Query()]
) -> Response:
    """The newest entries, or those of a kind or about a subject."""
    search = Search(kind=wanted.kind, subject=wanted.subject.strip(), before=wanted.before)
    checked, wrong = _checked(services, wanted)
    held, not_held = _held(services, wanted.kept)
    limit = EXPORT if is_data(request) else PAGE
    with snapshot(services.engine) as connection:
        view = audit_view(connection, search, limit, checked=checked, wrong=wrong)
    view = replace(view, kept=wanted.kept, held=held, not_held=not_held)
    return answer(
        request,
        view,
        template="audit.html",
        rows=Rows(Entry, view.entries),
        status=422 if wrong or not_held else 200,
    )


@router.get("/audit/checkpoint", include_in_schema=False, response_class=Response)
def checkpoint(_: Auditor, services: TheServices) -> Response:
    """The newest checkpoint as a file, to be kept somewhere else."""
    try:
        note = services.log.latest().note
    except NotLogged as error:
        raise not_logged(error) from None
    headers = {**PRIVATE, "Content-Disposition": 'attachment; filename="checkpoint.txt"'}
    return Response(note, 200, headers, media_type=f"{TEXT}; charset=utf-8")


@page(router, "/audit/{index}")
def entry(request: Request, _: Auditor, services: TheServices, index: Index) -> Response:
    """One entry and its proof."""
    try:
        with snapshot(services.engine) as connection:
            view = entry_view(services.log, connection, index)
    except NotLogged:
        raise Problem(404, "not_found", f"the log has no signed entry {index}.") from None
    return answer(request, view, template="audit_entry.html", rows=Rows(Entry, (view.entry,)))


def _checked(services: Services, wanted: Wanted) -> tuple[RangeCheck | None, str]:
    """The stretch that was asked for, hashed again; or what is wrong with what was asked."""
    if not wanted.start and not wanted.end:
        return None, ""
    start, end = (_number(text) for text in (wanted.start, wanted.end))
    if start is None or end is None or end < start:
        return None, "Give the first and the last entry as whole numbers, the first not larger."
    if end - start >= MAX_RANGE:
        return None, f"At most {MAX_RANGE:,} entries are hashed at a time; give a shorter stretch."
    try:
        with snapshot(services.engine) as connection:
            return verify_range(connection, start, end), ""
    except ValueError as error:
        said = str(error)
        return None, f"{said[0].upper()}{said[1:]}."


def _held(services: Services, kept: str) -> tuple[Held | None, str]:
    """The checkpoint that was given, held to the log; or why that cannot be done."""
    if not kept.strip():
        return None, ""
    records = [*services.store.keys(), *services.keyring.public_records()]
    try:
        return hold(kept, services.log, map(PublicKey.from_record, records)), ""
    except NoCheckpoint as error:
        said = str(error)
        return None, f"{said[0].upper()}{said[1:]}."


def _number(text: str) -> int | None:
    plain = text.strip().replace(",", "")
    return int(plain) if plain.isascii() and plain.isdecimal() and len(plain) < 17 else None
