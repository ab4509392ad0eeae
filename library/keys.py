"""``affidavit.keys``: the keys of this computer, which sign certificates.

>>> import os, tempfile
>>> os.environ["AFFIDAVIT_HOME"] = tempfile.mkdtemp()
>>> key = new("laptop")
>>> [stored.label for stored in stored_keys()], stored_keys()[0].key_id == key.key_id
(['laptop'], True)
>>> _ = os.environ.pop("AFFIDAVIT_HOME")
"""

from __future__ import annotations

from collections.abc import Collection

from affidavit.trust import KeyRole, KeyStore, PublicKey, home


def new(label: str = "", *, roles: Collection[KeyRole] | None = None) -> PublicKey:
    """Create a signing key in the key directory, and return its public half.

    ``roles`` are what it may sign (None: everything). Raises ``KeyFailure`` and ``OSError``.
    """
    return _store().new(label, roles=roles).public


def stored_keys() -> list[PublicKey]:
    """Return the keys in the key directory, oldest first; raises ``KeyFailure``."""
    return list(_store().public_keys())


def _store() -> KeyStore:
    return KeyStore(home() / "keys")
