"""``GET /v1/status``: the signed list of certificates that no longer count."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Response

from affidavit.service.identity.access import open_to_all
from affidavit.service.openapi import JSON, answers, problems
from affidavit.service.services import TheServices

router = APIRouter()


@router.get(
    "/v1/status",
    summary="The status list",
    dependencies=[open_to_all()],
    response_class=Response,
    responses={
        200: answers("The list, signed and good for an hour.", "StatusList"),
        **problems(503),
    },
)
def status(services: TheServices) -> Response:
    """What ``affidavit verify --status`` reads. Whoever relies on a certificate may ask."""
    found = services.status_lists.at(datetime.now(UTC))
    return Response(found, media_type=JSON, headers={"Cache-Control": "max-age=60"})
