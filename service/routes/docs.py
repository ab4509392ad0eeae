"""``/docs``: the API to read and try in a browser, by Swagger UI, without any other host."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response

from affidavit.service.identity.access import open_to_all
from affidavit.service.middleware import CONTENT_SECURITY_POLICY

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
