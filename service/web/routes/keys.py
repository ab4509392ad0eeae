"""``/v1/keys``, ``/v1/keysets`` and ``/v1/status``: what verifiers download.

Anybody may read them. Publishing a version of the keyset requires the scope ``admin``.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path
from fastapi.responses import Response

from affidavit.client import PublishedKeyset, ResponseModel
from affidavit.service.certificates.status_list_signing import SignedStatusList
from affidavit.service.core.problems import Problem
from affidavit.service.core.wire_models import Object
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.keys.keyring import SignedKeysetEnvelope
from affidavit.service.web.access import needs, open_to_all
from affidavit.service.web.dependencies import TheServices
from affidavit.service.web.openapi import (
    JSON,
    RECORDED_REQUEST,
    json_body,
    problems,
)
from affidavit.service.web.routing import read_json
from affidavit.trust import read_keyset

router = APIRouter()

Version = Annotated[int, Path(ge=1, le=2**53 - 1, description="A version of the keyset.")]
ENVELOPE = {"description": "The keyset.", "model": SignedKeysetEnvelope}


class Keys(ResponseModel):
    """Public key records: one document, which ``verify --keys`` reads."""

    keys: list[Object]


@router.get(
    "/v1/keys",
    summary="List public keys",
    dependencies=[open_to_all()],
    responses=problems(503),
)
def keys(services: TheServices) -> Keys:
    """Keys that the service signs with, has signed certificates with, or has in its keyset.

    Where a key is both stored and in the directory, the directory's record counts.
    """
    return Keys(keys=services.key_records())


@router.get(
    "/v1/status",
    summary="Get the status list",
    dependencies=[open_to_all()],
    response_class=Response,
    responses={
        200: {"description": "The signed list, valid for an hour.", "model": SignedStatusList},
        **problems(503),
    },
)
def status(services: TheServices) -> Response:
    """The signed list of revoked certificates; ``verify --status`` reads it."""
    services.safety.require()
    document = services.status_lists.at(services.clock.now())
    return Response(document, media_type=JSON, headers={"Cache-Control": "max-age=60"})


@router.get(
    "/v1/keyset",
    summary="Get the newest keyset",
    dependencies=[open_to_all()],
    response_class=Response,
    responses={200: ENVELOPE, **problems(404, 503)},
)
def keyset(services: TheServices) -> Response:
    """Verify it with root keys from another source."""
    return _envelope(services.keysets.newest(), "No keyset has been published yet.")


@router.get(
    "/v1/keysets/{version}",
    summary="Get a version of the keyset",
    dependencies=[open_to_all()],
    response_class=Response,
    responses={200: ENVELOPE, **problems(404, 503)},
)
def keyset_version(services: TheServices, version: Version) -> Response:
    """For verifiers that missed a change of the root keys."""
    return _envelope(services.keysets.find(version), f"Keyset version {version} not found.")


@router.post(
    "/v1/keysets",
    summary="Publish a keyset",
    status_code=201,
    responses={
        201: {"description": "Published."},
        200: {"description": "It is already the newest version.", "model": PublishedKeyset},
        **RECORDED_REQUEST,
        **problems(409),
    },
    openapi_extra=json_body("SignedKeysetEnvelope", "A keyset that enough root keys have signed."),
)
def publish(
    actor: Annotated[Actor, needs(Scope.ADMIN)],
    services: TheServices,
    content: Annotated[bytes, Depends(read_json)],
    response: Response,
) -> PublishedKeyset:
    """Accepted only if it follows the previous version and that version's roots signed it.

    If that version requires several administrators, each of them sends the keyset.
    """
    now = services.clock.now()
    signed, new = services.four_eyes.carry_out(
        "keyset",
        {"keyset": read_keyset(content).digest},
        actor,
        now,
        lambda approve: services.keysets.publish(
            content, actor=actor.name, at=now, approve=approve
        ),
    )
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/keysets/{signed.keyset.version}"
    return PublishedKeyset(version=signed.keyset.version, digest=signed.digest)


def _envelope(document: bytes | None, missing: str) -> Response:
    if document is None:
        raise Problem(404, "not_found", missing)
    return Response(document, media_type=JSON)
