"""``GET /livez``: the process answers."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from affidavit.service.identity.access import open_to_all
from affidavit.service.openapi import answers, problems

router = APIRouter()


@router.get(
    "/livez",
    dependencies=[open_to_all(limited=False)],
    summary="Is the process alive",
    response_class=JSONResponse,
    responses={200: answers("It is.", "Alive"), **problems()},
)
async def livez() -> JSONResponse:
    """On the event loop itself, so that it answers when every thread is busy."""
    return JSONResponse({"status": "alive"})
