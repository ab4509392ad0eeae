"""Trusted keys for verifications, by default without a trust policy."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from affidavit.trust import PublicKey, TrustedKeys, TrustPolicy


def trusting(
    *keys: PublicKey | Iterable[PublicKey],
    policy: TrustPolicy | None = None,
    at: datetime | None = None,
) -> TrustedKeys:
    """Trust ``keys`` under ``policy``, at the time ``at`` instead of the clock's."""
    lists = ((item,) if isinstance(item, PublicKey) else tuple(item) for item in keys)
    return TrustedKeys(tuple(key for item in lists for key in item), policy, at)
