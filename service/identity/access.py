"""Access control: every route declares its access, by ``needs`` or by ``open_to_all``.

::

    @router.post("/v1/certificates")
    async def submit(actor: Annotated[Actor, needs(Scope.SUBMIT)], ...): ...

    @router.get("/v1/keys", dependencies=[open_to_all()])
    def keys(...): ...

``needs`` with several scopes takes an actor who has any one of them. It stands first among
a route's parameters, so that nothing of a request is read for somebody who may not send
it. An application with a route that says neither does not start (``require_guards``); that is
checked when it is put together and once more when it starts, so that a route that was added in
between does not slip through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.routing import iter_route_contexts
from starlette.concurrency import run_in_threadpool

from affidavit.service.dependencies import Services, services_of
from affidavit.service.fair_queue import CALLER, TURN, Turn, leave_turn
from affidavit.service.identity.actor import Actor, AuthenticationError, Scope
from affidavit.service.identity.authentication import Caller, address_of, bearer
from affidavit.service.identity.openid import ProviderUnavailable
from affidavit.service.identity.rate_limiter import counted, retry_after
from affidavit.service.middleware import RATE_LIMIT_HEADERS, add_after_response
from affidavit.service.problems import Problem
from affidavit.service.teams import TEAM

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_AUTHORIZED = "authorized"
_CONVERTER = re.compile(r":\w+(?=})")
REALM = 'Bearer realm="affidavit"'


@dataclass(frozen=True)
class Guard:
    """The dependency behind ``needs``: the actor, if they have one of ``scopes``.

    ``always`` lets a change through while the service suspends writes (``operation.readiness``).
    """

    scopes: tuple[Scope, ...]
    always: bool = False

    async def __call__(self, request: Request) -> Actor:
        """The caller, counted while the request is answered; raises like ``authenticated``."""
        authorized: Actor | None = _authorized_before(self, request)
        return authorized or await self.authenticated(request)

    async def authenticated(self, request: Request) -> Actor:
        """The caller, counted while the request is answered.

        Raises the problem of not knowing them (401), of their scopes (403) or of their
        asking too much (429), or of a service that must not write (503).
        """
        services = services_of(request)
        TEAM.set(None)  # not that of the request before on the same connection
        caller = await self.identify(services, request)
        request.state.actor = caller.actor.name
        _take(services, request, caller.counted_as)
        if not any(caller.actor.may(scope) for scope in self.scopes):
            raise missing_scope(caller.actor, *self.scopes)
        await self.admitted(request)
        if not services.rate_limiter.begin(caller.counted_as):
            raise Problem(
                429,
                "too_many_at_once",
                f"You already have {services.rate_limiter.at_once} requests in progress. Wait for "
                "one to finish, or ask the operator to raise AFFIDAVIT_CONCURRENCY.",
                headers={"Retry-After": "1"},
            )
        CALLER.set(caller.actor.name)  # with each token of theirs it is one share of the work
        TEAM.set(caller.actor.sees)
        add_after_response(request, partial(_ended, services, caller))
        turn = Turn(services.turns)
        TURN.set(turn)
        await turn.take()
        if not (self.always or request.method in SAFE):
            await run_in_threadpool(services.safety.require)
        return caller.actor

    async def identify(self, services: Services, request: Request) -> Caller:
        """The caller, by a program's credentials; requests without an identity are counted.

        Raises ``Problem``.
        """
        try:
            return await _caller(services, request)
        except ProviderUnavailable:
            raise Problem(
                503,
                "identity_provider_unavailable",
                "the OpenID provider's keys cannot be read, so its tokens cannot be verified; "
                "nothing was done. Try again later.",
                headers={"Retry-After": "5"},
            ) from None
        except AuthenticationError as unknown:
            raise not_known(services, request, unknown) from None

    async def admitted(self, request: Request) -> None:
        """What else must hold of the request of somebody who may make it: nothing."""


@dataclass(frozen=True)
class Open:
    """The mark of a route that anybody may use; ``limited`` counts them by address."""

    limited: bool

    async def __call__(self, request: Request) -> None:
        """Let everybody in who does not ask too often."""
        TEAM.set(None)
        if self.limited and _authorized_before(self, request) is None:
            _take(services_of(request), request, counted(address_of(request)))


async def authorize(access: Guard | Open, request: Request) -> None:
    """Call ``access`` before FastAPI does; as a dependency it then gives the same actor.

    Raises what ``access`` raises.
    """
    actor = await access(request)
    request.scope["state"][_AUTHORIZED] = (access, actor or True)


def _authorized_before(access: Guard | Open, request: Request) -> Any:
    """What ``authorize`` found out by such an ``access``; None where it was not called."""
    before, actor = request.scope["state"].get(_AUTHORIZED, (None, None))
    return actor if before == access else None


def needs(*scopes: Scope, always: bool = False) -> Any:
    """The dependency of a route for actors with one of ``scopes``; its value is the ``Actor``.

    ``always`` is for what neither spends nor signs: it goes on while writes are suspended.

    Raises ``ValueError`` without a scope.
    """
    if not scopes:
        raise ValueError("a route for actors without any scope is open_to_all")
    return Depends(Guard(scopes, always))


def open_to_all(*, limited: bool = True) -> Any:
    """The dependency that marks a route as one for everybody."""
    return Depends(Open(limited=limited))


Reader = Annotated[Actor, needs(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT)]
"""An actor who may see certificates; nobody should approve what they cannot see."""


def missing_scope(actor: Actor, *scopes: Scope) -> Problem:
    """The problem of an actor who is known and has none of ``scopes``."""
    required = " or ".join(scopes)
    scopes_of_actor = ", ".join(sorted(actor.scopes)) or "none"
    remedy = "ask for a token that has it"
    if actor.anonymous:
        remedy = f"run: affidavit tokens new --name NAME --scope {scopes[0]}"
    return Problem(
        403,
        "missing_scope",
        f"You don't have permission to do this: it needs the scope {required}, and {actor.name} "
        f"has {scopes_of_actor}; {remedy}.",
        headers={
            "WWW-Authenticate": f'{REALM}, error="insufficient_scope", scope="{" ".join(scopes)}"'
        },
    )


def require_serves(actor: Actor, *, queue: str | None = None, dataset: str | None = None) -> None:
    """Raise the problem of a worker whose token does not name that queue or data set."""
    if queue is not None and queue not in actor.serves.queues:
        what, option = f"work for the queue {queue}", f"--queue {queue}"
    elif dataset is not None and dataset not in actor.serves.datasets:
        what, option = f"use reservations of {dataset} by hand", f"--dataset {dataset}"
    else:
        return
    raise Problem(
        403,
        "not_permitted",
        f"You don't have permission to {what}. Ask an administrator for a token that names it: "
        f"affidavit tokens new --scope work {option}",
    )


async def _ended(services: Services, caller: Caller) -> None:
    leave_turn()
    services.rate_limiter.end(caller.counted_as)
    if caller.token_id is not None and services.tokens.use_is_due(caller.token_id):
        await run_in_threadpool(services.tokens.write_use, caller.token_id, services.clock.now())


async def _caller(services: Services, request: Request) -> Caller:
    identities = services.authenticator
    token = bearer(
        request.headers.getlist("authorization"),
        request.scope["query_string"].decode("latin-1"),
    )
    if token is not None:
        return await identities.by_token(token)
    return await run_in_threadpool(identities.without_token, request)


def not_known(services: Services, request: Request, unknown: AuthenticationError) -> Problem:
    """The problem of somebody who is not known, counted by their address."""
    _take(services, request, counted(address_of(request)))
    error = {"unauthenticated": "", "malformed_credentials": ', error="invalid_request"'}.get(
        unknown.code, ', error="invalid_token"'
    )
    return Problem(401, unknown.code, unknown.detail, headers={"WWW-Authenticate": REALM + error})


def _take(services: Services, request: Request, caller: str) -> None:
    seconds = services.rate_limiter.take(caller)
    request.scope["state"][RATE_LIMIT_HEADERS] = services.rate_limiter.fields(caller)
    if seconds:
        raise Problem(
            429,
            "rate_limited",
            f"You sent more than {services.rate_limiter.per_minute} requests in a minute. Wait, "
            "or ask the operator to raise AFFIDAVIT_RATE_LIMIT.",
            headers={"Retry-After": retry_after(seconds)},
        )


# ---- deny by default ------------------------------------------------------------------


class UndeclaredAccess(Exception):
    """A route that does not say who may use it; a fault of ours, met at start-up."""


def guard_of(route: Any) -> Guard | Open | None:
    """What ``route`` says about who may use it; None if it says nothing."""
    dependant = getattr(route, "dependant", None)
    calls = [] if dependant is None else [dependency.call for dependency in dependant.dependencies]
    guards = [call for call in calls if isinstance(call, Guard | Open)]
    # A route that says both would be for everybody by one and not by the other; and what
    # stands before the guard would be done for anybody.
    return guards[0] if len(guards) == 1 and calls[0] is guards[0] else None


def guarded_routes(app: FastAPI) -> Iterator[tuple[str, str, Guard | Open]]:
    """Every path, as OpenAPI writes it, and method of ``app`` with its guard.

    Raises ``UndeclaredAccess``.
    """
    for route in iter_route_contexts(app.routes):
        guard = guard_of(route)
        if guard is None:
            raise UndeclaredAccess(
                f"{route.path} must say first, and once, who may use it, by needs(...) or "
                f"open_to_all(): "
                f"{route.original_route!r}"
            )
        for method in sorted(route.methods or ()):
            yield _CONVERTER.sub("", str(route.path)), method, guard


def require_guards(app: FastAPI) -> None:
    """Raise ``UndeclaredAccess`` unless every route of ``app`` says who may use it."""
    for _ in guarded_routes(app):
        pass
