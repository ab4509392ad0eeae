"""What routes of changes do with a request: its idempotency key, its body, its refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from affidavit.plan import StrictModel
from affidavit.service.errors import AccountingUnavailable, DomainError
from affidavit.service.openapi import JSON
from affidavit.service.problems import Problem, not_well_formed, problem_of, unavailable
from affidavit.service.routing import read_body
from affidavit.service.wanted import MalformedRequest

T = TypeVar("T")
Wanted = TypeVar("Wanted", bound=StrictModel)


def json_body(http: Request, content: Annotated[bytes, Depends(read_body)]) -> bytes:
    """The body, which is JSON by its content type unless it is empty. Raises ``Problem``."""
    media = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content and media != JSON:
        raise Problem(
            415,
            "unsupported_media_type",
            f"this takes {JSON}; set Content-Type accordingly.",
            headers={"Accept": JSON},
        )
    return content


JsonBody = Annotated[bytes, Depends(json_body)]


def read(kind: Callable[[bytes], Wanted], content: bytes) -> Wanted:
    """What a body asks for; raises the problem of its not being that."""
    try:
        return kind(content)
    except MalformedRequest as error:
        raise not_well_formed("malformed_request", error) from None


async def answered(work: Awaitable[T]) -> T:
    """What ``work`` returns, its refusals as problems. Raises ``Problem``."""
    try:
        return await work
    except DomainError as refusal:
        raise problem_of(refusal) from None
    except AccountingUnavailable as error:
        raise unavailable(error) from error


async def in_thread(work: Callable[[], T]) -> T:
    """What ``work``, which blocks on the database, returns."""
    return await answered(run_in_threadpool(work))
