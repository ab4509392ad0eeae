"""``GET /metrics``: the counts, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Scope
from affidavit.service.openapi import problems
from affidavit.service.services import TheServices

TEXT = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter()


@router.get(
    "/metrics",
    summary="Metrics",
    dependencies=[needs(Scope.AUDIT, Scope.ADMIN)],
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **problems(401, 403, 503),
    },
)
def metrics(services: TheServices) -> Response:
    """For a scraper with a token of scope audit."""
    return Response(services.meters.exposition(), headers={"Content-Type": TEXT})
