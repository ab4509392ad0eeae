"""``GET /openapi.json``: what this service takes and answers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from affidavit.service.identity.access import open_to_all

router = APIRouter()


@router.get("/openapi.json", dependencies=[open_to_all()], include_in_schema=False)
async def document(request: Request) -> JSONResponse:
    """FastAPI's own route for it would be the only one that says nothing about access."""
    return JSONResponse(request.app.openapi())
