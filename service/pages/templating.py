"""Templates, static files, and the navigation of every page.

Templates escape everything and refuse undefined names. Whatever they put out passes
``visible`` first, so that no user text can reorder or hide the text around it.

The name of a static file carries the first 16 hexadecimal digits of its SHA-256, so that a
browser may cache it permanently and still gets the new one after an upgrade.

The navigation shows what an actor may open.
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

from affidavit.service.identity.access import open_to_all
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.pages import text
from affidavit.service.pages.text import TONES
from affidavit.service.problems import Problem

# ---- navigation ----------------------------------------------------------------------

SEES = frozenset({Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT})
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
            Place("/certificates", "Certificates", SEES),
            Place("/compare", "Compare", SEES),
            Place("/datasets", "Data sets"),
            Place("/runs", "Runs"),
        ),
    ),
    Group(
        "Decisions",
        (
            Place("/approvals", "Approvals", SEES),
            Place("/policies", "Policies", SEES | {Scope.ADMIN}),
            Place("/waivers", "Waivers", SEES | {Scope.ADMIN}),
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
    """The groups with those of their places that are ``served`` and that ``actor`` may see."""
    scopes = frozenset() if actor is None else actor.scopes
    groups = []
    for group in GROUPS:
        open_places = [p for p in group.places if p.path in served and p.scopes & scopes]
        if open_places:
            groups.append(Group(group.label, tuple(open_places)))
    return tuple(groups)


def may_open(actor: Actor | None, path: str) -> bool:
    """Whether ``actor`` may see the page at ``path``, by the place that it belongs to."""
    scopes = frozenset() if actor is None else actor.scopes
    places = [place for group in GROUPS for place in group.places if is_current(place, path)]
    return all(place.scopes & scopes for place in places)


def is_current(place: Place, path: str) -> bool:
    """Whether the page at ``path`` belongs to ``place``."""
    return path == place.path or (place.path != "/" and path.startswith(f"{place.path}/"))


# ---- templates and static files ------------------------------------------------------

PREFIX = "/static/"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILTERS = (
    *(text.short, text.day, text.moment, text.second),
    *(text.whole, text.plain, text.words, text.capitalized, text.readable, text.unbroken),
)

router = APIRouter()


@cache
def environment() -> Environment:
    """The one environment of this process."""
    env = Environment(
        loader=PackageLoader("affidavit.service.pages", "templates"),
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
    # Markup is a str whose text was made here and escaped already.
    return text.visible(value) if type(value) is str else value


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as it is served."""

    name: str
    content: bytes
    media_type: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Every static file, by its name in the folder."""
    served = {}
    for resource in files("affidavit.service.pages").joinpath("static").iterdir():
        path = PurePath(resource.name)
        if path.suffix in TYPES:
            content = resource.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
            name = f"{path.stem}.{digest}{path.suffix}"
            served[resource.name] = StaticFile(name, content, TYPES[path.suffix])
    return served


def static(name: str) -> str:
    """The path of a static file; raises ``KeyError`` for an unknown one."""
    return PREFIX + static_files()[name].name


@cache
def _by_served_name() -> dict[str, StaticFile]:
    return {file.name: file for file in static_files().values()}


@router.get(
    f"{PREFIX}{{name}}",
    dependencies=[open_to_all(limited=False)],
    include_in_schema=False,
    response_class=Response,
)
async def static_file(name: str) -> Response:
    """One static file, to be cached for a year."""
    file = _by_served_name().get(name)
    if file is None:
        raise Problem(404, "not_found", "this file does not exist; reload the page.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(file.content, media_type=file.media_type, headers=headers)
