"""Templates, static files and navigation.

Templates escape all output and refuse undefined names. Output passes ``escape_invisible`` first, so
that no user text can reorder or hide the text around it.

URLs of static files contain the first 16 hexadecimal digits of their SHA-256, so that browsers can
cache them permanently and still load new versions.

The navigation shows the pages that an actor may open.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Response
from jinja2 import Environment, PackageLoader, StrictUndefined

from affidavit.service.core.problems import Problem
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.web.access import open_to_all
from affidavit.service.web.pages import text
from affidavit.service.web.pages.text import TONES

# ---- navigation ----------------------------------------------------------------------

READERS = frozenset({Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT})
EVERYBODY = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Place:
    """A page in the navigation, for actors with one of ``scopes``."""

    path: str
    label: str
    scopes: frozenset[Scope] = EVERYBODY


@dataclass(frozen=True, slots=True)
class Group:
    """Pages under one label."""

    label: str
    places: tuple[Place, ...]


GROUPS = (
    Group("", (Place("/", "Overview"), Place("/plans/new", "New plan", frozenset({Scope.SUBMIT})))),
    Group(
        "Evidence",
        (
            Place("/certificates", "Certificates", READERS),
            Place("/compare", "Compare", READERS),
            Place("/datasets", "Data sets"),
            Place("/runs", "Runs"),
        ),
    ),
    Group(
        "Decisions",
        (
            Place("/approvals", "Approvals", READERS),
            Place("/policies", "Policies", READERS | {Scope.ADMIN}),
            Place("/waivers", "Waivers", READERS | {Scope.ADMIN}),
        ),
    ),
    Group(
        "Administration",
        (
            Place("/audit", "Audit log", frozenset({Scope.AUDIT})),
            Place("/tokens", "Tokens", frozenset({Scope.ADMIN})),
            Place("/keys", "Keys"),
        ),
    ),
)


def groups_for(actor: Actor | None, served: frozenset[str]) -> tuple[Group, ...]:
    """Return the groups with the ``served`` pages that ``actor`` may open."""
    scopes = frozenset() if actor is None else actor.scopes
    groups = []
    for group in GROUPS:
        open_places = [p for p in group.places if p.path in served and p.scopes & scopes]
        if open_places:
            groups.append(Group(group.label, tuple(open_places)))
    return tuple(groups)


def may_open(actor: Actor | None, path: str) -> bool:
    """Return whether ``actor`` may open the page at ``path``."""
    scopes = frozenset() if actor is None else actor.scopes
    places = [place for group in GROUPS for place in group.places if is_current(place, path)]
    return all(place.scopes & scopes for place in places)


def is_current(place: Place, path: str) -> bool:
    """Return whether the page at ``path`` belongs to ``place``."""
    return path == place.path or (place.path != "/" and path.startswith(f"{place.path}/"))


# ---- templates and static files ------------------------------------------------------

PREFIX = "/static/"
STATIC = files("affidavit.service.web.pages") / "static"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILTERS = (
    *(text.short_id, text.date, text.date_time, text.iso_time),
    *(text.group_digits, text.decimal, text.words, text.capitalized, text.humanize, text.nowrap),
    *(text.round_up, text.round_down, text.release_name),
)

router = APIRouter()


@cache
def environment() -> Environment:
    """Return the Jinja environment."""
    env = Environment(
        loader=PackageLoader("affidavit.service.web.pages", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    env.globals.update(static=static, is_current=is_current, query=text.query, tones=TONES)
    env.filters.update({function.__name__: function for function in FILTERS})
    return env


def _finalize(value: Any) -> Any:
    # Markup is a subclass of str whose text is escaped already.
    return text.escape_invisible(value) if type(value) is str else value


@cache
def static(name: str) -> str:
    """Return the path of a static file, which contains its digest."""
    path = PurePath(name)
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:16]
    return f"{PREFIX}{path.stem}.{digest}{path.suffix}"


@cache
def _static_files() -> dict[str, bytes]:
    """Return the contents of all static files by path."""
    return {
        static(file.name): file.read_bytes()
        for file in STATIC.iterdir()
        if PurePath(file.name).suffix in MEDIA_TYPES
    }


@router.get(
    f"{PREFIX}{{name}}",
    dependencies=[open_to_all(limited=False)],
    include_in_schema=False,
    response_class=Response,
)
async def static_file(name: str) -> Response:
    """Return a static file, which browsers may cache for a year."""
    content = _static_files().get(PREFIX + name)
    if content is None:
        raise Problem(404, "not_found", "this file does not exist; reload the page.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(content, media_type=MEDIA_TYPES[PurePath(name).suffix], headers=headers)
