"""``/keys``: the keys that verify certificates, and how to download them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from affidavit.service.web.dependencies import Services, TheServices
from affidavit.service.web.pages.access import Anyone
from affidavit.service.web.pages.response import (
    page,
    respond,
)
from affidavit.trust import PublicKey, read_keyset

router = APIRouter()


@page(router, "/keys")
def keys(request: Request, _: Anyone, services: TheServices) -> Response:
    """List all keys of the service, newest first."""
    view = keys_view(services, services.clock.now())
    return respond(request, view, template="keys.html")


def keys_view(services: Services, now: datetime) -> dict[str, Any]:
    """Return the keys, newest first, and the newest keyset or None.

    Each key comes with its state at ``now`` (signing, valid, expired, revoked, not_yet_valid), its
    revocation or None, and its public key as text.
    """
    public_keys = map(PublicKey.from_record, services.key_records())
    raw = services.keysets.newest()
    signed = None if raw is None else read_keyset(raw)
    revocations = {} if signed is None else {key.key_id: key for key in signed.keyset.revoked}
    signing = {key.key_id for key in services.keyring.all_current()}
    keys = []
    for public in sorted(public_keys, key=lambda key: (key.not_before, key.key_id), reverse=True):
        revocation = revocations.get(public.key_id)
        since = None if revocation is None else revocation.since
        text = public.as_record()["public_key"]
        keys.append((public, _state(public, signing, since, now), revocation, text))
    keyset = None
    if signed is not None:
        roots = signed.keyset.roots
        keyset = {
            "version": signed.keyset.version,
            "digest": signed.digest,
            "threshold": roots.threshold,
            "roots": [{"key_id": root.key_id, "label": root.label} for root in roots.keys],
        }
    return {"keys": keys, "keyset": keyset}


def _state(public: PublicKey, signing: set[str], since: str | None, now: datetime) -> str:
    if since is not None:
        return "revoked"
    if now > public.not_after:
        return "expired"
    if now < public.not_before:
        return "not_yet_valid"
    return "signing" if public.key_id in signing else "valid"
