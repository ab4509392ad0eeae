"""Deny by default: an application with a route that says nothing about access is none.

Checked when the application is put together and once more when it starts, so that a route
that was added in between does not slip through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from affidavit.service.identity.access import Guard, Open


class UndeclaredAccess(Exception):
    """A route that does not say who may use it; a fault of ours, met at start-up."""


def guard_of(route: Any) -> Guard | Open | None:
    """What ``route`` says about who may use it; None if it says nothing."""
    dependant = getattr(route, "dependant", None)
    found = [] if dependant is None else [dependency.call for dependency in dependant.dependencies]
    guards = [item for item in found if isinstance(item, Guard | Open)]
    # A route that says both would be for everybody by one and not by the other; and what
    # stands before the guard would be done for anybody.
    return guards[0] if len(guards) == 1 and found[0] is guards[0] else None


def guarded_routes(app: FastAPI) -> Iterator[tuple[str, str, Guard | Open]]:
    """Every path and method of ``app`` with its guard; raises ``UndeclaredAccess``."""
    for route in iter_route_contexts(app.routes):
        guard = guard_of(route)
        if guard is None:
            raise UndeclaredAccess(
                f"{route.path} must say first, and once, who may use it, by needs(...) or "
                f"open_to_all(): "
                f"{route.original_route!r}"
            )
        for method in sorted(route.methods or ()):
            yield str(route.path), method, guard


def require_guards(app: FastAPI) -> None:
    """Raise ``UndeclaredAccess`` unless every route of ``app`` says who may use it."""
    for _ in guarded_routes(app):
        pass
