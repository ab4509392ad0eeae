"""The problems of decisions about certificates that cannot be made."""

from __future__ import annotations

from affidavit.service.lifecycle.refusals import Impossible
from affidavit.service.lifecycle.wanted import MalformedDecision
from affidavit.service.problems import Problem

NOT_THEIRS = ("own_request", "anonymous_approver")


def impossible(error: Impossible) -> Problem:
    """What cannot be done with the certificate as it stands, or not by this actor."""
    return Problem(403 if error.code in NOT_THEIRS else 409, error.code, str(error))


def malformed_decision(error: MalformedDecision) -> Problem:
    """The problem of a body that is not a decision."""
    too_large = any(reason.code == "too_large" for reason in error.reasons)
    return Problem(
        413 if too_large else 400, "malformed_decision", str(error.reasons[0]), *error.reasons
    )
