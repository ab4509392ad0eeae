"""Which keys the newest keyset revokes, asked of the database at most once a second."""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import UTC, datetime

from affidavit.certificate import read_keyset
from affidavit.service.keysets.store import KeysetStore

FRESH_SECONDS = 1.0


class RevokedKeys:
    """The ids of keys that must not sign any more; called for every signature."""

    def __init__(self, keysets: KeysetStore) -> None:
        self._keysets = keysets
        self._asked: float | None = None
        self._known: Collection[str] = frozenset()

    def __call__(self) -> Collection[str]:
        """Key ids; raises SQLAlchemy's errors when the database does not answer."""
        asked = time.monotonic()
        if self._asked is None or asked - self._asked >= FRESH_SECONDS:
            self._known = _revoked(self._keysets.newest())
            self._asked = asked
        return self._known


def _revoked(newest: bytes | None) -> frozenset[str]:
    if newest is None:
        return frozenset()
    now = datetime.now(UTC)
    since = read_keyset(newest).keyset.revoked_since()
    return frozenset(key_id for key_id, moment in since.items() if moment <= now)
