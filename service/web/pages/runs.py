"""``/runs``: the list of runs, the progress of a run, and forms to start and stop one.

The worker's results are read from its signed provenance, whose signature the service verified
before it settled the run.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from affidavit.assessment import explain_guarantee
from affidavit.plan import Reason
from affidavit.service.certificates.store import current
from affidavit.service.core.errors import DomainError, MalformedRequest
from affidavit.service.core.problems import Problem
from affidavit.service.identity.actor import Actor, CommandContext
from affidavit.service.identity.scopes import Scope
from affidavit.service.ledger import repository as ledger_repository
from affidavit.service.runs import repository
from affidavit.service.runs.queue import LockedRun
from affidavit.service.runs.repository import StoredRun, StoredRunEvent, round_up_steps
from affidavit.service.runs.wire_models import CancelRequest, RunId, RunRequest
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.openapi import ID_PATTERN, JSON
from affidavit.service.web.pages.access import (
    Anyone,
    Reader,
    Submitter,
    page_actor,
)
from affidavit.service.web.pages.certificates import certified_choices
from affidavit.service.web.pages.charts import chart_response, meaning_figure
from affidavit.service.web.pages.forms import (
    Form,
    SubmittedForm,
    number,
)
from affidavit.service.web.pages.response import (
    action,
    download,
    is_fragment,
    page,
    respond,
    see_other,
)
from affidavit.service.web.pages.text import (
    TONES,
    elapsed,
    group_digits,
    messages_of,
    words,
)
from affidavit.service.web.routes.runs import BYTES, bundle_of
from affidavit.trust import statement_in

router = APIRouter()

PAGE_SIZE = 50
EVENTS = {
    "queued": "waits for a worker",
    "claimed": "a worker takes it",
    "requeued": "returned to the queue",
    "cancel_asked": "stop requested",
    "running": "the first step starts; the budget is committed",
    "resumed": "continued by another worker",
    "settled": "the record conforms to the certificate",
    "failed": "",
    "cancelled": "",
}
"""The meaning of an event, empty if its name is enough."""
ENGINES = {
    "NoneType": "affidavit worker",
    "RayJobs": "Ray",
    "Slurm": "Slurm",
    "KubernetesJobs": "Kubernetes",
}
"""Names of the engines that start workers, by class."""
RUN_FIELDS = (
    ("certificate", "Certificate", "A certified plan, newest first"),
    ("data", "Data", "As for affidavit train, for example digits:part=train"),
    ("model", "Model", "As for affidavit train, for example mlp:32,seed=1,blocks=all"),
    ("output", "Output", "A folder below the worker's output folder"),
    ("queue", "Queue", "Empty: default"),
    ("gpus", "GPUs", "Empty: none"),
    ("time_limit", "Time limit", "Seconds from the first step; empty: no limit"),
    ("reservation", "Reservation", "Empty: made when the run starts"),
)
"""The fields of a new run, their labels and hints; those after ``output`` are optional."""
NEW = "new_run.html"
WIDTH, HEIGHT = 560, 300
State = Literal["queued", "claimed", "running", "settled", "failed", "cancelled", ""]
Stopper = Annotated[Actor, page_actor(Scope.SUBMIT, Scope.ADMIN, always=True)]
QueueName = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9._-]{0,64}$")]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunForm:
    """The submitted values of the form of a new run, and their errors.

    ``part`` is true for a fragment, which contains only the errors. ``choices`` are the ids and
    names of certified plans.
    """

    values: dict[str, str]
    reasons: tuple[Reason, ...] = ()
    part: bool = False
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def fields(self) -> tuple[tuple[str, str, str], ...]:
        """The fields with labels and hints."""
        return RUN_FIELDS

    def errors(self, field: str = "") -> str:
        """Return the errors of a field, or those of no field."""
        names = {name for name, *_ in RUN_FIELDS}
        about = [(reason, reason.pointer.rpartition("/")[2]) for reason in self.reasons]
        return messages_of(
            tuple(reason for reason, name in about if (name if name in names else "") == field)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The run record and its findings, according to the worker's signed provenance."""

    digest: str | None
    conformant: bool
    charged: int
    released: int
    findings: tuple[dict[str, Any], ...]
    began: str
    ended: str
    builder: str
    subject: str
    subject_digest: str


# ---- the queue ----------------------------------------------------------------------


