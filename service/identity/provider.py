"""The configuration of an OpenID provider, by the settings in docs/how-to/tokens.md.

>>> settings = {
...     "AFFIDAVIT_OIDC_ISSUER": "https://id.example.org",
...     "AFFIDAVIT_OIDC_AUDIENCE": "affidavit",
...     "AFFIDAVIT_OIDC_JWKS_URL": "https://id.example.org/jwks",
...     "AFFIDAVIT_OIDC_SCOPES": '{"ml": ["submit"], "privacy": ["approve", "audit"]}',
... }
>>> sorted(read_provider(settings).scopes["privacy"])
[<Scope.APPROVE: 'approve'>, <Scope.AUDIT: 'audit'>]
>>> read_provider({}) is None
True
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from affidavit.service.core.errors import SettingsError
from affidavit.service.core.teams import NAME as TEAM_NAME
from affidavit.service.identity.actor import is_loopback
from affidavit.service.identity.scopes import ORGANISATION_ONLY_SCOPES, Scope

PREFIX = "AFFIDAVIT_OIDC_"
REQUIRED_SETTINGS = ("ISSUER", "AUDIENCE", "SCOPES")
CLIENT_SETTINGS = ("CLIENT_ID", "AUTHORIZATION_URL", "TOKEN_URL")
ALL_SETTINGS = (
    *REQUIRED_SETTINGS,
    "JWKS_URL",
    "JWKS_FILE",
    "CLAIM",
    *CLIENT_SETTINGS,
    "CLIENT_SECRET",
    "CLIENT_SCOPE",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignInClient:
    """The service as the provider's client, for sign-in with a browser."""

    client_id: str
    client_secret: str = field(repr=False)
    authorization_url: str
    token_url: str
    scope: str = "openid"


@dataclass(frozen=True, kw_only=True, slots=True)
class Provider:
    """An OpenID provider whose tokens are accepted, with either ``jwks_url`` or ``jwks_file``.

    ``scopes`` maps groups to their scopes, ``teams`` maps groups to their team, if any.
    """

    issuer: str
    audience: str
    jwks_url: str | None
    jwks_file: Path | None
    claim: tuple[str, ...]
    scopes: Mapping[str, frozenset[Scope]]
    teams: Mapping[str, str] = field(default_factory=dict)
    client: SignInClient | None = None


def read_provider(environment: Mapping[str, str]) -> Provider | None:
    """Read the provider of ``environment``, if configured; raises ``SettingsError``."""
    variables = {name: environment.get(PREFIX + name, "").strip() for name in ALL_SETTINGS}
    unknown = [
        name
        for name in environment
        if name.startswith(PREFIX) and name[len(PREFIX) :] not in ALL_SETTINGS
    ]
    if unknown:
        raise SettingsError(
            f"unknown setting {unknown[0]}; use {PREFIX}{f', {PREFIX}'.join(ALL_SETTINGS)}."
        )
    if not any(variables.values()):
        return None
    for name in REQUIRED_SETTINGS:
        if not variables[name]:
            raise SettingsError(f"{PREFIX}{name} is not set; an OpenID provider requires it.")
    if bool(variables["JWKS_URL"]) == bool(variables["JWKS_FILE"]):
        raise SettingsError(f"set either {PREFIX}JWKS_URL or {PREFIX}JWKS_FILE, not both.")
    for name in ("JWKS_URL", "AUTHORIZATION_URL", "TOKEN_URL"):
        if variables[name]:
            _require_https(name, variables[name])
    roles = _read_roles(variables["SCOPES"])
    return Provider(
        issuer=variables["ISSUER"],
        audience=variables["AUDIENCE"],
        jwks_url=variables["JWKS_URL"] or None,
        jwks_file=Path(variables["JWKS_FILE"]) if variables["JWKS_FILE"] else None,
        claim=_split_claim(variables["CLAIM"] or "groups"),
        scopes={group: scopes for group, (scopes, _) in roles.items()},
        teams={group: team for group, (_, team) in roles.items() if team is not None},
        client=_read_client(variables),
    )


def _read_client(variables: Mapping[str, str]) -> SignInClient | None:
    """Read the client for sign-in, if configured."""
    if not any(variables[name] for name in (*CLIENT_SETTINGS, "CLIENT_SECRET", "CLIENT_SCOPE")):
        return None
    for name in CLIENT_SETTINGS:
        if not variables[name]:
            raise SettingsError(
                f"{PREFIX}{name} is not set; signing in to the pages requires it. The provider's "
                "/.well-known/openid-configuration has the URLs."
            )
    scope = variables["CLIENT_SCOPE"] or "openid"
    if "openid" not in scope.split():
        raise SettingsError(f"{PREFIX}CLIENT_SCOPE must include openid.")
    return SignInClient(
        client_id=variables["CLIENT_ID"],
        client_secret=variables["CLIENT_SECRET"],
        authorization_url=variables["AUTHORIZATION_URL"],
        token_url=variables["TOKEN_URL"],
        scope=scope,
    )


def _require_https(name: str, url: str) -> None:
    """Require HTTPS, except for a loopback address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        raise SettingsError(f"{PREFIX}{name} is not a URL.") from None
    local = host == "localhost" or is_loopback(host)
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and local)):
        raise SettingsError(
            f"{PREFIX}{name} must begin with https://; http:// is for a loopback address only."
        )


def _split_claim(text: str) -> tuple[str, ...]:
    """Split a claim's path at dots, unless it is a name like ``https://example.org/groups``."""
    return (text,) if "/" in text or ":" in text else tuple(text.split("."))


Role = tuple[frozenset[Scope], str | None]
"""The scopes of a group, and its team."""


def _read_roles(text: str) -> Mapping[str, Role]:
    name = f"{PREFIX}SCOPES"
    remedy = (
        """give a JSON object like {"privacy": ["approve", "audit"], """
        """"vision-group": {"team": "vision", "scopes": ["submit"]}}"""
    )
    try:
        groups = json.loads(text, object_pairs_hook=_unique_groups)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{name} cannot be read ({error}); {remedy}.") from None
    if not isinstance(groups, dict) or not groups:
        raise SettingsError(f"{name} must be an object with at least one group; {remedy}.")
    return {group: _read_role(group, role, f"; {remedy}.") for group, role in groups.items()}


def _read_role(group: str, role: Any, remedy: str) -> Role:
    subject = f"{PREFIX}SCOPES: {group[:80]!r}"
    team = None
    if isinstance(role, dict):
        if set(role) != {"team", "scopes"} or not _is_team_name(role["team"]):
            raise SettingsError(
                f"{subject} must have a team of letters a to z, digits and -, and scopes{remedy}"
            )
        team, role = role["team"], role["scopes"]
    known = [
        scope.value for scope in Scope if team is None or scope not in ORGANISATION_ONLY_SCOPES
    ]
    for scope in (role if isinstance(role, list) else [None]) or [None]:
        if scope not in known:
            raise SettingsError(f"{subject} must have a list of {', '.join(known)}{remedy}")
    return frozenset(Scope(scope) for scope in role), team


def _is_team_name(name: object) -> bool:
    return isinstance(name, str) and TEAM_NAME.fullmatch(name) is not None


def _unique_groups(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a group appears twice")
    return dict(pairs)
