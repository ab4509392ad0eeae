"""Access control: every route declares its access, by ``needs`` or by ``open_to_all``.

::

    @router.post("/v1/certificates")
    async def submit(actor: Annotated[Actor, needs(Scope.SUBMIT)], ...): ...

    @router.get("/v1/keys", dependencies=[open_to_all()])
    def keys(...): ...

``needs`` with several scopes accepts an actor with any of them. It is the first parameter of a
route, so that nothing of a request is read before it is authorized. An application with a route
that declares neither does not start (``require_guards``); this is checked when the application is
built and again when it starts.
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

from affidavit.service.core.fair_queue import (
    CALLER,
    TURN,
    Turn,
    leave_turn,
)
from affidavit.service.core.problems import Problem
from affidavit.service.core.teams import TEAM
from affidavit.service.identity.actor import Actor, AuthenticationError
from affidavit.service.identity.authentication import Caller, address_of, parse_bearer
from affidavit.service.identity.openid import ProviderUnavailable
from affidavit.service.identity.rate_limiter import key_of_address, retry_after
from affidavit.service.identity.scopes import Scope
from affidavit.service.web.dependencies import Services, services_of
from affidavit.service.web.middleware import RATE_LIMIT_HEADERS, add_after_response

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_AUTHORIZATION_KEY = "authorized"
_PATH_CONVERTER = re.compile(r":\w+(?=})")
REALM = 'Bearer realm="affidavit"'


@dataclass(frozen=True)
class Guard:
    """The dependency of ``needs``: the actor, if they have one of ``scopes``.

    ``always`` allows changes while the service suspends writes (``operation.readiness``).
    """

    scopes: tuple[Scope, ...]
    always: bool = False

    async def __call__(self, request: Request) -> Actor:
        """Return the caller, counted until the response; raises like ``authenticated``."""
        authorized: Actor | None = _earlier_authorization(self, request)
        return authorized or await self.authenticated(request)

    async def authenticated(self, request: Request) -> Actor:
        """Return the caller, counted until the response.

        Raises ``Problem``: 401 without authentication, 403 without the scope, 429 above a limit,
        and 503 while writes are suspended.
        """
        services = services_of(request)
        TEAM.set(None)  # not the team of the previous request on the connection
        caller = await self.identify(services, request)
        request.state.actor = caller.actor.name
        _require_rate(services, request, caller.counted_as)
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
        CALLER.set(caller.actor.name)  # all tokens of a person have one share of the work
        TEAM.set(caller.actor.visible_team)
        add_after_response(request, partial(_after_response, services, caller))
        turn = Turn(services.turns)
        TURN.set(turn)
        await turn.take()
        if not (self.always or request.method in SAFE_METHODS):
            await run_in_threadpool(services.safety.require)
        return caller.actor

    async def identify(self, services: Services, request: Request) -> Caller:
        """Authenticate a program; raises ``Problem``, and counts failed requests."""
        try:
            return await _authenticate(services, request)
        except ProviderUnavailable:
            raise Problem(
                503,
                "identity_provider_unavailable",
                "the OpenID provider's keys cannot be read, so its tokens cannot be verified; "
                "nothing was done. Try again later.",
                headers={"Retry-After": "5"},
            ) from None
        except AuthenticationError as unknown:
            raise authentication_problem(services, request, unknown) from None

    async def admitted(self, request: Request) -> None:
        """Check further conditions of an authorized request; there are none for programs."""


@dataclass(frozen=True)
class Open:
    """The dependency of ``open_to_all``; ``limited`` counts callers by address."""

    limited: bool

    async def __call__(self, request: Request) -> None:
        """Accept every caller within the rate limit."""
        TEAM.set(None)
        if self.limited and _earlier_authorization(self, request) is None:
            _require_rate(services_of(request), request, key_of_address(address_of(request)))


async def authorize(access: Guard | Open, request: Request) -> None:
    """Call ``access`` before FastAPI does, so that the dependency then returns the same actor.

    Raises what ``access`` raises.
    """
    actor = await access(request)
    request.scope["state"][_AUTHORIZATION_KEY] = (access, actor or True)


def _earlier_authorization(access: Guard | Open, request: Request) -> Any:
    """Return the result of ``authorize`` for an equal ``access``, if it was called."""
    before, actor = request.scope["state"].get(_AUTHORIZATION_KEY, (None, None))
    return actor if before == access else None


def needs(*scopes: Scope, always: bool = False) -> Any:
    """Build the dependency of a route for actors with one of ``scopes``; its value is the actor.

    ``always`` is for changes that neither spend nor sign, which continue while writes are
    suspended.

    Raises ``ValueError`` without a scope.
    """
    if not scopes:
        raise ValueError("a route for actors without any scope is open_to_all")
    return Depends(Guard(scopes, always))


def open_to_all(*, limited: bool = True) -> Any:
    """Build the dependency of a route for everybody."""
    return Depends(Open(limited=limited))


Reader = Annotated[Actor, needs(Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT)]
"""An actor who may read certificates, approvers included."""


def missing_scope(actor: Actor, *scopes: Scope) -> Problem:
    """Build the problem of an actor who has none of ``scopes``."""
    required = " or ".join(scopes)
    scopes_of_actor = ", ".join(sorted(actor.scopes)) or "none"
    remedy = "ask for a token that has it"
    if actor.is_anonymous:
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
    """Raise ``Problem`` unless the worker's token names that queue or data set."""
    if queue is not None and queue not in actor.serves.queues:
        action, option = f"work for the queue {queue}", f"--queue {queue}"
    elif dataset is not None and dataset not in actor.serves.datasets:
        action, option = f"use reservations of {dataset} by hand", f"--dataset {dataset}"
    else:
        return
    raise Problem(
        403,
        "not_permitted",
        f"You don't have permission to {action}. Ask an administrator for a token that names it: "
        f"affidavit tokens new --scope work {option}",
    )


