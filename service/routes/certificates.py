"""``GET /v1/certificates``: the current issues, newest first, filtered and in pages."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from affidavit.plan import Name, Reason
from affidavit.service.identity.access import Reader
from affidavit.service.lifecycle.standing import Status
from affidavit.service.openapi import ID_PATTERN, answers, problems
from affidavit.service.problems import Problem
from affidavit.service.routes.parameters import Instant
from affidavit.service.services import TheServices
from affidavit.service.store import Filters, Summary
from affidavit.service.use_cases.list_certificates import InvalidCursor, list_certificates

router = APIRouter()


class Wanted(BaseModel):
    """The parameters; an unknown one is refused, for a misspelt filter would show all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verdict: Literal["certified", "under_noised", "refused", "undecided"] | None = None
    status: Status | None = None
    plan_digest: Annotated[str, Field(pattern=ID_PATTERN)] | None = None
    name: Name | None = None
    created_after: Instant | None = None
    created_before: Instant | None = None
    cursor: Annotated[str, Field(max_length=512)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50


@router.get(
    "/v1/certificates",
    summary="List certificates",
    response_class=JSONResponse,
    responses={200: answers("A page.", "Page"), **problems(401, 403, 422, 503)},
)
def certificates(
    _: Reader, services: TheServices, wanted: Annotated[Wanted, Query()]
) -> JSONResponse:
    """Newest first; ``next`` is the path of the following page, or null."""
    filters = Filters(**wanted.model_dump(exclude={"cursor", "limit"}))
    try:
        page = list_certificates(services.store, filters, wanted.cursor, wanted.limit)
    except InvalidCursor as error:
        raise invalid_cursor(error) from None
    following = None if page.next is None else _path_of(wanted, page.next)
    headers = {} if following is None else {"Link": f'<{following}>; rel="next"'}
    items = [_item(row) for row in page.items]
    return JSONResponse({"items": items, "next": following}, headers=headers)


def _path_of(wanted: Wanted, cursor: str) -> str:
    given = wanted.model_dump(mode="json", exclude_none=True) | {"cursor": cursor}
    return f"/v1/certificates?{urlencode(given)}"


def _item(row: Summary) -> dict[str, Any]:
    times = {"created_at": row.created_at, "not_after": row.not_after}
    written = {name: at.isoformat().replace("+00:00", "Z") for name, at in times.items()}
    return asdict(row) | written


def invalid_cursor(error: InvalidCursor) -> Problem:
    """The problem of a cursor that is not one of ours."""
    reason = Reason(
        code="invalid_cursor",
        pointer="/query/cursor",
        message=f"cursor: {error}.",
        remedy="Follow the next link of a page, or leave cursor out to start anew.",
    )
    return Problem(422, "invalid_parameter", str(reason), reason)
