"""What a client sends for a waiver.

>>> read_waiver(b'{"rule": "under_noised", "policy": "nlg"}')
Traceback (most recent call last):
affidavit.service.policies.wanted.MalformedWaiver: invalid_value at /rule: ...
"""

from __future__ import annotations

from datetime import datetime
from typing import Self

from pydantic import ValidationError, model_validator
from pydantic_core import PydanticCustomError

from affidavit.certificate.policy.reading import reasons_of
from affidavit.certificate.policy.waiver import Digest, Instant, Person, Rule, Why, instant
from affidavit.plan.loading import load_json
from affidavit.plan.reasons import MalformedPlan, PlanError
from affidavit.plan.types import Name, Part

LARGEST = 64 * 1024


class MalformedWaiver(PlanError):
    """The body does not ask for a waiver."""


class WantedWaiver(Part):
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
    try:
        data = load_json(raw, LARGEST).data
    except MalformedPlan as error:
        raise MalformedWaiver(*error.reasons) from None
    try:
        return WantedWaiver.model_validate(data)
    except ValidationError as error:
        names = tuple(WantedWaiver.model_fields)
        raise MalformedWaiver(*reasons_of(error, data, "a waiver", names)) from None
