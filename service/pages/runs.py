"""``/runs``: the queue, one run as it goes on, asking for one and stopping it (``run_view``)."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from affidavit.accountants import decimal_up
from affidavit.accountants.privacy_filter import UNIT
from affidavit.plan import Reason
from affidavit.service.command import CommandContext
from affidavit.service.cursors import InvalidCursor
from affidavit.service.errors import AccountingUnavailable, DomainError
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.ledger.rows import Reservation
from affidavit.service.openapi import ID_PATTERN
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import action, answer, page, see_other
from affidavit.service.pages.forms import Form, TheForm
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.pages.run_view import EventLine, RunLine, RunView, run_of, runs_of
from affidavit.service.pages.run_view import Runs as RunsView
from affidavit.service.pages.wishes import is_fragment
from affidavit.service.problems import Problem, invalid_cursor
from affidavit.service.requests import in_thread
from affidavit.service.routes.runs import RunId
from affidavit.service.runs.rows import Filters
from affidavit.service.runs.wanted import read_cancellation, read_run
from affidavit.service.services import Services, TheServices
from affidavit.service.wanted import MalformedRequest

router = APIRouter()

LISTED = 50
PARTS = 20
"""Stretches of a run for which what was spent so far is worked out, each once."""
DIGITS = 6
State = Literal["queued", "claimed", "running", "settled", "failed", "cancelled", ""]
Concerned = Annotated[
    Actor, page_actor(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT, Scope.WORK, Scope.ADMIN)
]
Submitter = Annotated[Actor, page_actor(Scope.SUBMIT)]
Stopper = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.ADMIN)]
QueueName = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9._-]{0,64}$")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Queue:
    """The page of runs, with what it was narrowed to."""

    runs: RunsView
    state: str
    queue: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The form of a run as it was filled in, and what is wrong with it."""

    values: dict[str, str]
    reasons: tuple[Reason, ...] = ()


@page(router, "/runs")
def queue(
    request: Request,
    _: Concerned,
    services: TheServices,
    state: State = "",
    queue: QueueName = None,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """The latest runs, of one state or queue or of all."""
    filters = Filters(state=state or None, queue=queue or None)
    try:
        found, following = services.runs.queue.page(filters, cursor, LISTED)
    except InvalidCursor as error:
        raise invalid_cursor(error) from None
    with services.engine.connect() as connection:
        listed = runs_of(connection, found, following)
    view = Queue(runs=listed, state=state, queue=queue or "")
    rows = Rows(RunLine, listed.lines)
    return answer(request, view, template="runs.html", rows=rows, fragment="queue")


@page(router, "/runs/new", csv=False)
def new_run(
    request: Request,
    _: Submitter,
    certificate: Annotated[str | None, Query(pattern=rf"{ID_PATTERN}|^$")] = None,
) -> Response:
    """The form that asks for a run."""
    view = Wanted(values={"certificate": certificate or ""})
    return answer(request, view, template="new_run.html")


@action(router, "/runs/new")
async def request_run(
    request: Request, actor: Submitter, services: TheServices, sent: TheForm
) -> Response:
    """Queue a run by the use case of the API."""
    asked = _asked(sent)
    try:
        wanted = read_run(json.dumps(asked).encode())
        call = CommandContext.of(actor, request, None, wanted)
        run, _ = await services.runs.request(wanted, call, anybodys=actor.may(Scope.ADMIN))
    except MalformedRequest as error:
        return _refused(request, sent, error.reasons, 422)
    except DomainError as refusal:
        reason = Reason(
            code=refusal.code, pointer="", message=refusal.message, remedy=refusal.remedy
        )
        return _refused(request, sent, (reason,), refusal.status)
    return see_other(f"/runs/{run.id}")


@page(router, "/runs/{run_id}")
async def run(request: Request, _: Concerned, services: TheServices, run_id: RunId) -> Response:
    """How far it is, what happened, what it did and what it was charged."""
    view, reservation = await in_thread(lambda: _read(services, run_id))
    if view.ended and is_fragment(request):
        # What was watched is over, and all of the page is another now.
        return Response(headers={"HX-Refresh": "true"})
    view = await _with_spent(services, view, reservation)
    rows = Rows(EventLine, view.events)
    return answer(request, view, template="run.html", rows=rows, fragment="live", title=run_id)


@action(router, "/runs/{run_id}/cancel")
async def cancel(
    request: Request, actor: Stopper, services: TheServices, run_id: RunId, sent: TheForm
) -> Response:
    """Stop it, if it is theirs or they administer."""
    found = await in_thread(lambda: services.runs.queue.find(run_id))
    if found.requested_by != actor.name and not actor.may(Scope.ADMIN):
        raise Problem(403, "not_yours", "somebody else asked for it; ask them.")
    try:
        wanted = read_cancellation(json.dumps({"reason": sent.get("reason")}).encode())
    except MalformedRequest as error:
        raise Problem(422, "malformed_request", str(error), *error.reasons) from None
    call = CommandContext.of(actor, request, None, wanted)
    await in_thread(lambda: services.runs.queue.cancel(run_id, wanted.reason, call))
    return see_other(f"/runs/{run_id}", done="stopped")


def _read(services: Services, run_id: str) -> tuple[RunView, Reservation]:
    with services.engine.connect() as connection:
        return run_of(connection, run_id)


async def _with_spent(services: Services, view: RunView, reservation: Reservation) -> RunView:
    """``view`` of a run that is under way, with what its steps so far cost at most.

    That is worked out for twentieths of the run, so that whoever watches asks for few.
    """
    if view.ended or not view.line.steps:
        return view
    part = math.ceil(view.certified_steps / PARTS)
    steps = min(view.certified_steps, part * math.ceil(view.line.steps / part))
    try:
        cost = await services.desk.cost_of_steps(reservation, steps)
    except (AccountingUnavailable, DomainError):
        return view
    found = (cost or reservation.cost).epsilon.value(UNIT)
    if not math.isfinite(found):
        return view
    return replace(view, so_far=decimal_up(found, DIGITS), so_far_steps=steps)


def _asked(sent: Form) -> dict[str, object]:
    """What the form says as the API is told it; fields that were left empty are left out."""
    texts = ("certificate", "data", "model", "output", "queue", "reservation")
    found: dict[str, object] = {name: sent.get(name) for name in texts if sent.get(name)}
    for name in ("priority", "time_limit"):
        given = sent.get(name)
        if given:
            found[name] = int(given) if re.fullmatch(r"-?[0-9]{1,10}", given) else given
    if sent.get("gpu"):
        found["requirements"] = {"gpu": True}
    return found


def _refused(request: Request, sent: Form, reasons: tuple[Reason, ...], status: int) -> Response:
    values = {name: texts[0] for name, texts in sent.fields.items() if texts and name != "csrf"}
    view = Wanted(values=values, reasons=reasons)
    return answer(request, view, template="new_run.html", status=status)
