"""``affidavit.keys``: the keys of this computer, and those that a verification trusts.

>>> import os, tempfile
>>> os.environ["AFFIDAVIT_HOME"] = tempfile.mkdtemp()
>>> key = new("laptop")
>>> [stored.label for stored in stored_keys()], stored_keys()[0].key_id == key.key_id
(['laptop'], True)
>>> [key.label for key in trusted().keys], trusted().policy
(['laptop'], None)
>>> _ = os.environ.pop("AFFIDAVIT_HOME")
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from affidavit.trust import KeyRole, KeyStore, PublicKey, TrustedKeys, TrustRoot, home

File = str | os.PathLike[str]


def new(label: str = "", *, roles: Collection[KeyRole] | None = None) -> PublicKey:
    """Create a signing key in the key directory, and return its public half.

    ``roles`` are what it may sign (None: everything). Raises ``KeyFailure``, ``OSError``, and
    ``ValueError`` for a role that there is not.
    """
    if unknown := sorted(set(roles or ()) - set(KeyRole)):
        raise ValueError(f"{unknown[0]!r} is no role; use {', '.join(KeyRole)}")
    return _store().new(label, roles=None if roles is None else {*map(KeyRole, roles)}).public


def stored_keys() -> list[PublicKey]:
    """Return the keys in the key directory, oldest first; raises ``KeyFailure``."""
    return list(_store().public_keys())


def trusted(
    *files: File,
    keyset: File | Sequence[File] = (),
    root: File | None = None,
    policy: File | None = None,
) -> TrustedKeys:
    """Return the keys to trust in a verification, and the policy under which they are trusted.

    They are those in ``files``, or of ``keyset`` (one, or several, oldest first) by the roots in
    ``root``, or else this computer's. ``policy`` replaces the trust policy of the keyset. Raises
    ``KeyFailure``, and ``VerificationError`` for a keyset that is not accepted.
    """
    keysets = (keyset,) if isinstance(keyset, str | os.PathLike) else keyset
    return TrustRoot(
        keys=[Path(file) for file in files],
        keysets=[Path(file) for file in keysets],
        root=None if root is None else Path(root),
        trust=None if policy is None else Path(policy),
    ).load()


def _store() -> KeyStore:
    return KeyStore(home() / "keys")
