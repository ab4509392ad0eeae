"""Waivers: one rule of one policy version does not apply to one plan, or one data set, for a time.

The service stores waivers; a plan never contains one. A waiver names who answers for it
(``owner``), who granted it (``created_by``), why, and until when; its id is the digest of all
that. It applies to the policy version that it was granted for: a new version needs a new
waiver. Nobody can use a waiver that they granted. What was waived stays visible in the
certificate, which expires no later than the waiver.

Only reasons of a policy can be waived, never a refusal by the accounting.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from affidavit.certificate.dsse import Digest, Instant
from affidavit.certificate.keys.key import parse_instant
from affidavit.certificate.policy.rules import WAIVABLE
from affidavit.plan import Name, Reason, StrictModel, digest_of


def _waivable(rule: str) -> str:
    if rule not in WAIVABLE:
        known = ", ".join(sorted(WAIVABLE))
        raise PydanticCustomError("not_waivable", f"what can be waived is one of {known}")
    return rule


WaivableRule = Annotated[str, Field(strict=True), AfterValidator(_waivable)]
Person = Annotated[
    str,
    StringConstraints(strict=True, min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$"),
]
# Of the control characters only tab and line ends are text.
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
    def _is_about_one_thing(self) -> Waiver:
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
        """The moment from which it no longer applies."""
        return parse_instant(self.expires_at)

    def as_document(self) -> dict[str, Any]:
        """The waiver as plain data."""
        return self.model_dump(mode="json", exclude_none=True)

    def is_for(self, plan_digest: str, dataset: str | None) -> bool:
        """Whether it was granted for that plan or data set."""
        if self.plan_digest is not None:
            return self.plan_digest == plan_digest
        return self.dataset == dataset


class Waived(StrictModel):
    """A reason that does not block, and the waiver that applies to it."""

    reason: Reason
    waiver: Waiver

    def as_dict(self) -> dict[str, Any]:
        """The waived reason in results and certificates."""
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


def in_force(
    waivers: Iterable[Waiver],
    *,
    policy: str,
    plan_digest: str,
    dataset: str | None,
    requester: str,
    now: datetime,
) -> tuple[Waiver, ...]:
    """Which of ``waivers`` apply to ``requester``'s plan under ``policy`` (a digest) now."""
    return tuple(
        sorted(
            (
                waiver
                for waiver in waivers
                if waiver.policy == policy
                and waiver.is_for(plan_digest, dataset)
                and waiver.created_by != requester
                and parse_instant(waiver.created_at) <= now < waiver.expires
            ),
            key=lambda item: item.id,
        )
    )
