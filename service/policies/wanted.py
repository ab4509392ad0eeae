"""What a client sends for a waiver.

>>> read_waiver(b'{"rule": "under_noised", "policy": "nlg"}')
Traceback (most recent call last):
affidavit.service.policies.wanted.MalformedWaiver: invalid_value at /rule: ...
"""

from __future__ import annotations

from datetime import datetime
from typing import Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from affidavit.certificate.policy import Digest, Instant, Person, Rule, Why, instant
from affidavit.plan import Name, PlanError, StrictModel
from affidavit.service.wanted import read_wanted


class MalformedWaiver(PlanError):
    """The body does not ask for a waiver."""


class WantedWaiver(StrictModel):
    """A waiver as it is asked for; who grants it and when is not the client's to say."""

    rule: Rule
    policy: Name
    plan_digest: Digest | None = None
    dataset: Name | None = None
    owner: Person
    reason: Why
    expires_at: Instant

    @model_validator(mode="after")
    def _is_about_one_thing(self) -> Self:
        if (self.plan_digest is None) == (self.dataset is None):
            raise PydanticCustomError("scope", "give plan_digest or dataset, one of the two")
        return self

    @property
    def expires(self) -> datetime:
        """When it is to end."""
        return instant(self.expires_at)


def read_waiver(raw: bytes) -> WantedWaiver:
    """The waiver that ``raw`` (JSON) asks for; raises ``MalformedWaiver``."""
    page = "docs/how-to/policies.md"
    return read_wanted(WantedWaiver, raw, "a waiver", page, MalformedWaiver)
