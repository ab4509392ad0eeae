"""``/v1/log``: the newest checkpoint, entries and RFC 9162 proofs; ``/v1/tlog``: C2SP tlog-tiles.

Everybody may read the checkpoint and tiles of hashes, which reveal nothing about the entries,
because their leaves have a salt. Entries name people and data sets, and require the scope
``audit`` unless the operator publishes them (``AFFIDAVIT_LOG_ENTRIES=public``). So do tiles of
hashes, and proofs, of leaves from before there were salts.

Reference: C2SP, tlog-tiles.md.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.concurrency import run_in_threadpool

from affidavit.client import Page, ResponseModel
from affidavit.service.core.wire_models import QueryModel
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.log.reader import tile_entries, tile_hashes
from affidavit.service.web.access import (
    Guard,
    Open,
    Reader,
    needs,
    open_to_all,
)
from affidavit.service.web.dependencies import TheServices, services_of
from affidavit.service.web.openapi import problems
from affidavit.service.web.routing import next_page
from affidavit.trust import encode_base64
from affidavit.trust.log import merkle_tree

TEXT = "text/plain"
PAGE_SIZE = 500
"""Entries in one response."""

router = APIRouter()

Index = Annotated[int, Field(ge=0, le=merkle_tree.MAX_LEAVES)]
Size = Annotated[int, Field(ge=1, le=merkle_tree.MAX_LEAVES)]
Hash = Annotated[str, Field(json_schema_extra={"format": "byte"}, description="32 bytes, base64.")]

_LINES = {"content": {TEXT: {"schema": {"type": "string"}}}}


class InclusionQuery(QueryModel):
    """A leaf by its index or by its hash, and the size of the tree."""

    index: Index | None = None
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    size: Size | None = None


class ConsistencyQuery(QueryModel):
    """The sizes of two trees; the second defaults to the newest."""

    first: Size
    second: Size | None = None


class EntriesQuery(QueryModel):
    """The first and the last leaf, both included."""

    start: Index = 0
    end: Index = merkle_tree.MAX_LEAVES


class _CamelModel(ResponseModel):
    """Base of models whose JSON fields are in camel case, as in the C2SP's documents."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class InclusionProof(_CamelModel):
    """Proof that a leaf is in the tree of ``tree_size`` leaves."""

    leaf_index: Index
    tree_size: Index
    leaf_hash: Hash
    hashes: list[Hash]


class ConsistencyProof(ResponseModel):
    """Proof that the tree of ``second`` leaves extends that of ``first``."""

    first: Index
    second: Index
    hashes: list[Hash]


class LogEntry(_CamelModel):
    """An entry of the log."""

    leaf_index: Index
    leaf_hash: Hash
    content: str = Field(description="Canonical JSON, exactly as hashed.")


@router.get(
    "/v1/log/checkpoint",
    summary="Get the newest checkpoint",
    response_class=Response,
    responses={
        200: {
            "description": "A C2SP checkpoint: origin, size, root hash, time, in a signed note.",
            **_LINES,
        },
        **problems(404),
    },
)
def checkpoint(_: Reader, services: TheServices) -> Response:
    """With its witnesses' cosignatures. Keep a copy elsewhere, to detect a rewritten log."""
    note = services.log.published().note
    return Response(note, headers={"Content-Type": f"{TEXT}; charset=utf-8"})


@router.get(
    "/v1/log/proof/inclusion",
    summary="Get an inclusion proof",
    responses=problems(404),
)
def inclusion(
    actor: Reader, services: TheServices, query: Annotated[InclusionQuery, Query()]
) -> InclusionProof:
    """By ``index`` or leaf ``hash``, hexadecimal; in the newest tree or the one of ``size``."""
    leaf = None if query.hash is None else bytes.fromhex(query.hash)
    proof = services.log.inclusion(
        query.index, leaf, query.size, unsalted=_may_see_unsalted(actor, services)
    )
    return InclusionProof(
        leaf_index=proof.index,
        tree_size=proof.size,
        leaf_hash=encode_base64(proof.leaf_hash),
        hashes=[encode_base64(hash_) for hash_ in proof.hashes],
    )


@router.get(
    "/v1/log/proof/consistency",
    summary="Get a consistency proof",
    responses=problems(404),
)
def consistency(
    actor: Reader, services: TheServices, query: Annotated[ConsistencyQuery, Query()]
) -> ConsistencyProof:
    """Shows that the tree of ``second`` leaves (default: newest) extends that of ``first``."""
    unsalted = _may_see_unsalted(actor, services)
    proof = services.log.consistency(query.first, query.second, unsalted=unsalted)
    return ConsistencyProof.model_validate(proof.as_document())


def _may_see_unsalted(actor: Actor, services: TheServices) -> bool:
    """Return whether ``actor`` may see hashes of leaves that have no salt."""
    return services.public_log_entries or actor.may(Scope.AUDIT)


