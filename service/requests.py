"""What routes of changes do with a request: its idempotency key, its body, its refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, TypeVar

from fastapi import Depends, Header, Request
from starlette.concurrency import run_in_threadpool

from affidavit.plan import Reason, StrictModel, digest_of
from affidavit.service.bodies import read_body
from affidavit.service.calls import Call
from affidavit.service.identity.actor import Actor
from affidavit.service.openapi import JSON
from affidavit.service.pool import AccountingFailed, AccountingTimeout
from affidavit.service.problems import Problem, not_well_formed
from affidavit.service.refusals import Refusal
from affidavit.service.routes.submit import not_now
from affidavit.service.use_cases.submit_plan import TooBusy
from affidavit.service.wanted import MalformedRequest

T = TypeVar("T")
Wanted = TypeVar("Wanted", bound=StrictModel)

IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=r"^[!-~]{1,255}$",
        description="A repetition with the same key is answered with what the first one did.",
    ),
]


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


def call_of(actor: Actor, http: Request, key: str | None, wanted: StrictModel) -> Call:
    """Who asks, when, and what for, in the form in which a repetition is known."""
    asked = {"method": http.method, "path": http.url.path, "body": wanted.model_dump(mode="json")}
    return Call(
        actor=actor.name,
        at=datetime.now(UTC),
        idempotency_key=key,
        request_digest=digest_of(asked),
    )


def problem_of(refusal: Refusal) -> Problem:
    """A refusal as the problem that is answered."""
    reason = Reason(code=refusal.code, pointer="", message=refusal.message, remedy=refusal.remedy)
    return Problem(refusal.status, refusal.code, str(refusal), reason)


async def answered(work: Awaitable[T]) -> T:
    """What ``work`` returns, its refusals as problems. Raises ``Problem``."""
    try:
        return await work
    except Refusal as refusal:
        raise problem_of(refusal) from None
    except (AccountingTimeout, AccountingFailed, TooBusy) as error:
        raise not_now(error) from error


async def in_thread(work: Callable[[], T]) -> T:
    """What ``work``, which blocks on the database, returns."""
    return await answered(run_in_threadpool(work))
