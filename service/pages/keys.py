"""``/keys``: what certificates are verified by, and how to get it without trusting this page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Request, Response

from affidavit.certificate import Keyset, PublicKey, read_keyset
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.pages.access import page_actor
from affidavit.service.pages.answer import answer, page
from affidavit.service.pages.forms_of_a_view import Rows
from affidavit.service.services import Services, TheServices

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key that signs certificates; ``state`` is one of signs, valid, over, revoked, later."""

    key_id: str
    label: str
    algorithm: str
    not_before: datetime
    not_after: datetime
    state: str
    revoked_since: str | None
    reason: str
    development: bool
    public_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A key that signs keysets and nothing else."""

    key_id: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysetShown:
    """The newest keyset."""

    version: int
    digest: str
    threshold: int
    roots: tuple[Root, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What the page shows; ``keyset`` is None where none was published."""

    keys: tuple[Key, ...]
    keyset: KeysetShown | None


def keys_view(services: Services, now: datetime) -> Keys:
    """Every key that signs or signed here, newest window first."""
    kept = [*services.store.keys(), *services.keyring.public_records()]
    records = {record["key_id"]: record for record in kept}
    raw = services.keysets.newest()
    signed = None if raw is None else read_keyset(raw)
    revoked = {} if signed is None else {item.key_id: item for item in signed.keyset.revoked}
    signing = services.keyring.current().key_id
    keys = [
        _key(
            PublicKey.from_record(record),
            signing=signing,
            since=None if (found := revoked.get(key_id)) is None else found.since,
            reason="" if found is None else found.reason,
            now=now,
        )
        for key_id, record in records.items()
    ]
    return Keys(
        keys=tuple(sorted(keys, key=lambda key: (key.not_before, key.key_id), reverse=True)),
        keyset=None if signed is None else _keyset(signed.keyset, signed.digest),
    )


@page(router, "/keys")
def keys(
    request: Request, _: Annotated[Actor, page_actor(*Scope)], services: TheServices
) -> Response:
    """The keys, to whoever is known."""
    view = keys_view(services, datetime.now(UTC))
    return answer(request, view, template="keys.html", rows=Rows(Key, view.keys))


def _key(public: PublicKey, *, signing: str, since: str | None, reason: str, now: datetime) -> Key:
    return Key(
        key_id=public.key_id,
        label=public.label,
        algorithm="ed25519",
        not_before=public.not_before,
        not_after=public.not_after,
        state=_state(public, signing, since, now),
        revoked_since=since,
        reason=reason,
        development=public.development,
        public_key=public.as_record()["public_key"],
    )


def _state(public: PublicKey, signing: str, since: str | None, now: datetime) -> str:
    if since is not None:
        return "revoked"
    if now > public.not_after:
        return "over"
    if now < public.not_before:
        return "later"
    return "signs" if public.key_id == signing else "valid"


def _keyset(keyset: Keyset, digest: str) -> KeysetShown:
    roots = keyset.roots
    return KeysetShown(
        version=keyset.version,
        digest=digest,
        threshold=roots.threshold,
        roots=tuple(Root(key_id=key.key_id, label=key.label) for key in roots.keys),
    )
