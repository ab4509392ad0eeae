"""``/v1/tlog``: the log as C2SP tlog-tiles, for monitors that are nobody's clients.

The checkpoint and the tiles of hashes are for everybody, and say nothing of what was logged.
Entries name people and data sets: they need the scope ``audit``, unless the operator makes them
public (``AFFIDAVIT_LOG_ENTRIES=public``).

Reference: C2SP, tlog-tiles.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from affidavit.certificate.log import parse_tile_number
from affidavit.service.identity.access import Guard, Open, open_to_all
from affidavit.service.identity.actor import Actor, Scope
from affidavit.service.log.tiles import tile_entries, tile_hashes
from affidavit.service.openapi import problems
from affidavit.service.services import TheServices, services_of

TEXT = "text/plain; charset=utf-8"
BINARY = "application/octet-stream"
ANYBODY = Actor("anonymous@public-log", frozenset())

router = APIRouter()

Number = Annotated[str, Path(max_length=40, description="Like x001/x234/067, or 003.p/17.")]
_TILE = {
    "description": "A tile, which never changes.",
    "content": {BINARY: {"schema": {"type": "string", "format": "binary"}}},
}


@dataclass(frozen=True)
class EntriesGuard(Guard):
    """Everybody where the operator made entries public, else those with the scope."""

    async def __call__(self, request: Request) -> Actor:
        """The caller; raises as ``Guard`` does."""
        if services_of(request).public_log_entries:
            await Open(limited=True)(request)
            return ANYBODY
        return await super().__call__(request)


@router.get(
    "/v1/tlog/checkpoint",
    summary="The log's checkpoint, without a token",
    dependencies=[open_to_all()],
    response_class=Response,
    responses={
        200: {
            "description": "A C2SP checkpoint with its cosignatures.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **problems(404),
    },
)
def checkpoint(services: TheServices) -> Response:
    """C2SP tlog-tiles: the prefix of the log is ``/v1/tlog``."""
    note = services.log.published().note
    return Response(note, headers={"Content-Type": TEXT, "Cache-Control": "no-cache"})


@router.get(
    "/v1/tlog/tile/entries/{number:path}",
    summary="Entries of the log",
    response_class=Response,
    responses={200: _TILE, **problems(404)},
)
def entries(
    _: Annotated[Actor, Depends(EntriesGuard((Scope.AUDIT,)))],
    services: TheServices,
    number: Number,
) -> Response:
    """Up to 256 entries, each after its length in two bytes."""
    return _file(tile_entries(services.engine, *parse_tile_number(number)))


@router.get(
    "/v1/tlog/tile/{level}/{number:path}",
    summary="Hashes of the log",
    dependencies=[open_to_all()],
    response_class=Response,
    responses={200: _TILE, **problems(404)},
)
def tile(
    services: TheServices, level: Annotated[int, Path(ge=0, le=6)], number: Number
) -> Response:
    """Up to 256 hashes of one level of the tree."""
    return _file(tile_hashes(services.engine, level, *parse_tile_number(number)))


def _file(content: bytes) -> Response:
    headers = {"Content-Type": BINARY, "Cache-Control": "public, max-age=31536000, immutable"}
    return Response(content, headers=headers)
