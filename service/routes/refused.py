"""The problems of decisions about certificates that cannot be made."""

from __future__ import annotations

from affidavit.service.lifecycle.refusals import Impossible
from affidavit.service.problems import Problem

NOT_THEIRS = ("own_request", "anonymous_approver")


def impossible(error: Impossible) -> Problem:
    """What cannot be done with the certificate as it stands, or not by this actor."""
    return Problem(403 if error.code in NOT_THEIRS else 409, error.code, str(error))
