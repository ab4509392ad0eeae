"""The context of a change: the caller, the time, and the idempotency key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Self

from fastapi import Header, Request

from affidavit.plan import StrictModel, digest_of
from affidavit.service.errors import IdempotencyKeyReused
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
        if key is not None and actor.team is not None:
            # A person of several teams uses it once in each.
            key = hashlib.sha256(f"{actor.team} {key}".encode()).hexdigest()
        return cls(
            actor=actor.name,
            at=http.app.state.services.clock.now(),
            idempotency_key=key,
            request_digest=digest_of(request),
        )

    def require_same(self, request_digest: str | None) -> None:
        """Raise ``IdempotencyKeyReused`` unless the key came with this very request before."""
        if request_digest != self.request_digest:
            raise IdempotencyKeyReused(
                "this Idempotency-Key was used for another request.",
                "Use a new key for a new request.",
            )
