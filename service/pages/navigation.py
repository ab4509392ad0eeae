"""The navigation, and who may see which part of it."""

from __future__ import annotations

from dataclasses import dataclass

from affidavit.service.identity.actor import Actor, Scope

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
