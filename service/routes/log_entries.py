"""``GET /v1/log/entries``: what was logged, byte for byte as it was hashed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from affidavit.certificate.log import MOST_LEAVES, written
from affidavit.service.identity.access import needs
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.openapi import answers, problems
from affidavit.service.services import TheServices

PAGE = 500
"""Entries an answer has at most."""

router = APIRouter()

Index = Annotated[int, Field(ge=0, le=MOST_LEAVES)]


class Wanted(BaseModel):
    """The first and the last leaf, both included."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: Index = 0
    end: Index = MOST_LEAVES


@router.get(
    "/v1/log/entries",
    summary="The log's entries",
    response_class=JSONResponse,
    responses={200: answers("Entries, in order.", "LogEntries"), **problems(401, 403, 422, 503)},
)
def entries(
    _: Annotated[Actor, needs(Scope.AUDIT)],
    services: TheServices,
    wanted: Annotated[Wanted, Query()],
) -> JSONResponse:
    """From ``start`` to ``end``, at most 500 at a time; ``next`` is the path of those after."""
    found = services.log.entries(wanted.start, min(wanted.end, wanted.start + PAGE - 1))
    following = None
    if len(found) == PAGE and found[-1].index < wanted.end:
        tail = "" if wanted.end == MOST_LEAVES else f"&end={wanted.end}"
        following = f"/v1/log/entries?start={found[-1].index + 1}{tail}"
    items = [
        {
            "leafIndex": item.index,
            "leafHash": written(item.leaf_hash),
            "content": item.content,
        }
        for item in found
    ]
    return JSONResponse({"entries": items, "next": following})
