"""Waivers: one rule of one policy version does not apply to one plan or data set for a time.

The service stores waivers; a plan never contains one. A waiver names the responsible person
(``owner``), the person who granted it (``created_by``), the reason and the end; its id is the
digest of all its fields. It applies to one policy version: a new version needs a new waiver. Nobody
can use a waiver that they granted. A waived reason stays in the certificate, which expires no later
than the waiver.

Only reasons of a policy can be waived, never a refusal by the accounting.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from affidavit.certificate.policy.rules import WAIVABLE
from affidavit.plan import Name, Reason, StrictModel, digest_of
from affidavit.trust import Instant, parse_instant
from affidavit.trust.dsse import Digest


def _waivable(rule: str) -> str:
    if rule not in WAIVABLE:
        known = ", ".join(sorted(WAIVABLE))
        raise PydanticCustomError("not_waivable", f"the rules that can be waived are {known}")
    return rule


WaivableRule = Annotated[str, Field(strict=True), AfterValidator(_waivable)]
Person = Annotated[
    str,
    StringConstraints(strict=True, min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$"),
]
# Tab and line ends are the only allowed control characters.
Explanation = Annotated[
    str,
    StringConstraints(
        strict=True, min_length=1, max_length=2000, pattern=r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"
    ),
]


class Waiver(StrictModel):
    """An exception for exactly one of ``plan_digest`` and ``dataset``."""

    rule: WaivableRule
    policy: Digest
    plan_digest: Digest | None = None
    dataset: Name | None = None
    owner: Person
    reason: Explanation
    created_by: Person
    created_at: Instant
    expires_at: Instant

    @model_validator(mode="after")
    def _validate(self) -> Waiver:
        if (self.plan_digest is None) == (self.dataset is None):
            raise PydanticCustomError("scope", "a waiver needs either a plan_digest or a dataset")
        if self.expires <= parse_instant(self.created_at):
            raise PydanticCustomError("expired", "a waiver must end after it was granted")
        return self

    @property
    def id(self) -> str:
        """The digest of the waiver's canonical JSON."""
        return digest_of(self.as_document())

    @property
    def expires(self) -> datetime:
        """The moment from which the waiver no longer applies."""
        return parse_instant(self.expires_at)

    def as_document(self) -> dict[str, Any]:
        """Return the waiver as plain data."""
        return self.model_dump(mode="json", exclude_none=True)

    def applies_to(self, plan_digest: str, dataset: str | None) -> bool:
        """Whether the waiver was granted for the plan or data set."""
        if self.plan_digest is not None:
            return self.plan_digest == plan_digest
        return self.dataset == dataset


class WaivedReason(StrictModel):
    """A waived reason, which does not block the plan, and its waiver."""

    reason: Reason
    waiver: Waiver

    def as_dict(self) -> dict[str, Any]:
        """Return the waived reason as results and certificates have it."""
        return {
            **self.reason.as_dict(),
            "waiver": {
                "id": self.waiver.id,
                "owner": self.waiver.owner,
                "reason": self.waiver.reason,
                "granted_by": self.waiver.created_by,
                "expires": self.waiver.expires_at,
            },
        }


def waivers_in_force(
    waivers: Iterable[Waiver],
    *,
    policy: str,
    plan_digest: str,
    dataset: str | None,
    requester: str,
    now: datetime,
) -> tuple[Waiver, ...]:
    """Return the ``waivers`` that apply to ``requester``'s plan under ``policy`` (a digest) now."""
    return tuple(
        sorted(
            (
                waiver
                for waiver in waivers
                if waiver.policy == policy
                and waiver.applies_to(plan_digest, dataset)
                and waiver.created_by != requester
                and parse_instant(waiver.created_at) <= now < waiver.expires
            ),
            key=lambda item: item.id,
        )
    )
