"""Responses with a view as HTML page, and with a table as CSV.

Responses are never cached, because they depend on the user.

>>> to_csv(["name", "steps"], [{"name": "=1+1", "steps": -3}])
b"name,steps\\r\\n'=1+1,-3\\r\\n"

References: RFC 4180 (CSV); OWASP, CSV injection.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import iter_route_contexts
from markupsafe import Markup
from pydantic_core import to_jsonable_python

from affidavit.service.identity.actor import Actor
from affidavit.service.identity.authentication import Caller
from affidavit.service.identity.scopes import Scope
from affidavit.service.web import sessions
from affidavit.service.web.dependencies import Services
from affidavit.service.web.pages.forms import form_token
from affidavit.service.web.pages.templating import (
    environment,
    groups_for,
    may_open,
)
from affidavit.service.web.pages.text import spreadsheet_safe

_API_PATHS = ("/v1/", "/static/", "/livez", "/readyz", "/metrics", "/openapi.json")


# ---- content negotiation ------------------------------------------------------------


def is_fragment(request: Request) -> bool:
    """Return whether htmx requests a part of a page."""
    return "hx-request" in request.headers and "hx-history-restore-request" not in request.headers


def accepts_html(request: Request) -> bool:
    """Return whether a browser sent the request, and not to the API."""
    if request.url.path.startswith(_API_PATHS):
        return False
    return "text/html" in request.headers.get("accept", "") or is_fragment(request)


def to_csv(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return a header line with ``names``, and one line per row, in UTF-8."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\r\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(to_jsonable_python(row[name])) for name in names])
    return output.getvalue().encode("utf-8")


def _cell(value: Any) -> Any:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return value
        case str():
            return spreadsheet_safe(value)
        case list() if all(isinstance(member, str) for member in value):
            return spreadsheet_safe(" ".join(value))
    return spreadsheet_safe(json.dumps(value, ensure_ascii=False))


PRIVATE = {"Cache-Control": "no-store", "Vary": "Cookie, Authorization, HX-Request"}

Route = TypeVar("Route", bound=Callable[..., Any])


# ---- routes -------------------------------------------------------------------------


def page(router: APIRouter, path: str) -> Callable[[Route], Route]:
    """Add a page, or a file of one, at ``path``."""
    return lambda route: _add(router, "GET", path, route)


def action(router: APIRouter, path: str) -> Callable[[Route], Route]:
    """Add a route to which a form posts."""
    return lambda route: _add(router, "POST", path, route)


def _add(router: APIRouter, method: str, path: str, route: Route) -> Route:
    router.add_api_route(
        path, route, methods=[method], include_in_schema=False, response_class=Response
    )
    return route


# ---- responses ----------------------------------------------------------------------


def respond(
    request: Request,
    view: object,
    *,
    template: str,
    charts: Mapping[str, str] | None = None,
    fragment: str | None = None,
    status: int = 200,
) -> Response:
    """Return ``view`` as a page.

    The template receives ``view``, and the SVGs of ``charts`` by name. ``fragment`` is the block
    for htmx.
    """
    drawings = {name: Markup(svg) for name, svg in (charts or {}).items()}
    return html(request, template, {"view": view, **drawings}, fragment=fragment, status=status)


def download(
    content: bytes | str | Iterator[bytes], media_type: str, name: str, status: int = 200
) -> Response:
    """Return a file that the browser saves as ``name``, streamed if ``content`` is an iterator."""
    headers = {**PRIVATE, "Content-Disposition": f'attachment; filename="{name}"'}
    if isinstance(content, Iterator):
        return StreamingResponse(content, status, headers, media_type=media_type)
    return Response(content, status, headers, media_type=media_type)


def download_csv(names: Sequence[str], rows: Iterable[Mapping[str, Any]], name: str) -> Response:
    """Return a table as a CSV file that the browser saves as ``name``."""
    return download(to_csv(names, rows), "text/csv; charset=utf-8", name)


def html(
    request: Request,
    template: str,
    values: Mapping[str, Any],
    *,
    fragment: str | None = None,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Render ``template`` as a page, or its block ``fragment`` for htmx."""
    token, new_secret = form_token(request)
    source = environment().get_template(template)
    context = {**_page_context(request), **values, "csrf": lambda: _CSRF_FIELD.format(token)}
    if fragment is not None and is_fragment(request):
        text = "".join(source.blocks[fragment](source.new_context(context)))
    else:
        text = source.render(context)
    content = text.encode("utf-8", "backslashreplace")
    response = Response(content, status, {**PRIVATE, **(headers or {})}, "text/html; charset=utf-8")
    if new_secret is not None and token in text:  # only for a page with a form
        sessions.write_cookie(request, response, sessions.FORM, new_secret)
    return response


def see_other(path: str, **query: str) -> Response:
    """Redirect to ``path`` after a successful form."""
    to = f"{path}?{urlencode(query)}" if query else path
    return Response(status_code=303, headers={"Location": to, "Cache-Control": "no-store"})


def base_url(request: Request) -> str:
    """Return the base URL of this service, for commands on pages."""
    services: Services = request.app.state.services
    return services.public_url or f"{request.url.scheme}://{request.url.netloc}"


def _page_context(request: Request) -> dict[str, Any]:
    """Return the variables that all pages use."""
    caller: Caller | None = getattr(request.state, "caller", None)
    actor: Actor | None = None if caller is None else caller.actor
    return {
        "actor": actor,
        "elsewhere": () if caller is None else caller.elsewhere,
        "may": lambda scope: actor is not None and actor.may(Scope(scope)),
        "opens": lambda path: may_open(actor, path.partition("?")[0]),
        "groups": groups_for(actor, _served_paths(request)),
        "here": request.url.path,
        "query_string": request.url.query,
        "base_url": base_url(request),
        "now": request.app.state.services.clock.now(),
        "signed_in": sessions.read_cookie(request, sessions.SESSION) is not None
        and actor is not None,
        "done": request.query_params.get("done", ""),
    }


_CSRF_FIELD = Markup('<input type="hidden" name="csrf" value="{}">')


def _served_paths(request: Request) -> frozenset[str]:
    """Return the paths of this application, so that only existing pages are linked."""
    paths: frozenset[str] | None = getattr(request.app.state, "paths", None)
    if paths is None:
        paths = request.app.state.paths = frozenset(
            str(route.path) for route in iter_route_contexts(request.app.routes)
        )
    return paths
