r"""What a client sends to the ledger.

>>> read_budget(b'{"adjacency": "add_remove", "epsilon": 8, "delta": 1e-5}').unit
'example'
>>> read_settlement(b'{"steps_run": -1}')
Traceback (most recent call last):
affidavit.service.wanted.MalformedRequest: invalid_value at /steps_run: ...
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from affidavit.accountants import decimal_down
from affidavit.accountants.privacy_filter import LARGEST_EPSILON
from affidavit.plan import Integer, Real, StrictModel
from affidavit.service.wanted import Comment, Digest, MalformedRequest, Wanted, read_wanted


class WantedBudget(StrictModel):
    """A version of the budget of one privacy unit and adjacency of a data set."""

    unit: Literal["example", "user"] = "example"
    adjacency: Literal["add_remove", "replace_one", "zero_out"]
    epsilon: Annotated[Real, Field(ge=1e-6, le=LARGEST_EPSILON)]
    delta: Annotated[Real, Field(ge=1e-15, lt=1)]
    reason: Comment = ""

    def decimals(self) -> tuple[str, str]:
        """ε and δ as decimals that read back as these doubles."""
        return decimal_down(self.epsilon, 17), decimal_down(self.delta, 17)


class WantedReservation(StrictModel):
    """A reservation for the run of a certificate."""

    certificate: Digest


class WantedCommitment(StrictModel):
    """Nothing is said with a commitment; the path names what is committed."""


class WantedSettlement(StrictModel):
    """The steps that were run, with the digest of the run's record; without both, all of them."""

    steps_run: Annotated[Integer, Field(ge=0)] | None = None
    record: Digest | None = None


class WantedRelease(StrictModel):
    """A release of what was reserved, before the run began."""

    reason: Comment = ""


def read_budget(raw: bytes) -> WantedBudget:
    """The budget that ``raw`` (JSON) asks for; raises ``MalformedRequest``."""
    return _read(WantedBudget, raw, "a budget")


def read_reservation(raw: bytes) -> WantedReservation:
    """The reservation that ``raw`` (JSON) asks for; raises ``MalformedRequest``."""
    return _read(WantedReservation, raw, "a reservation")


def read_commitment(raw: bytes) -> WantedCommitment:
    """The commitment that ``raw`` asks for: nothing or ``{}``; raises ``MalformedRequest``."""
    return _read(WantedCommitment, raw or b"{}", "a commitment")


def read_settlement(raw: bytes) -> WantedSettlement:
    """The settlement that ``raw`` asks for, ``{}`` if empty; raises ``MalformedRequest``."""
    return _read(WantedSettlement, raw or b"{}", "a settlement")


def read_release(raw: bytes) -> WantedRelease:
    """The release that ``raw`` asks for, ``{}`` if empty; raises ``MalformedRequest``."""
    return _read(WantedRelease, raw or b"{}", "a release")


def _read(model: type[Wanted], raw: bytes, what: str) -> Wanted:
    return read_wanted(model, raw, what, "docs/ledger.md", MalformedRequest)
