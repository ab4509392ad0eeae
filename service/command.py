"""The context of a change: the caller, the time, and the idempotency key."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Self

from fastapi import Header, Request

from affidavit.plan import StrictModel, digest_of
from affidavit.service.identity.actor import Actor

IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=r"^[!-~]{1,255}$",
        description="A repetition with the same key gets the first response again.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandContext:
    """The caller of a change, the time, and how a repeated request is recognised."""

    actor: str
    at: datetime
    idempotency_key: str | None = None
    request_digest: str | None = None

    @classmethod
    def of(cls, actor: Actor, http: Request, key: str | None, body: StrictModel) -> Self:
        """The context of the request ``http``, whose method, path and ``body`` tell it apart."""
        request = {
            "method": http.method,
            "path": http.url.path,
            "body": body.model_dump(mode="json"),
        }
        return cls(
            actor=actor.name,
            at=datetime.now(UTC),
            idempotency_key=key,
            request_digest=digest_of(request),
        )
