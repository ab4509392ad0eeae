"""``GET /v1/log/checkpoint``: what the log is now, signed."""

from __future__ import annotations

from fastapi import APIRouter, Response

from affidavit.service.identity.access import Reader
from affidavit.service.log.reader import NotLogged
from affidavit.service.openapi import problems
from affidavit.service.problems import Problem
from affidavit.service.services import TheServices

TEXT = "text/plain"

router = APIRouter()


@router.get(
    "/v1/log/checkpoint",
    summary="The log's newest checkpoint",
    response_class=Response,
    responses={
        200: {
            "description": "A C2SP checkpoint: origin, size, root hash, time, in a signed note.",
            "content": {TEXT: {"schema": {"type": "string"}}},
        },
        **problems(401, 403, 404, 503),
    },
)
def checkpoint(_: Reader, services: TheServices) -> Response:
    """Keep it somewhere else: it is what a log that was rewritten is found out by."""
    try:
        note = services.log.latest().note
    except NotLogged as error:
        raise not_logged(error) from None
    return Response(note, headers={"Content-Type": f"{TEXT}; charset=utf-8"})


def not_logged(error: NotLogged) -> Problem:
    """The problem of what the log does not have."""
    return Problem(404, "not_logged", f"{error}; GET /v1/log/checkpoint says how far it is.")
