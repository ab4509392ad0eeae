"""Policies: which plans an organisation lets through, and who may make an exception."""

from __future__ import annotations

from typing import Any

from affidavit.certificate.policy.document import BUILT_IN

VALID_DAYS = BUILT_IN.valid_days


def policy_reference() -> dict[str, Any]:
    """How a certificate names the built-in policy."""
    return BUILT_IN.reference()
