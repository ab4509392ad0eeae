"""Who signs what: the organisation's newest key for a role, or a development key that says so.

The key directory says which keys there are; ``affidavit keys new`` makes them. It is looked
at for every certificate, so that a new key or the end of an old one's window needs no
restart, and read again only when something in it has changed. Where the private halves
are kept is a setting (``certificate.signers``). A key that the published keyset revokes
does not sign.

While there is no key at all, keys that live in this process alone sign instead, and every
certificate that it signs carries the warning ``untrusted``: nobody outside this process
can know the keys, so the signature proves nothing to them. Once there are keys and none of
them may sign, nothing is signed: falling back to development keys would hide that from
those who trust the service.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from affidavit.certificate import (
    SERVICE_ROLES,
    KeyFailure,
    KeyRole,
    KeyStore,
    PrivateKeySource,
    PublicKey,
    SigningPort,
    development_key,
    now_in_seconds,
)

log = logging.getLogger("affidavit.service")

Fingerprint = tuple[tuple[str, int, int, int, int], ...]


class Keyring:
    """The keys of one service process.

    Every method raises ``KeyFailure`` when the directory holds a key that cannot be used,
    or keys of which none may sign.
    """

    def __init__(
        self,
        directory: Path,
        halves: PrivateKeySource | None = None,
        revoked: Callable[[], Collection[str]] = frozenset,
        now: Callable[[], datetime] = now_in_seconds,
    ) -> None:
        self._directory = directory
        self._store = KeyStore(directory)
        self._halves = halves or self._store
        self._revoked = revoked
        self.now = now
        self._development = {role: development_key(role) for role in KeyRole}
        self._lock = Lock()
        self._seen: Fingerprint | None = None
        self._records: tuple[PublicKey, ...] = ()
        self._found: dict[str, SigningPort | None] = {}

    def revoked(self) -> Collection[str]:
        """The ids of keys whose signatures do not count any more."""
        return self._revoked()

    def current(self, role: KeyRole = KeyRole.CERTIFICATE) -> SigningPort:
        """Who signs for ``role`` now. Raises ``KeyFailure`` where nobody can."""
        with self._lock:
            self._look()
            if not self._records:
                return self._development[role]
            now, revoked = self.now(), self._revoked()
            for public in reversed(self._records):
                if not (public.may(role) and public.covers(now)) or public.key_id in revoked:
                    continue
                result = self._half_of(public)
                if result is not None:
                    return result
        raise KeyFailure(
            f"none of the keys in {self._directory} may sign for the role {role} now: there is "
            "none, their windows are over, they are revoked, or their private halves are not "
            f"here; run affidavit keys rotate --role {role}."
        )

    def signer(self, role: KeyRole) -> Callable[[], SigningPort]:
        """Who signs for ``role``, asked each time."""
        return partial(self.current, role)

    def all_current(self) -> tuple[SigningPort, ...]:
        """Who signs for each role of a service. Raises ``KeyFailure`` where nobody can."""
        return tuple(self.current(role) for role in SERVICE_ROLES)

    def public_records(self) -> list[dict[str, Any]]:
        """The public records of the directory's keys, and of the development key if it signs."""
        with self._lock:
            self._look()
            development = (key.public for key in self._development.values())
            return [key.as_record() for key in self._records or development]

    def announce(self) -> None:
        """Say in the log who signs, loudly when it is a development key."""
        key, *_ = self.all_current()
        if key.public.development:
            log.warning(
                "UNTRUSTED: there is no signing key in %s; certificates are signed by a "
                "development key that nobody can trust. Run: affidavit keys new",
                self._directory,
            )
        else:
            log.info("certificates are signed by key %s", key.key_id)

    def _half_of(self, public: PublicKey) -> SigningPort | None:
        if public.key_id not in self._found:
            self._found[public.key_id] = self._halves.find(public)
        return self._found[public.key_id]

    def _look(self) -> None:
        """Read the directory again if anything in it is not as it was."""
        seen = _fingerprint(self._directory)
        if seen != self._seen:
            self._records = self._store.public_keys()
            self._found = {}
            self._seen = seen


def _fingerprint(directory: Path) -> Fingerprint:
    try:
        with os.scandir(directory) as entries:
            result = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return ()
    return tuple(
        sorted((name, at.st_ino, at.st_mtime_ns, at.st_size, at.st_mode) for name, at in result)
    )
