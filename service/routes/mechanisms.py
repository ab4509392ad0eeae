"""``GET /v1/mechanisms``: what each optimiser releases, and what it obliges the trainer to."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse

from affidavit.mechanisms import all_mechanisms
from affidavit.service.identity.access import open_to_all
from affidavit.service.openapi import answers, problems
from affidavit.service.problems import Problem

router = APIRouter()

MechanismName = Annotated[
    str, Path(pattern=r"^[a-z0-9_]{1,64}$", description="An optimiser's name, or ``denoise``.")
]


@router.get(
    "/v1/mechanisms",
    dependencies=[open_to_all()],
    summary="All mechanisms",
    response_class=JSONResponse,
    responses={200: answers("Every optimiser, and what wraps any.", "Mechanisms"), **problems()},
)
def mechanisms() -> JSONResponse:
    """In the order of the registry."""
    return JSONResponse({"mechanisms": [item.as_dict() for item in all_mechanisms().values()]})


@router.get(
    "/v1/mechanisms/{name}",
    dependencies=[open_to_all()],
    summary="A mechanism by its name",
    response_class=JSONResponse,
    responses={200: answers("Its description.", "Mechanism"), **problems(404, 422)},
)
def mechanism(name: MechanismName) -> JSONResponse:
    """One description, with the document of a smallest plan."""
    found = all_mechanisms().get(name)
    if found is None:
        raise Problem(
            404, "not_found", f"there is no mechanism {name}; GET /v1/mechanisms lists them."
        )
    return JSONResponse(found.as_dict())