@router.get(
    "/v1/log/entries",
    summary="List log entries",
)
def entries(
    _: Annotated[Actor, needs(Scope.AUDIT)],
    services: TheServices,
    query: Annotated[EntriesQuery, Query()],
    response: Response,
) -> Page[LogEntry]:
    """From ``start`` to ``end``, at most 500 at a time; ``next`` is the path of the next page."""
    logged = services.log.entries(query.start, min(query.end, query.start + PAGE_SIZE - 1))
    more = len(logged) == PAGE_SIZE and logged[-1].leaf_index < query.end
    start = logged[-1].leaf_index + 1 if more else None
    return Page[LogEntry](
        items=[
            LogEntry(
                leaf_index=entry.leaf_index,
                leaf_hash=encode_base64(entry.leaf_hash),
                content=entry.content,
            )
            for entry in logged
        ],
        next=next_page(response, "/v1/log/entries", query, start=start),
    )


# ---- tiles ---------------------------------------------------------------------------

BINARY = "application/octet-stream"
ANYBODY = Actor("anonymous@public-log", frozenset())

LEVEL = "^[0-6]$"
Number = Annotated[str, Path(max_length=40, description="Like x001/x234/067, or 003.p/17.")]
_TILE = {
    "description": "A tile, which never changes.",
    "content": {BINARY: {"schema": {"type": "string", "format": "binary"}}},
}


@dataclass(frozen=True)
class EntriesGuard(Guard):
    """Admits everybody if log entries are public, and otherwise actors with the scope."""

    async def __call__(self, request: Request) -> Actor:
        """Return the caller; raises as ``Guard`` does."""
        if services_of(request).public_log_entries:
            await Open(limited=True)(request)
            return ANYBODY
        return await super().__call__(request)


@dataclass(frozen=True)
class HashesGuard(Open):
    """Admits everybody to hashes that hide their entries, and to others as ``EntriesGuard``."""

    limited: bool = True

    async def __call__(self, request: Request) -> None:
        """Raise as ``EntriesGuard`` does for a tile of leaves without a salt."""
        await super().__call__(request)
        level, number = (request.path_params[name] for name in ("level", "number"))
        if re.fullmatch(LEVEL, level) is None:
            return  # the route accepts no other spelling, such as 0.0
        with suppress(merkle_tree.BadTile):  # reported by the route
            tile = int(level), merkle_tree.parse_tile_number(number)[0]
            if await run_in_threadpool(services_of(request).log.has_unsalted, *tile):
                await ENTRIES_GUARD(request)


ENTRIES_GUARD = EntriesGuard((Scope.AUDIT,))


@router.get(
    "/v1/tlog/checkpoint",
    summary="Get the checkpoint, without a token",
    dependencies=[open_to_all()],
    response_class=Response,
    responses={
        200: {"description": "A C2SP checkpoint with its cosignatures.", **_LINES},
        **problems(404),
    },
)
def tlog_checkpoint(services: TheServices) -> Response:
    """C2SP tlog-tiles: the prefix of the log is ``/v1/tlog``."""
    note = services.log.published().note
    return Response(
        note, headers={"Content-Type": f"{TEXT}; charset=utf-8", "Cache-Control": "no-cache"}
    )


@router.get(
    "/v1/tlog/tile/entries/{number:path}",
    summary="Get a tile of entries",
    operation_id="entries",
    response_class=Response,
    responses={200: _TILE, **problems(404)},
)
def entry_tile(
    _: Annotated[Actor, Depends(ENTRIES_GUARD)],
    request: Request,
    services: TheServices,
    number: Number,
) -> Response:
    """Up to 256 entries, each after its length in two bytes."""
    return _file(request, tile_entries(services.engine, *merkle_tree.parse_tile_number(number)))


@router.get(
    "/v1/tlog/tile/{level}/{number:path}",
    summary="Get a tile of hashes",
    dependencies=[Depends(HashesGuard())],
    response_class=Response,
    responses={200: _TILE, **problems(404)},
)
def tile(
    request: Request,
    services: TheServices,
    level: Annotated[str, Path(pattern=LEVEL, description="From 0 to 6.")],
    number: Number,
) -> Response:
    """Up to 256 hashes of one level of the tree; of leaves without a salt, for scope ``audit``."""
    return _file(
        request, tile_hashes(services.engine, int(level), *merkle_tree.parse_tile_number(number))
    )


def _file(request: Request, content: bytes) -> Response:
    # What a guard authorized somebody for is not for caches that others share.
    shared = "private" if hasattr(request.state, "actor") else "public"
    headers = {"Content-Type": BINARY, "Cache-Control": f"{shared}, max-age=31536000, immutable"}
    return Response(content, headers=headers)
