"""Who signs: the organisation's newest key, or a development key that says so.

Keys are files in the key directory, made by ``affidavit keys new``. They are looked up
for every certificate, so that a new key or the end of an old one's window needs no
restart. While there is none, a key that lives in this process alone signs instead, and
every certificate that it signs carries the warning ``untrusted``: nobody outside this
process can know the key, so the signature proves nothing to them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from affidavit.certificate.keys import KeyStore, SigningPort, development_key

log = logging.getLogger("affidavit.service")


class Signers:
    """The keys of one service process.

    Every method raises ``KeyFailure`` when the directory holds a key that cannot be used:
    falling back to the development key would hide that from those who trust the service.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._store = KeyStore(directory)
        self._development = development_key()

    def current(self) -> SigningPort:
        """Who signs now."""
        return self._store.signing_key() or self._development

    def public_records(self) -> list[dict[str, Any]]:
        """The public records of the directory's keys and of the key that signs now."""
        known = {key.key_id: key for key in (*self._store.public_keys(), self.current().public)}
        return [key.as_record() for key in known.values()]

    def announce(self) -> None:
        """Say in the log who signs, loudly when it is a development key."""
        key = self.current()
        if key.public.development:
            log.warning(
                "UNTRUSTED: there is no signing key in %s; certificates are signed by a "
                "development key that nobody can trust. Run: affidavit keys new",
                self._directory,
            )
        else:
            log.info("certificates are signed by key %s", key.key_id)
