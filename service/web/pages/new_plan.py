"""``/plans/new``: a form for a plan, which is validated while typing, previewed, and submitted.

The button of the form selects the action: ``validate`` parses the plan, ``check`` accounts it,
``noise`` accounts it with other noise multipliers, ``certify`` submits it by the use case of the
API, and ``read`` fills in the form from a pasted document.

A preview shows what would be signed if the plan were submitted now. The plan is accounted as by
``affidavit check`` and evaluated by the policy of its data set; nothing is stored.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from affidavit.plan import MalformedPlan, Plan, Reason, as_document, digest
from affidavit.service.certificates.certificate_curves import NoCurve, plan_of
from affidavit.service.certificates.preview_plan import (
    MAX_TEXT_LENGTH,
    NoisePoint,
    Pictures,
    Preview,
    ReadDocument,
)
from affidavit.service.certificates.store import PlanRequest
from affidavit.service.core.errors import AccountingUnavailable
from affidavit.service.identity.actor import Actor
from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.openapi import ID_PATTERN, YAML
from affidavit.service.web.pages.access import Submitter
from affidavit.service.web.pages.charts import figure_of
from affidavit.service.web.pages.errors import unavailable
from affidavit.service.web.pages.forms import SubmittedForm
from affidavit.service.web.pages.plan_form import (
    EXAMPLES,
    MAX_RELEASES,
    RELEASE,
    SECTIONS,
    START,
    Field,
    ParsedPlan,
    PlanForm,
    fields,
    parse,
    refused,
    yaml_of,
)
from affidavit.service.web.pages.response import (
    action,
    base_url,
    is_fragment,
    page,
    respond,
    see_other,
)
from affidavit.service.web.pages.text import (
    draft_sentence,
    round_down,
    round_up,
)

router = APIRouter()

TEMPLATE = "new_plan.html"
WIDTH, HEIGHT = 440, 320
"""Size of a chart in pixels."""
RARE_FIELDS = ("adjacency", "sampling.scheme", "dataset.size", "target.epsilon", "target.delta")
"""Fields that documents of other libraries rarely contain."""
Mode = Literal["form", "yaml", "document"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewPlan:
    """The view; ``answer`` is the preview of an accounted plan, ``trouble`` why there is none.

    ``document`` is a pasted text, ``lacking`` are fields that it may lack, and ``read`` is the
    result of reading it. ``noise`` has the bounds of the plan with less and with more noise.
    ``part`` is true for a fragment, which contains the errors without the form.
    """

    mode: Mode
    sections: tuple[dict[str, Any], ...]
    releases: tuple[dict[str, Any], ...]
    yaml: str
    readable: bool
    typed: bool
    reasons: tuple[Reason, ...]
    elsewhere: tuple[Reason, ...]
    curl: str
    digest: str | None
    examples: tuple[tuple[str, str], ...] = tuple(
        (name, label) for name, (label, _) in EXAMPLES.items()
    )
    answer: dict[str, Any] | None = None
    trouble: str | None = None
    no_curve: str | None = None
    noise: tuple[dict[str, Any], ...] | None = None
    document: str = ""
    lacking: tuple[dict[str, Any], ...] = ()
    read: ReadDocument | None = None
    part: bool = False


@page(router, "/plans/new")
def new_plan(
    request: Request,
    _: Submitter,
    services: TheServices,
    like: Annotated[str | None, Query(pattern=ID_PATTERN)] = None,
    example: Annotated[str, Query(max_length=32)] = "",
) -> Response:
    """Show the form, empty or filled in from an example or the certificate ``like``.

    With the example ``document``, the page asks for a script or plan to paste.
    """
    certificate = None if like is None else services.store.find(like)
    if certificate is not None:
        yaml = yaml_of(as_document(plan_of(certificate)))
        return _respond(request, _view(request, "yaml", PlanForm.of({}), yaml))
    if example == "document":
        return _respond(request, _document_view(request, PlanForm.of({}), ""))
    values = EXAMPLES[example][1] if example in EXAMPLES else {}
    form = PlanForm.of({**START, **values})
    # An empty form shows no errors yet.
    view = _view(request, "form", form, form.yaml)
    return _respond(request, replace(view, typed=bool(values)))


@action(router, "/plans/new")
async def submit_form(
    request: Request, actor: Submitter, services: TheServices, submitted: SubmittedForm
) -> Response:
    """Perform the action of the button."""
    mode: Mode = "yaml" if submitted.get("mode") == "yaml" else "form"
    button = submitted.get("do")
    entered = submitted.first_values()
    for row, sigma in enumerate(submitted.get("sigma").split(",")[:MAX_RELEASES]):
        if sigma:
            entered[f"releases.{row}.noise_multiplier"], button = sigma, "check"
    form = PlanForm.of(entered, more_releases=1 if button == "more" else 0)
    if button == "read":
        view = _document_view(request, form, "\n".join(submitted.all("document")))
    else:
        yaml = "\n".join(submitted.all("yaml"))[:MAX_TEXT_LENGTH] if mode == "yaml" else form.yaml
        view = _view(request, "yaml" if button == "yaml" else mode, form, yaml)
    try:
        match button:
            case "read":
                return await _read(request, services, form, view.document)
            case "certify":
                return await _certify(request, actor, services, view)
            case "noise" if is_fragment(request):
                return await _noise(request, services, view)
            case "check" | "noise":
                return await _preview(request, actor, services, view)
            case "validate":
                return _respond(request, view, fragment="findings")
            case _:
                return _respond(request, replace(view, typed=False))
    except AccountingUnavailable as error:
        trouble, status = unavailable(error)
        part = {"check": "answer", "noise": "noise"}.get(button)
        return _respond(request, replace(view, trouble=trouble), fragment=part, status=status)


async def _read(request: Request, services: Services, form: PlanForm, text: str) -> Response:
    """Fill in the form from a document, or show the document again with its errors."""
    try:
        read = await services.preview_plan.read(text, form.document)
    except MalformedPlan as error:
        read = ReadDocument(reasons=error.reasons)
    if read.document is None:
        return _respond(request, _document_view(request, form, text, read), status=422)
    filled = PlanForm.of_document(read.document)
    if filled is None:
        view = _view(request, "yaml", PlanForm.of({}), yaml_of(read.document))
    else:
        view = _view(request, "form", filled, filled.yaml)
    return _respond(request, replace(view, read=read))


async def _preview(request: Request, actor: Actor, services: Services, view: NewPlan) -> Response:
    """Show the preview of the plan; htmx requests the noise table separately."""
    plan = parse(view.yaml).plan
    if plan is None:
        return _respond(request, view, fragment="answer", status=422)
    draft, curves = await asyncio.gather(
        services.preview_plan.assess(plan, actor.name, actor.owning_team), _curves(services, plan)
    )
    view = replace(view, answer=preview_of(draft))
    if not is_fragment(request):
        with suppress(AccountingUnavailable):
            view = replace(view, noise=await _noise_rows(services, plan))
    if isinstance(curves, str):
        return _respond(request, replace(view, no_curve=curves), fragment="answer")
    return _respond(request, view, curves, fragment="answer")


async def _noise(request: Request, services: Services, view: NewPlan) -> Response:
    """Show ε of the plan with less and with more noise, for htmx."""
    plan = parse(view.yaml).plan
    if plan is None:
        return _respond(request, view, fragment="answer")
    rows = await _noise_rows(services, plan)
    return _respond(request, replace(view, noise=rows), fragment="noise")


async def _noise_rows(services: Services, plan: Plan) -> tuple[dict[str, Any], ...]:
    return tuple(map(_noise_row, await services.preview_plan.noise_points(plan)))


def _noise_row(point: NoisePoint) -> dict[str, Any]:
    """Return ε and the noise of each release, both rounded up, so that the bound holds."""
    noise = tuple(round_up(sigma) for sigma in point.noise)
    joint = "not defined" if point.joint is None else f"joint {round_up(point.joint)}"
    return {
        "sigma": ",".join(noise),
        "shown": noise[0] if len(noise) == 1 else joint,
        "epsilon": round_up(point.epsilon),
        "is_own": point.factor == 1,
    }


async def _curves(services: Services, plan: Plan) -> Pictures | str:
    """Return the charts, or the reason for their absence; a timeout does not fail the preview."""
    try:
        return await services.preview_plan.draw(plan)
    except NoCurve as error:
        return " ".join(reason.message for reason in error.reasons) or "there is no curve."
    except AccountingUnavailable as error:
        return unavailable(error)[0]


async def _certify(request: Request, actor: Actor, services: Services, view: NewPlan) -> Response:
    """Submit the plan and redirect to its certificate; show the form again if it is invalid."""
    if not view.readable:
        return _respond(request, view, status=422)
    submission = PlanRequest(
        requester=actor.name,
        received_at=services.clock.now(),
        content_type=YAML[0],
        body=view.yaml.encode("utf-8", "replace"),
        team=actor.owning_team,
    )
    result = await services.submit_plan(submission, "yaml")
    if result.created:
        request.state.verdict = result.certificate.verdict
    return see_other(f"/certificates/{result.certificate.id}")


def preview_of(preview: Preview) -> dict[str, Any]:
    """Return the view of a preview; ε and δ are rounded up."""
    assessment, ledger = preview.assessment, preview.ledger
    bounded = assessment.epsilon is not None and math.isfinite(assessment.epsilon.upper)
    return {
        "verdict": assessment.verdict,
        "sentence": draft_sentence(assessment),
        "epsilon": round_up(assessment.epsilon.upper) if assessment.epsilon and bounded else None,
        "epsilon_lower": None
        if assessment.epsilon is None
        else round_down(assessment.epsilon.lower),
        "delta": None if assessment.delta is None else round_up(assessment.delta.upper),
        "adjacency": assessment.adjacency,
        "unit": assessment.unit,
        # Rounded up, because users copy it to the configuration of the noise.
        "joint": round_up(assessment.joint),
        "noise": tuple(
            {
                "name": release.name,
                "count": release.count,
                "given": None if release.given is None else f"{release.given:.6g}",
                "required": round_up(release.required),
            }
            for release in assessment.releases
        ),
        "engine": assessment.accountants[0].name if assessment.accountants else None,
        "reasons": assessment.reasons,
        "warnings": tuple(warning.message for warning in assessment.warnings),
        "assumptions": assessment.assumptions,
        "policy": f"{preview.policy.name} v{preview.policy.version}",
        "waived": tuple(waived.reason.code for waived in preview.judgement.waived),
        "approvals": preview.policy.approvals,
        "budget": None if ledger is None else _budget(ledger),
        "fits": None if ledger is None else bool(ledger["fits"]),
    }


def curl_of(base: str) -> str:
    """Return the shell command that submits the plan; ``base`` is quoted."""
    address = shlex.quote(f"{base.rstrip('/')}/v1/certificates")
    return (
        f"curl -sS {address} -H 'Content-Type: application/yaml' "
        '-H "Authorization: Bearer $AFFIDAVIT_TOKEN" --data-binary @plan.yaml'
    )


def _view(request: Request, mode: Mode, form: PlanForm, yaml: str) -> NewPlan:
    parsed = parse(yaml)

    def section(title: str, about: str, entries: Sequence[Field], at: str = "") -> dict[str, Any]:
        views = [_field(entry, f"{at}{entry.name}", form, parsed) for entry in entries]
        return {"title": title, "about": about, "fields": views}

    return NewPlan(
        mode=mode,
        sections=tuple(section(item.title, item.about, item.fields) for item in SECTIONS),
        releases=tuple(
            section(f"Release {row + 1}", "", RELEASE, f"releases.{row}.")
            for row in range(form.releases)
        ),
        yaml=yaml,
        readable=parsed.plan is not None,
        typed=True,
        reasons=parsed.reasons,
        elsewhere=parsed.elsewhere if mode == "form" else parsed.reasons,
        curl=curl_of(base_url(request)),
        digest=None if parsed.plan is None else digest(parsed.plan),
    )


def _document_view(
    request: Request, form: PlanForm, text: str, read: ReadDocument | None = None
) -> NewPlan:
    """Return the view to paste a document, with fields that it lacks or rarely contains."""
    reasons = () if read is None else read.reasons
    parsed = refused(reasons)
    missing = {name for name in parsed.at_field if not name.startswith("releases.")}
    if any(reason.pointer == "/steps" for reason in reasons):
        missing.add("epochs")
    lacking = tuple(
        _field(field, field.name, form, parsed)
        for field in fields()
        if field.name in (*RARE_FIELDS, *missing) or form.value(field.name)
    )
    view = _view(request, "document", PlanForm.of({}), "")
    return replace(
        view, document=text, lacking=lacking, read=read, reasons=reasons, elsewhere=parsed.elsewhere
    )


def _field(field: Field, name: str, form: PlanForm, parsed: ParsedPlan) -> dict[str, Any]:
    """Return a field with its value and errors."""
    reasons = parsed.at_field.get(name, ())
    return {
        **asdict(field),
        "name": name,
        "id": "f-" + name.replace(".", "-").replace("_", "-"),
        "value": form.value(name),
        "errors": tuple(f"{reason.message} {reason.remedy}" for reason in reasons),
    }


def _budget(ledger: Mapping[str, object]) -> str:
    """Return a sentence about the spent budget."""
    budget, spent, after = ledger["budget"], ledger["spent"], ledger["with_this_run"]
    assert isinstance(budget, Mapping)
    assert isinstance(spent, Mapping)
    sentence = f"{spent['epsilon']} of ε = {budget['epsilon']} is spent"
    if isinstance(after, Mapping):
        return f"{sentence}; with this run {after['epsilon']}"
    return sentence


def _respond(
    request: Request,
    view: NewPlan,
    pictures: Pictures = (),
    *,
    fragment: str | None = None,
    status: int = 200,
) -> Response:
    charts = {
        f"picture_{index}": figure_of(chart, width=WIDTH, height=HEIGHT)
        for index, chart in enumerate(pictures)
    }
    # htmx ignores error responses.
    part = fragment is not None and is_fragment(request)
    view, status = replace(view, part=part), 200 if part else status
    return respond(
        request, view, template=TEMPLATE, charts=charts, fragment=fragment, status=status
    )
