"""What anybody may read: keys, the status list, mechanisms, and pages about the API.

``/docs`` is the API to read and try in a browser, by Swagger UI, without any other host.
``/problems/{code}`` is what the ``type`` of a problem document leads to.
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
from affidavit.service.dependencies import TheServices
from affidavit.service.identity.access import open_to_all
from affidavit.service.lifecycle.models import SignedStatusList
from affidavit.service.middleware import CONTENT_SECURITY_POLICY
from affidavit.service.models import Object, PlanDocument
from affidavit.service.openapi import problems
from affidavit.service.problems import Problem
from affidavit.service.routing import JSON

router = APIRouter(dependencies=[open_to_all()])


class Keys(ResponseModel):
    """Public key records: one document, which ``verify --keys`` reads."""

    keys: list[Object]


@router.get("/v1/keys", summary="List public keys", responses=problems(503))
def keys(services: TheServices) -> Keys:
    """Keys that the service signs with, has signed certificates with, or has in its keyset.

    Where a key is both stored and in the directory, the directory's record counts.
    """
    return Keys(keys=services.key_records())


@router.get(
    "/v1/status",
    summary="Get the status list",
    response_class=Response,
    responses={
        200: {"description": "The signed list, valid for an hour.", "model": SignedStatusList},
        **problems(503),
    },
)
def status(services: TheServices) -> Response:
    """The signed list of revoked certificates; ``verify --status`` reads it."""
    services.safety.require()
    document = services.status_lists.at(services.clock.now())
    return Response(document, media_type=JSON, headers={"Cache-Control": "max-age=60"})


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
    summary="List mechanisms",
    response_class=JSONResponse,
    responses={200: {"model": Page[Mechanism]}},
)
def mechanisms() -> Response:
    """In the order of the registry."""
    return Response(_all_mechanisms(), media_type=JSON)


@cache
def _all_mechanisms() -> bytes:
    """They take 60 ms to write, and anybody may ask as often as they like."""
    items = [item.as_dict() for item in all_mechanisms().values()]
    return bytes(JSONResponse({"items": items, "next": None}).body)


@router.get(
    "/v1/mechanisms/{name}",
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


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """FastAPI's own route for it would be the only one that declares no access."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        state.openapi = bytes(JSONResponse(request.app.openapi()).body)
    return Response(state.openapi, media_type=JSON)


# ---- pages about the API -------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Affidavit API</title>
<link rel="stylesheet" href="/docs/swagger-ui.css">
<div id="docs"><p>Loading. <a href="/openapi.json">The document</a> needs no scripts.</p></div>
<script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script>
</html>
"""
START = """SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#docs", validatorUrl: null, defaultModelsExpandDepth: 0
});
"""
# Swagger UI sets styles by script and has its icons in the style sheet.
POLICY = CONTENT_SECURITY_POLICY.replace("img-src 'self'", "img-src 'self' data:").replace(
    "style-src 'self'", "style-src 'self' 'unsafe-inline'"
)
MEDIA = {"css": "text/css", "js": "text/javascript"}


@router.get("/docs", include_in_schema=False)
def docs() -> Response:
    """The page."""
    headers = {"Content-Security-Policy": POLICY}
    return Response(PAGE, media_type="text/html", headers=headers)


@router.get("/docs/{name}", include_in_schema=False)
def asset(
    name: Annotated[Literal["swagger-ui.css", "swagger-ui-bundle.js", "start.js"], Path()],
) -> Response:
    """A part of the page; Swagger UI is that of the package fastapi-offline."""
    content: str | bytes = START
    if name != "start.js":
        content = (files("fastapi_offline") / "static" / name).read_bytes()
    headers = {"Cache-Control": "max-age=86400"}
    return Response(content, media_type=MEDIA[name.rpartition(".")[2]], headers=headers)


@router.get("/problems/{code}", include_in_schema=False, response_class=HTMLResponse)
def problem_type(code: Annotated[str, Path(pattern="^[a-z0-9_]{1,64}$")]) -> HTMLResponse:
    """A short page with the messages and remedies of a code; ``…`` stands for what is filled in."""
    meanings = explain(code)
    if not meanings:
        raise Problem(404, "not_found", "this code does not exist.")
    rows = "".join(
        f"<tr><td>{escape(meaning.room)}</td><td>{escape(meaning.message)}</td>"
        f"<td>{escape(meaning.remedy)}</td></tr>"
        for meaning in meanings
    )
    return HTMLResponse(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{code}</title>'
        f"<h1>{code}</h1><table><tr><th>Source</th><th>Message</th><th>What to do</th></tr>"
        f"{rows}</table></html>"
    )
