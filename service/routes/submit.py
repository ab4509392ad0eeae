"""``POST /v1/certificates``: a plan in, its certificate out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from affidavit.plan import Syntax
from affidavit.service.bodies import read_body
from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.lifecycle.answer import answer_of
from affidavit.service.openapi import JSON, YAML, answers, plan_body, problems
from affidavit.service.problems import Problem
from affidavit.service.services import TheServices
from affidavit.service.store import Request

router = APIRouter()

_LOCATION = {"Location": {"schema": {"type": "string"}, "description": "The certificate's path."}}
CREATED = {**answers("Certified now; the verdict is in the body.", "Result"), "headers": _LOCATION}
KNOWN = {**answers("Known already: what was answered then.", "Result"), "headers": _LOCATION}


async def syntax_of_body(http: HttpRequest) -> Syntax:
    """The syntax that the headers declare; there is no guessing."""
    declared = http.headers.get("content-type", "")
    media, *parameters = [part.strip().lower() for part in declared.split(";")]
    charsets = [
        parameter.partition("=")[2].strip('"')
        for parameter in parameters
        if "charset=" in parameter
    ]
    encoding = http.headers.get("content-encoding", "identity").lower()
    if encoding == "identity" and set(charsets) <= {"utf-8"}:
        if media == JSON:
            return "json"
        if media in YAML:
            return "yaml"
    raise Problem(
        415,
        "unsupported_media_type",
        f"a plan comes as {JSON} or {YAML[0]}, in UTF-8 and not compressed; "
        "set Content-Type accordingly.",
        headers={"Accept": ", ".join((JSON, *YAML))},
    )


@router.post(
    "/v1/certificates",
    summary="Certify a plan",
    response_class=Response,
    status_code=201,
    responses={201: CREATED, 200: KNOWN, **problems(400, 401, 403, 408, 415, 503)},
    openapi_extra=plan_body(),
)
async def submit(
    actor: Annotated[Actor, needs(Scope.SUBMIT)], http: HttpRequest, services: TheServices
) -> Response:
    """Whatever the verdict, a well-formed plan gets a signed certificate that is stored."""
    # Called, and not declared: most requests ask for what is known, and each further dependency
    # would take the framework a tenth as long as looking that up.
    syntax = await syntax_of_body(http)
    body = await read_body(http)
    request = Request(
        requester=actor.name,
        received_at=datetime.now(UTC),
        content_type=http.headers["content-type"][:255],
        body=body,
    )
    answer = await services.submit_plan(request, syntax)
    if answer.created:
        http.state.verdict = answer.certificate.verdict
    return Response(
        answer_of(answer.certificate),
        201 if answer.created else 200,
        {"Location": f"/v1/certificates/{answer.certificate.id}"},
        media_type=JSON,
    )
