"""Mechanisms, probes, metrics, and pages about the API; most are open to everybody.

``/docs`` is Swagger UI, served without any other host. The ``type`` of a problem document links to
``/problems/{code}``.
"""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import Field

from affidavit.client import Page, ResponseModel
from affidavit.mechanisms import all_mechanisms
from affidavit.plan import explain
from affidavit.service.core.problems import Problem
from affidavit.service.core.wire_models import (
    Object,
    PlanDocument,
    ProblemReason,
)
from affidavit.service.identity.scopes import Scope
from affidavit.service.web.access import needs, open_to_all
from affidavit.service.web.dependencies import TheServices
from affidavit.service.web.middleware import CONTENT_SECURITY_POLICY
from affidavit.service.web.openapi import document_bytes, problems
from affidavit.service.web.routing import JSON

router = APIRouter()
OPEN = [open_to_all()]


class Hyperparameter(ResponseModel):
    """A field of an optimiser."""

    field: str
    takes: str
    meaning: str
    changes_the_guarantee: bool


class Mechanism(ResponseModel):
    """What an optimiser releases, and its obligations for the trainer."""

    name: str
    kind: Literal["optimizer", "wrapper"]
    title: str
    releases: str
    sensitivity: str
    proof: str = Field(description="Where the sensitivity is proved.")
    post_processing: list[str]
    state_on_raw_data: list[str]
    obligations: list[Object]
    needs_auxiliary_block: bool
    clipping: str
    noise: list[str]
    hyperparameters: list[Hyperparameter]
    sources: list[str]
    minimal_plan: PlanDocument


@router.get(
    "/v1/mechanisms",
    dependencies=OPEN,
    summary="List mechanisms",
    response_class=JSONResponse,
    responses={200: {"model": Page[Mechanism]}},
)
def mechanisms() -> Response:
    """In the order of the registry."""
    return Response(_all_mechanisms(), media_type=JSON)


@cache
def _all_mechanisms() -> bytes:
    """Return the mechanisms as JSON, cached because it takes 60 ms to build and is public."""
    items = [item.as_dict() for item in all_mechanisms().values()]
    return bytes(JSONResponse({"items": items, "next": None}).body)


@router.get(
    "/v1/mechanisms/{name}",
    dependencies=OPEN,
    summary="Get a mechanism",
    response_class=JSONResponse,
    responses={200: {"model": Mechanism}, **problems(404)},
)
def mechanism(
    name: Annotated[
        str, Path(pattern=r"^[a-z0-9_]{1,64}$", description="An optimiser's name, or ``denoise``.")
    ],
) -> JSONResponse:
    """Its description, with a minimal plan."""
    described = all_mechanisms().get(name)
    if described is None:
        raise Problem(
            404, "not_found", f"Mechanism {name} not found; GET /v1/mechanisms lists them."
        )
    return JSONResponse(described.as_dict())


@router.get("/openapi.json", dependencies=OPEN, include_in_schema=False)
async def openapi(request: Request) -> Response:
    """Return the document; FastAPI's own route would declare no access."""
    return Response(document_bytes(request.app), media_type=JSON)


# ---- probes and metrics --------------------------------------------------------------

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Alive(ResponseModel):
    """The process is alive."""

    status: Literal["alive"] = "alive"


class Signer(ResponseModel):
    """The signing key; ``development`` is true for a development key."""

    key_id: str
    development: bool


class Ready(ResponseModel):
    """The service is ready; ``warnings`` list what the operator should fix."""

    status: Literal["ready"] = "ready"
    revision: str | None = Field(
        serialization_alias="schema", description="The database's schema revision."
    )
    signer: Signer
    warnings: list[ProblemReason]


@router.get(
    "/livez",
    dependencies=[open_to_all(limited=False)],
    summary="Liveness probe",
)
async def livez() -> Alive:
    """Runs on the event loop, so it answers even when every thread is busy."""
    return Alive()


@router.get(
    "/readyz",
    dependencies=OPEN,
    summary="Readiness probe",
    responses=problems(503),
)
def readyz(services: TheServices) -> Ready:
    """Checks the database, the schema, the signing key and the audit log."""
    readiness = services.readiness()
    if readiness.reasons or readiness.key is None:
        raise Problem(503, "not_ready", str(readiness.reasons[0]), *readiness.reasons)
    return Ready(
        revision=readiness.revision,
        signer=Signer.model_validate(readiness.key),
        warnings=[ProblemReason.model_validate(item) for item in services.authenticator.warnings()],
    )


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    dependencies=[needs(Scope.AUDIT, Scope.ADMIN)],
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
    },
)
def metrics(services: TheServices) -> Response:
    """For a scraper with a token of scope audit."""
    return Response(services.metrics.exposition(), headers={"Content-Type": PROMETHEUS})


# ---- pages about the API -------------------------------------------------------------

DOCS_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Affidavit API</title>
<link rel="stylesheet" href="/docs/swagger-ui.css">
<div id="docs"><p>Loading. <a href="/openapi.json">The document</a> needs no scripts.</p></div>
<script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script>
</html>
"""
START_SCRIPT = """SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#docs", validatorUrl: null, defaultModelsExpandDepth: 0
});
"""
# Swagger UI sets styles by script, and its style sheet contains images.
DOCS_SECURITY_POLICY = CONTENT_SECURITY_POLICY.replace(
    "img-src 'self'", "img-src 'self' data:"
).replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
MEDIA_TYPES = {"css": "text/css", "js": "text/javascript"}


@router.get("/docs", dependencies=OPEN, include_in_schema=False)
def docs() -> Response:
    """Return the page."""
    headers = {"Content-Security-Policy": DOCS_SECURITY_POLICY}
    return Response(DOCS_PAGE, media_type="text/html", headers=headers)


@router.get("/docs/{name}", dependencies=OPEN, include_in_schema=False)
def asset(
    name: Annotated[Literal["swagger-ui.css", "swagger-ui-bundle.js", "start.js"], Path()],
) -> Response:
    """Return a file of the page; Swagger UI comes with the package fastapi-offline."""
    content: str | bytes = START_SCRIPT
    if name != "start.js":
        content = (files("fastapi_offline") / "static" / name).read_bytes()
    headers = {"Cache-Control": "max-age=86400"}
    return Response(content, media_type=MEDIA_TYPES[name.rpartition(".")[2]], headers=headers)


@router.get(
    "/problems/{code}",
    dependencies=OPEN,
    include_in_schema=False,
    response_class=HTMLResponse,
)
def problem_type(code: Annotated[str, Path(pattern="^[a-z0-9_]{1,64}$")]) -> HTMLResponse:
    """Return a page with the messages and remedies of a code; ``…`` stands for variable text."""
    meanings = explain(code)
    if not meanings:
        raise Problem(404, "not_found", "this code does not exist.")
    rows = "".join(
        f"<tr><td>{escape(meaning.part)}</td><td>{escape(meaning.message)}</td>"
        f"<td>{escape(meaning.remedy)}</td></tr>"
        for meaning in meanings
    )
    return HTMLResponse(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{code}</title>'
        f"<h1>{code}</h1><table><tr><th>Source</th><th>Message</th><th>What to do</th></tr>"
        f"{rows}</table></html>"
    )
