"""Where one can go from any page, and who is shown the way."""

from __future__ import annotations

from dataclasses import dataclass

from affidavit.service.identity.actor import Actor, Scope

SEES = frozenset({Scope.SUBMIT, Scope.APPROVE, Scope.AUDIT})
EVERYBODY = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Place:
    """A page of the navigation, for actors with one of ``scopes``."""

    path: str
    label: str
    scopes: frozenset[Scope] = EVERYBODY


@dataclass(frozen=True, slots=True)
class Group:
    """Places that belong together."""

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
        "Record",
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
    found = (Group(group.label, tuple(_open(group.places, scopes, served))) for group in GROUPS)
    return tuple(group for group in found if group.places)


def _open(
    places: tuple[Place, ...], scopes: frozenset[Scope], served: frozenset[str]
) -> list[Place]:
    return [place for place in places if place.path in served and place.scopes & scopes]


def may_open(actor: Actor | None, path: str) -> bool:
    """Whether ``actor`` may see the page at ``path``, by the place that it belongs to."""
    scopes = frozenset() if actor is None else actor.scopes
    places = [place for group in GROUPS for place in group.places if is_current(place, path)]
    return all(place.scopes & scopes for place in places)


def is_current(place: Place, path: str) -> bool:
    """Whether the page at ``path`` belongs to ``place``."""
    return path == place.path or (place.path != "/" and path.startswith(f"{place.path}/"))
