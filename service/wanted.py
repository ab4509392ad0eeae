"""What a client asks for in a small JSON body, read as strictly as a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import StringConstraints, ValidationError

from affidavit.plan import Kind, MalformedPlan, PlanError, Reason, StrictModel, load_json
from affidavit.service.errors import MalformedRequest as MalformedRequest

LARGEST = 64 * 1024
UUID = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_PRINTABLE = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"

Digest = Annotated[str, StringConstraints(strict=True, pattern=r"^sha256:[0-9a-f]{64}$")]
Comment = Annotated[str, StringConstraints(strict=True, max_length=2000, pattern=_PRINTABLE)]

Wanted = TypeVar("Wanted", bound=StrictModel)


def read_wanted(
    model: type[Wanted],
    raw: bytes,
    what: str,
    page: str,
    refuse: type[PlanError],
    largest: int = LARGEST,
) -> Wanted:
    """``what`` is asked for by ``raw``; raises ``refuse`` with every reason found."""
    try:
        data = load_json(raw, largest).data
    except MalformedPlan as error:
        raise refuse(*(_about(reason, what, page, largest) for reason in error.reasons)) from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        kind = Kind(what, lambda: tuple(model.model_fields), page)
        raise refuse(*kind.reasons(error, data)) from None


def _about(reason: Reason, what: str, page: str, largest: int) -> Reason:
    """``reason`` with a remedy for ``what`` where the reader's own is one for plans."""
    remedies = {
        "empty": f"Give {what}; see {page}.",
        "too_large": f"Give {what} of at most {largest} bytes; see {page}.",
    }
    return replace(reason, remedy=remedies.get(reason.code, reason.remedy))