@page(router, "/runs")
def queue(
    request: Request,
    _: Anyone,
    services: TheServices,
    state: State = "",
    queue: QueueName = None,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """List the latest runs, optionally of one state or queue."""
    filters: dict[str, Any] = {"state": state or None, "queue": queue or None}
    with services.engine.connect() as connection:
        runs, following = repository.page(connection, cursor, PAGE_SIZE, **filters)
    view = {"runs": runs, "next": following, "state": state, "queue": queue or ""}
    return respond(request, view, template="runs.html")


# ---- starting and stopping ----------------------------------------------------------


@page(router, "/runs/new")
def new_run(
    request: Request,
    _: Submitter,
    services: TheServices,
    certificate: Annotated[str | None, Query(pattern=rf"{ID_PATTERN}|^$")] = None,
) -> Response:
    """Show the form of a new run."""
    with services.engine.connect() as connection:
        choices = certified_choices(connection)
    view = RunForm(values={"certificate": certificate or ""}, choices=choices)
    return respond(request, view, template=NEW)


@action(router, "/runs/new")
async def start_run(
    request: Request, actor: Submitter, services: TheServices, form: SubmittedForm
) -> Response:
    """Request a run, by the use case of the API, or validate the form so far."""
    is_check = form.get("do") == "check"
    values = form.first_values()
    try:
        run_request = RunRequest.from_data(_fields(form))
        if is_check:
            return respond(
                request, RunForm(values=values, part=True), template=NEW, fragment="errors"
            )
        call = CommandContext.of(actor, request, None, run_request)
        run, _ = await services.runs.request(
            run_request, call, any_reservation=actor.may(Scope.ADMIN)
        )
    except MalformedRequest as error:
        reasons, status = error.reasons, 422
    except DomainError as error:
        reasons, status = (error.reason,), error.status
    else:
        return see_other(f"/runs/{run.id}")
    if is_check:  # fields that are still empty are no errors
        filled = {name for name, text in values.items() if text.strip()}
        reasons = tuple(r for r in reasons if r.pointer.rpartition("/")[2] in filled)
        status = 200
    view = RunForm(values=values, reasons=reasons, part=is_check)
    return respond(request, view, template=NEW, fragment="errors", status=status)


@action(router, "/runs/{run_id}/cancel")
def stop_run(
    request: Request, actor: Stopper, services: TheServices, run_id: RunId, form: SubmittedForm
) -> Response:
    """Stop a run of the actor, or any run as an administrator."""
    run = services.runs.queue.find(run_id)
    if run.requested_by != actor.name and not actor.may(Scope.ADMIN):
        raise Problem(403, "not_yours", "another person started this run; ask them to stop it.")
    try:
        cancellation = CancelRequest.from_data({"reason": form.get("reason")})
    except MalformedRequest as error:
        raise Problem(422, "malformed_request", str(error), *error.reasons) from None
    call = CommandContext.of(actor, request, None, cancellation)
    services.runs.queue.change(run_id, call, LockedRun.cancel, cancellation.reason)
    return see_other(f"/runs/{run_id}", done="stopped")


def _fields(form: Form) -> dict[str, object]:
    """Return the form as a request of the API, without empty fields."""
    texts = ("certificate", "data", "model", "output", "queue", "reservation")
    fields: dict[str, object] = {name: form.get(name) for name in texts if form.get(name)}
    if text := form.get("time_limit"):
        fields["time_limit"] = number(text)
    if text := form.get("gpus"):
        fields["requirements"] = {"gpus": number(text)}
    return fields


# ---- one run ------------------------------------------------------------------------


@page(router, "/runs/{run_id}")
async def run(request: Request, _: Anyone, services: TheServices, run_id: RunId) -> Response:
    """Show the progress of a run, its events, its record and its charge."""
    view = await run_in_threadpool(_read, services, run_id)
    run = view["run"]
    if run.has_ended and is_fragment(request):
        # The run has ended, which changes the whole page.
        return Response(headers={"HX-Refresh": "true"})
    if not run.has_ended and run.steps.reported:
        spent = (await services.run_events.progress(run, run.steps.reported)).spent
        view["spent"] = spent if spent is not None and math.isfinite(spent.epsilon) else None
    return respond(
        request,
        view,
        template="run.html",
        fragment="live",
        charts={"meaning_svg": meaning_figure(view["guarantee"])},
    )


@page(router, "/runs/{run_id}/record.jsonl")
def record(_: Reader, services: TheServices, run_id: RunId) -> Response:
    """Download the record with a browser session; the API returns the same bytes."""
    parts = services.runs.queue.read(repository.final_record, run_id)
    return download(map(zlib.decompress, parts), BYTES, f"record-{run_id}.jsonl")


@page(router, "/runs/{run_id}/bundle.json")
def bundle(_: Reader, services: TheServices, run_id: RunId) -> Response:
    """Download the bundle of the issue with which the run was requested."""
    run = services.runs.queue.find(run_id)
    return download(bundle_of(services, run), JSON, f"bundle-{run_id}.json")


@router.get("/runs/{run_id}/steps.svg", include_in_schema=False, response_class=Response)
async def steps_chart(
    request: Request, _: Reader, services: TheServices, run_id: RunId
) -> Response:
    """Draw ε over the steps of the run, with the certified maximum."""
    run = await run_in_threadpool(services.runs.queue.find, run_id)
    steps = run.steps.charged
    if steps is None:
        steps = round_up_steps(run.steps.reported, run.steps.certified)
    stored = await run_in_threadpool(services.store.get, run.certificate)
    result = await services.draw_certificate.charts(stored, steps or None)
    chart = result.charts.get("steps")
    if chart is None:
        raise Problem(404, "no_chart", "this run's certificate has no privacy curve.")
    return chart_response(request, chart, width=WIDTH, height=HEIGHT)


def _read(services: Services, run_id: str) -> dict[str, Any]:
    """Return the view of a run; raises ``UnknownRun``.

    ``engine`` starts the workers, ``job_page`` is a URL of its dashboard, and ``spent`` is what the
    reported steps cost, or None if it is unknown.
    """
    with services.engine.connect() as connection:
        run = repository.find(connection, run_id)
        reservation = ledger_repository.find_reservation(connection, run.reservation)
        certificate = current(connection, run.certificate)
        tests = repository.tests_of(connection, run_id)
    assert reservation is not None
    assert certificate is not None
    guarantee = statement_in(certificate.bundle)["predicate"]["guarantee"]
    record = read_provenance(run.provenance)
    return {
        "run": services.dispatcher.with_refusal(run),
        "reservation": reservation,
        "message": _message(run),
        "story": _story(run.events, record),
        "record": record,
        "tests": tests,
        "engine": ENGINES[type(services.dispatcher.engine).__name__],
        "guarantee": guarantee,
        "meaning": () if guarantee is None else explain_guarantee(guarantee),
        "certificate_status": certificate.status.value,
        "job_page": services.dispatcher.dashboard_url(run),
        "spent": None,
    }


def _story(events: tuple[StoredRunEvent, ...], record: Record | None) -> tuple[dict[str, Any], ...]:
    """Return the events of the service and of the signed record by time.

    ``after`` is the time since the previous event.
    """
    moments: list[dict[str, Any]] = [
        {
            "at": event.at,
            "after": "",
            "tone": TONES.get(event.event, "plain"),
            "what": event.event,
            "tells": ": ".join(filter(None, _tell(event))),
            "actor": event.worker or event.actor,
        }
        for event in events
    ]
    if record is not None:
        moments[-1:-1] = _of_record(record)
    # The record's times are whole seconds; sorting keeps the order of events in one second.
    moments.sort(key=lambda moment: moment["at"].replace(microsecond=0))
    return tuple(
        {**moment, "after": _after(before, moment)}
        for before, moment in zip((None, *moments), moments, strict=False)
    )


def _tell(event: StoredRunEvent) -> tuple[str | None, ...]:
    """Return what an event means and why; the message of a conforming record is redundant."""
    meaning = EVENTS.get(event.event, event.event)
    return (meaning,) if event.event == "settled" else (meaning, _message(event))


def _after(before: Mapping[str, Any] | None, moment: Mapping[str, Any]) -> str:
    """Return the time since the previous event, if it is a second or more."""
    seconds = 0.0 if before is None else (moment["at"] - before["at"]).total_seconds()
    return elapsed(seconds) if seconds >= 1 else ""


def _message(of: StoredRun | StoredRunEvent) -> str | None:
    """Return why a run ended; findings of a record that does not conform are codes."""
    return words(of.message) if of.message and of.code == "not_conformant" else of.message


def _of_record(record: Record) -> list[dict[str, Any]]:
    """Return the start of training and the check of the record, which the worker signed."""
    count = len(record.findings)
    findings = f"{count} finding{'' if count == 1 else 's'}" if count else "no finding"
    tone = "good" if record.conformant else "bad"
    moments = (
        (
            record.began,
            "plain",
            "training",
            f"the record of {group_digits(record.charged)} steps begins",
        ),
        (record.ended, tone, "record checked", f"by its worker, with {findings}"),
    )
    by = record.builder
    return [
        {"at": at, "after": "", "tone": tone, "what": what, "tells": tells, "actor": by}
        for text, tone, what, tells in moments
        if (at := _instant(text)) is not None
    ]


def _instant(text: str) -> datetime | None:
    """Parse an instant of the worker's statement; returns None if it is invalid."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    return at if at.tzinfo else None


def read_provenance(envelope: Any) -> Record | None:
    """Return the record that a verified provenance describes, or None."""
    if envelope is None:
        return None
    try:
        statement = json.loads(base64.b64decode(envelope["payload"], validate=True))
        subject = statement["subject"][0]
        details = statement["predicate"]["runDetails"]
        conformance = details["byproducts"][0]["annotations"]["conformance"]
        return Record(
            digest=conformance["head"],
            conformant=conformance["conformant"],
            charged=conformance["steps"]["charged"],
            released=conformance["steps"]["released"],
            findings=tuple(conformance["findings"]),
            began=str(details["metadata"]["startedOn"]),
            ended=str(details["metadata"]["finishedOn"]),
            builder=str(details["builder"]["id"]),
            subject=str(subject["name"]),
            subject_digest=str(subject["digest"]["sha256"]),
        )
    except (binascii.Error, KeyError, IndexError, TypeError, ValueError):
        return None
