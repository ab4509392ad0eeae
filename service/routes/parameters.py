"""Parameters that several routes take; a valid one is safe to hand to any database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import Path
from pydantic import AfterValidator, AwareDatetime

from affidavit.service.openapi import ID_PATTERN

CertificateId = Annotated[
    str, Path(pattern=ID_PATTERN, description="``sha256:`` and 64 lower-case hex digits.")
]


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("this time does not exist in UTC") from None


Instant = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""An RFC 3339 time with its zone."""
