"""``GET /v1/log/proof/inclusion`` and ``/consistency``: RFC 9162 proofs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from affidavit.certificate.log import MOST_LEAVES, written
from affidavit.service.identity.access import Reader
from affidavit.service.log.reader import NotLogged
from affidavit.service.openapi import answers, problems
from affidavit.service.routes.log_checkpoint import not_logged
from affidavit.service.services import TheServices

router = APIRouter()

Index = Annotated[int, Field(ge=0, le=MOST_LEAVES)]
Size = Annotated[int, Field(ge=1, le=MOST_LEAVES)]
HASH_PATTERN = r"^[0-9a-f]{64}$"


class WantedInclusion(BaseModel):
    """A leaf by its index or by its hash, and in which tree."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: Index | None = None
    hash: Annotated[str, Field(pattern=HASH_PATTERN)] | None = None
    size: Size | None = None


class WantedConsistency(BaseModel):
    """The sizes of two trees; the newest for the second where it is left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first: Size
    second: Size | None = None


@router.get(
    "/v1/log/proof/inclusion",
    summary="Proof that an entry is in the log",
    response_class=JSONResponse,
    responses={200: answers("The proof.", "InclusionProof"), **problems(401, 403, 404, 422, 503)},
)
def inclusion(
    _: Reader, services: TheServices, wanted: Annotated[WantedInclusion, Query()]
) -> JSONResponse:
    """By ``index`` or, in hexadecimal, by leaf ``hash``; for the newest tree or one of ``size``."""
    leaf = None if wanted.hash is None else bytes.fromhex(wanted.hash)
    try:
        found = services.log.inclusion(wanted.index, leaf, wanted.size)
    except NotLogged as error:
        raise not_logged(error) from None
    return JSONResponse(
        {
            "leafIndex": found.index,
            "treeSize": found.size,
            "leafHash": written(found.leaf_hash),
            "hashes": [written(hash_) for hash_ in found.hashes],
        }
    )


@router.get(
    "/v1/log/proof/consistency",
    summary="Proof that the log only grew",
    response_class=JSONResponse,
    responses={200: answers("The proof.", "ConsistencyProof"), **problems(401, 403, 404, 422, 503)},
)
def consistency(
    _: Reader, services: TheServices, wanted: Annotated[WantedConsistency, Query()]
) -> JSONResponse:
    """That the tree of ``second`` leaves, else the newest, begins with that of ``first``."""
    try:
        found = services.log.consistency(wanted.first, wanted.second)
    except NotLogged as error:
        raise not_logged(error) from None
    return JSONResponse(found.as_document())
