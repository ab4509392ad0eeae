"""One view, three forms: a page for people, JSON for programs, CSV for spreadsheets.

``page`` puts a route at its path and, for the same view, at ``.json`` and ``.csv``, ``data``
at those alone; ``answer`` gives the form that was asked for. A page that only one person may
see is kept by no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from fastapi.routing import iter_route_contexts
from markupsafe import Markup

from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.identity.authentication import Caller
from affidavit.service.pages import cookies
from affidavit.service.pages.csrf import FormToken
from affidavit.service.pages.forms_of_a_view import Rows, csv_of, json_of
from affidavit.service.pages.navigation import groups_for, may_open
from affidavit.service.pages.templating import environment
from affidavit.service.pages.wishes import is_fragment
from affidavit.service.services import Services

OVERVIEW = "/overview"
"""What the data of ``/`` are called, which has no name to add ``.json`` to."""
PRIVATE = {"Cache-Control": "no-store", "Vary": "Cookie, Authorization, HX-Request"}

Route = TypeVar("Route", bound=Callable[..., Any])


def page(router: APIRouter, path: str, *, csv: bool = True) -> Callable[[Route], Route]:
    """Put a route at ``path``, and for its data at ``path.json`` and ``path.csv``."""

    def put(route: Route) -> Route:
        # Before the page itself, whose last parameter would take the ending for its own.
        data(router, OVERVIEW if path == "/" else path, csv=csv)(route)
        _get(router, path, route)
        return route

    return put


def data(router: APIRouter, path: str, *, csv: bool = True) -> Callable[[Route], Route]:
    """Put a page's route at ``path.json`` and ``path.csv``, for its data alone."""

    def put(route: Route) -> Route:
        for ending in (".json", ".csv") if csv else (".json",):
            _get(router, f"{path}{ending}", route)
        return route

    return put


def action(router: APIRouter, path: str) -> Callable[[Route], Route]:
    """Put a route where a form is sent to."""

    def put(route: Route) -> Route:
        router.add_api_route(
            path, route, methods=["POST"], include_in_schema=False, response_class=Response
        )
        return route

    return put


def answer(
    request: Request,
    view: object,
    *,
    template: str,
    rows: Rows | None = None,
    drawn: Mapping[str, str] | None = None,
    fragment: str | None = None,
    status: int = 200,
    title: str | None = None,
    as_page: bool = False,
) -> Response:
    """``view`` in the form that the path asks for, or ``as_page`` whatever it ends in.

    A template sees ``view``, and SVG of ``drawn`` by its names. ``fragment`` is the block
    of it that htmx gets. ``rows`` is the main table, for CSV; ``title`` the name it is
    saved under, if not that of the page. Raises ``TypeError`` for CSV without ``rows``.
    """
    # Not what was asked but what was routed: a name may itself end in ".json".
    path = "" if as_page else getattr(request.scope.get("route"), "path", "")
    if path.endswith(".json"):
        return Response(json_of(view), status, PRIVATE, media_type="application/json")
    if path.endswith(".csv"):
        if rows is None:
            raise TypeError(f"{path} has no table; say csv=False")
        name = title or path.removesuffix(".csv").strip("/").split("/")[0]
        headers = {**PRIVATE, "Content-Disposition": f'attachment; filename="{name}.csv"'}
        return Response(csv_of(rows), status, headers, media_type="text/csv; charset=utf-8")
    drawings = {name: Markup(svg) for name, svg in (drawn or {}).items()}
    return html(request, template, {"view": view, **drawings}, fragment=fragment, status=status)


def html(
    request: Request,
    template: str,
    values: Mapping[str, Any],
    *,
    fragment: str | None = None,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A page of ``template``, with what every page has around it."""
    token = FormToken(request)
    found = environment().get_template(template)
    known = {**_around(request), **values, "csrf": lambda: _field(token)}
    if fragment is not None and is_fragment(request):
        text = "".join(found.blocks[fragment](found.new_context(known)))
    else:
        text = found.render(known)
    content = text.encode("utf-8", "backslashreplace")
    made = Response(content, status, {**PRIVATE, **(headers or {})}, "text/html; charset=utf-8")
    token.bind(made)
    return made


def see_other(path: str, **query: str) -> Response:
    """Go to ``path`` and read; what a form is answered with when it was done."""
    to = f"{path}?{urlencode(query)}" if query else path
    return Response(status_code=303, headers={"Location": to, "Cache-Control": "no-store"})


def _get(router: APIRouter, path: str, route: Callable[..., Any]) -> None:
    router.add_api_route(
        path, route, methods=["GET"], include_in_schema=False, response_class=Response
    )


def _around(request: Request) -> dict[str, Any]:
    """What the template of every page uses."""
    caller: Caller | None = getattr(request.state, "caller", None)
    actor: Actor | None = None if caller is None else caller.actor
    path = request.url.path
    return {
        "actor": actor,
        "may": lambda scope: actor is not None and actor.may(Scope(scope)),
        "opens": lambda path: may_open(actor, path.partition("?")[0]),
        "groups": groups_for(actor, _served(request)),
        "here": path,
        "asked": request.url.query,
        "base_url": _base_url(request),
        "signed_in": cookies.read(request, cookies.SESSION) is not None and actor is not None,
        "done": request.query_params.get("done", ""),
    }


def _field(token: FormToken) -> Markup:
    return Markup('<input type="hidden" name="csrf" value="{}">').format(str(token))


def _base_url(request: Request) -> str:
    """Where programs reach this service, for the commands that a page shows."""
    services: Services = request.app.state.services
    return services.public_url or f"{request.url.scheme}://{request.url.netloc}"


def _served(request: Request) -> frozenset[str]:
    """The paths that this application has; a page that is not built yet is not shown."""
    found: frozenset[str] | None = getattr(request.app.state, "paths", None)
    if found is None:
        found = request.app.state.paths = frozenset(
            str(route.path) for route in iter_route_contexts(request.app.routes)
        )
    return found
