"""Who may ask: every route says so, by ``needs`` or by ``open_to_all``.

::

    @router.post("/v1/certificates")
    def submit(actor: Annotated[Actor, needs(Scope.SUBMIT)], ...): ...

    @router.get("/v1/keys", dependencies=[open_to_all()])
    def keys(...): ...

``needs`` with several scopes takes an actor who has any one of them. It stands first among
a route's parameters, so that nothing of a request is read for somebody who may not send
it. An application with a route that says neither does not start (``require_guards``).
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.routing import iter_route_contexts

from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.identity.anonymous import ANONYMOUS, came_directly
from affidavit.service.problems import Problem
from affidavit.service.services import Services


class UnguardedRoute(Exception):
    """A route that does not say who may use it; a fault of ours, met at start-up."""


class Guard:
    """The dependency behind ``needs``: the actor, if they have one of ``scopes``."""

    def __init__(self, *scopes: Scope) -> None:
        self.scopes = scopes

    def __call__(self, request: Request) -> Actor:
        """Who asks; raises the problem of not knowing them (401) or of their scopes (403)."""
        services: Services = request.app.state.services
        address = request.client.host if request.client is not None else None
        if not (services.loopback and came_directly(address, request.headers)):
            raise Problem(
                401,
                "unauthenticated",
                "this needs a token; send Authorization: Bearer TOKEN.",
                headers={"WWW-Authenticate": 'Bearer realm="affidavit"'},
            )
        if not any(ANONYMOUS.may(scope) for scope in self.scopes):
            wanted = " or ".join(self.scopes)
            raise Problem(403, "missing_scope", f"this needs a token with the scope {wanted}.")
        return ANONYMOUS


class Open:
    """The mark of a route that anybody may use."""

    def __call__(self) -> None:
        """Let everybody in."""


def needs(*scopes: Scope) -> Any:
    """The dependency of a route for actors with one of ``scopes``; its value is the ``Actor``."""
    if not scopes:
        raise ValueError("a route for actors without any scope is open_to_all")
    return Depends(Guard(*scopes))


def open_to_all() -> Any:
    """The dependency that marks a route as one for everybody."""
    return Depends(Open())


Reader = Annotated[Actor, needs(Scope.SUBMIT, Scope.AUDIT)]
"""An actor who may see certificates."""


def guard_of(route: Any) -> Guard | Open | None:
    """What ``route`` says about who may use it; None if it says nothing."""
    dependant = getattr(route, "dependant", None)
    found = [] if dependant is None else [each.call for each in dependant.dependencies]
    return next((each for each in found if isinstance(each, Guard | Open)), None)


def require_guards(app: FastAPI) -> None:
    """Raise ``UnguardedRoute`` unless every route of ``app`` says who may use it."""
    for route in iter_route_contexts(app.routes):
        if guard_of(route) is None and route.path != app.openapi_url:
            raise UnguardedRoute(
                f"{route.path} says neither needs(...) nor open_to_all(): {route.original_route!r}"
            )