async def _after_response(services: Services, caller: Caller) -> None:
    leave_turn()
    services.rate_limiter.end(caller.counted_as)
    if caller.token_id is not None and services.tokens.use_is_due(caller.token_id):
        await run_in_threadpool(services.tokens.write_use, caller.token_id, services.clock.now())


async def _authenticate(services: Services, request: Request) -> Caller:
    identities = services.authenticator
    token = parse_bearer(
        request.headers.getlist("authorization"),
        request.scope["query_string"].decode("latin-1"),
    )
    if token is not None:
        return await identities.by_token(token)
    return await run_in_threadpool(identities.without_token, request)


def authentication_problem(
    services: Services, request: Request, unknown: AuthenticationError
) -> Problem:
    """Build the problem of a failed authentication, counted by address."""
    _require_rate(services, request, key_of_address(address_of(request)))
    error = {"unauthenticated": "", "malformed_credentials": ', error="invalid_request"'}.get(
        unknown.code, ', error="invalid_token"'
    )
    return Problem(401, unknown.code, unknown.detail, headers={"WWW-Authenticate": REALM + error})


def _require_rate(services: Services, request: Request, caller: str) -> None:
    seconds = services.rate_limiter.take(caller)
    request.scope["state"][RATE_LIMIT_HEADERS] = services.rate_limiter.headers(caller)
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
    """A route does not declare its access: a programming error, found at start-up."""


def guard_of(route: Any) -> Guard | Open | None:
    """Return the declared access of ``route``, if any."""
    dependant = getattr(route, "dependant", None)
    calls = [] if dependant is None else [dependency.call for dependency in dependant.dependencies]
    guards = [call for call in calls if isinstance(call, Guard | Open)]
    # Two declarations would contradict each other, and dependencies before the guard would run for
    # everybody.
    return guards[0] if len(guards) == 1 and calls[0] is guards[0] else None


def guarded_routes(app: FastAPI) -> Iterator[tuple[str, str, Guard | Open]]:
    """Yield every path, in OpenAPI's form, and method of ``app`` with its guard.

    Raises ``UndeclaredAccess``.
    """
    for route in iter_route_contexts(app.routes):
        guard = guard_of(route)
        if guard is None:
            raise UndeclaredAccess(
                f"{route.path} must declare its access first and once, by needs(...) or "
                f"open_to_all(): {route.original_route!r}"
            )
        for method in sorted(route.methods or ()):
            yield _PATH_CONVERTER.sub("", str(route.path)), method, guard


def require_guards(app: FastAPI) -> None:
    """Raise ``UndeclaredAccess`` unless every route of ``app`` declares its access."""
    for _ in guarded_routes(app):
        pass
