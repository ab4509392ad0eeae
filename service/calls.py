"""Who asks for a change, and how a repetition of the request is known."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Who asks for something, when, and how a repetition is known."""

    actor: str
    at: datetime
    idempotency_key: str | None = None
    request_digest: str | None = None
