"""Parameters that several routes take; a valid one is safe to hand to any database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import Path
from pydantic import AfterValidator, AwareDatetime, BeforeValidator
from pydantic_core import PydanticKnownError

from affidavit.service.openapi import ID_PATTERN

CertificateId = Annotated[
    str, Path(pattern=ID_PATTERN, description="``sha256:`` and 64 lower-case hex digits.")
]


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("this time does not exist in UTC") from None


def _no_number(value: object) -> object:
    """``value`` unless it reads as a number, which would count as seconds since 1970."""
    try:
        float(str(value))
    except ValueError:
        return value
    wrong = {"error": "invalid date separator, expected `-`"}
    raise PydanticKnownError("datetime_from_date_parsing", wrong)


Instant = Annotated[AwareDatetime, BeforeValidator(_no_number), AfterValidator(_in_utc)]
"""An RFC 3339 time with its zone."""
