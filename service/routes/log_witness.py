"""``POST /v1/log/witness``: another log's checkpoint in, this service's cosignature out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from starlette.concurrency import run_in_threadpool

from affidavit.certificate.log import BadNote, ProofError, read_addition
from affidavit.service.identity.access import open_to_all
from affidavit.service.log.checkpoint_publisher import SIZE_TYPE
from affidavit.service.log.witness import NotSigned, SizeConflict, UnknownLog
from affidavit.service.openapi import problems
from affidavit.service.problems import Problem
from affidavit.service.routes.log_checkpoint import TEXT
from affidavit.service.routing import read_body
from affidavit.service.services import TheServices

router = APIRouter()

_LINES = {"content": {TEXT: {"schema": {"type": "string"}}}}
_SIZE = {
    "description": "The witness has another checkpoint, of this size.",
    "content": {SIZE_TYPE: {"schema": {"type": "string", "pattern": r"^[0-9]+\n$"}}},
}


@router.post(
    "/v1/log/witness",
    summary="Have a checkpoint of another log witnessed",
    # What lets somebody in is the signature of a log that the operator chose to keep.
    dependencies=[open_to_all()],
    response_class=Response,
    responses={
        200: {"description": "Signature lines of the witness.", **_LINES},
        **problems(400, 403, 404, 408, 422, 503),
        409: _SIZE,
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "C2SP add-checkpoint: old size, consistency proof, checkpoint.",
            **_LINES,
        }
    },
)
async def witness(services: TheServices, content: Annotated[bytes, Depends(read_body)]) -> Response:
    """Only what continues the checkpoint that is kept here is cosigned."""
    try:
        wanted = read_addition(content)
    except BadNote as error:
        raise Problem(400, "malformed_checkpoint", f"{error}.") from None
    try:
        lines = await run_in_threadpool(services.witness.add, wanted)
    except UnknownLog:
        raise Problem(404, "unknown_log", "this service does not witness that log.") from None
    except (NotSigned, BadNote):
        raise Problem(
            403, "not_signed", "no key that is known of that log signed the checkpoint."
        ) from None
    except ProofError as error:
        raise Problem(422, "not_consistent", f"the proof does not hold: {error}.") from None
    except SizeConflict as other:
        return Response(f"{other.size}\n", 409, media_type=SIZE_TYPE)
    return Response(lines, headers={"Content-Type": f"{TEXT}; charset=utf-8"})
