"""Rotation: a new key signs from now on, and the old ones' windows end after an overlap.

During the overlap both may sign, so that a service on another host, or one that was not
restarted, goes on until it has the new key. What an old key signed inside its window
keeps counting: rotation is ordinary housekeeping. A key that a stranger may have is
revoked by a keyset instead, because its holder can write any date into a certificate.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from affidavit.certificate.keys import WINDOW, KeyFailure, KeyStore, PublicKey, SigningKey

OVERLAP = timedelta(days=30)


def rotate(store: KeyStore, overlap: timedelta, label: str = "") -> tuple[SigningKey, int]:
    """Make a new key and close the windows of the others ``overlap`` from now, if still open.

    Returns the new key and how many windows were shortened.
    """
    before = store.public_keys()
    made = store.new(label)
    end = _now() + overlap
    shortened = [_closed(key, end) for key in before if key.not_after > end]
    for key in shortened:
        store.keep(key)
    return made, len(shortened)


def retire(store: KeyStore, prefix: str) -> PublicKey:
    """Close the window of the key whose id begins with ``prefix``; it signs no more.

    Raises ``KeyFailure`` if there is no one such key, or if no other key could sign then.
    """
    known = store.public_keys()
    found = [key for key in known if prefix and key.key_id.startswith(prefix)]
    if len(found) != 1:
        what = "no key" if not found else f"{len(found)} keys"
        raise KeyFailure(f"{what} in {store.directory} begin with {prefix!r}; give a whole key id.")
    (key,) = found
    now = _now()
    if not any(other.covers(now) for other in known if other.key_id != key.key_id):
        raise KeyFailure(
            "it is the only key that may sign now; run `affidavit keys rotate`, which makes "
            "another first."
        )
    retired = _closed(key, now)
    store.keep(retired)
    return retired


def add(store: KeyStore, pem: bytes, label: str = "") -> PublicKey:
    """Keep the record of a key whose private half is elsewhere; its window opens now.

    Raises ``KeyFailure`` if ``pem`` is no Ed25519 public key, or is known already.
    """
    try:
        key = load_pem_public_key(pem)
    except (ValueError, TypeError):
        raise KeyFailure("this is not the PEM of a public key.") from None
    if not isinstance(key, Ed25519PublicKey):
        raise KeyFailure("this key is not an Ed25519 key.")
    now = _now()
    made = PublicKey(key=key, not_before=now, not_after=now + WINDOW, label=label)
    if made.key_id in {known.key_id for known in store.public_keys()}:
        raise KeyFailure(f"the key {made.key_id[:16]} is there already.")
    store.keep(made)
    return made


def _closed(key: PublicKey, end: datetime) -> PublicKey:
    return replace(key, not_after=max(key.not_before, min(key.not_after, end)))


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
