"""``/docs``: the API to read and try in a browser, by Swagger UI, without any other host.

``/problems/{code}`` is what the ``type`` of a problem document leads to.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from fastapi.responses import HTMLResponse

from affidavit.plan import explain
from affidavit.service.identity.access import open_to_all
from affidavit.service.middleware import CONTENT_SECURITY_POLICY
from affidavit.service.problems import Problem

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

router = APIRouter(dependencies=[open_to_all()], include_in_schema=False)


@router.get("/docs")
def docs() -> Response:
    """The page."""
    headers = {"Content-Security-Policy": POLICY}
    return Response(PAGE, media_type="text/html", headers=headers)


@router.get("/docs/{name}")
def asset(
    name: Annotated[Literal["swagger-ui.css", "swagger-ui-bundle.js", "start.js"], Path()],
) -> Response:
    """A part of the page; Swagger UI is that of the package fastapi-offline."""
    content: str | bytes = START
    if name != "start.js":
        content = (files("fastapi_offline") / "static" / name).read_bytes()
    headers = {"Cache-Control": "max-age=86400"}
    return Response(content, media_type=MEDIA[name.rpartition(".")[2]], headers=headers)


@router.get("/problems/{code}", response_class=HTMLResponse)
def problem_type(code: Annotated[str, Path(pattern="^[a-z0-9_]{1,64}$")]) -> HTMLResponse:
    """A short page with the messages and remedies of a code; ``…`` stands for what is filled in."""
    meanings = explain(code)
    if not meanings:
        raise Problem(404, "not_found", "there is no such code.")
    rows = "".join(
        f"<tr><td>{escape(meaning.room)}</td><td>{escape(meaning.message)}</td>"
        f"<td>{escape(meaning.remedy)}</td></tr>"
        for meaning in meanings
    )
    return HTMLResponse(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{code}</title>'
        f"<h1>{code}</h1><table><tr><th>from</th><th>says</th><th>to do</th></tr>{rows}</table>"
        "</html>"
    )
