"""``/livez``, ``/readyz`` and ``/metrics``: for probes and for Prometheus."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import Field

from affidavit.client import ResponseModel
from affidavit.service.dependencies import TheServices
from affidavit.service.identity.access import needs, open_to_all
from affidavit.service.identity.actor import Scope
from affidavit.service.models import ProblemReason
from affidavit.service.openapi import problems
from affidavit.service.problems import Problem

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter()


class Alive(ResponseModel):
    """The process is alive."""

    status: Literal["alive"] = "alive"


class Signer(ResponseModel):
    """The signing key; ``development`` is true for a development key."""

    key_id: str
    development: bool


class Ready(ResponseModel):
    """The service is ready; ``warnings`` list what the operator should fix."""

    status: Literal["ready"] = "ready"
    revision: str | None = Field(
        serialization_alias="schema", description="The database's schema revision."
    )
    signer: Signer
    warnings: list[ProblemReason]


@router.get(
    "/livez",
    dependencies=[open_to_all(limited=False)],
    summary="Liveness probe",
)
async def livez() -> Alive:
    """Runs on the event loop, so it answers even when every thread is busy."""
    return Alive()


@router.get(
    "/readyz",
    dependencies=[open_to_all()],
    summary="Readiness probe",
    responses=problems(503),
)
def readyz(services: TheServices) -> Ready:
    """Checks the database, the schema, the signing key and the audit log."""
    readiness = services.readiness()
    if readiness.reasons or readiness.key is None:
        raise Problem(503, "not_ready", str(readiness.reasons[0]), *readiness.reasons)
    return Ready(
        revision=readiness.revision,
        signer=Signer.model_validate(readiness.key),
        warnings=[ProblemReason.model_validate(item) for item in services.authenticator.warnings()],
    )


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    dependencies=[needs(Scope.AUDIT, Scope.ADMIN)],
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
    },
)
def metrics(services: TheServices) -> Response:
    """For a scraper with a token of scope audit."""
    return Response(services.metrics.exposition(), headers={"Content-Type": PROMETHEUS})
