"""Whether a keyset counts, for somebody who trusts root keys or a keyset seen before.

1. ``keyset_unsigned``: t of its own root keys have signed it
2. ``keyset_untrusted``: t of the roots that are trusted already have signed it too
3. ``keyset_rollback``: it is not older than the one seen last
4. ``keyset_fork``: it is that one, or follows it: one version has one content
5. ``keyset_unrevoked``: what was revoked stays revoked, from no later than before
6. ``keyset_not_yet``, ``keyset_expired``: now lies between its dates

A verifier that missed versions in which the roots changed needs those in between; they
are given as a chain, of which the last alone has to be current.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from affidavit.certificate.keys import read_instant
from affidavit.certificate.keyset import (
    Keyset,
    KeysetError,
    Roots,
    SignedKeyset,
    read_keyset,
    read_model,
)
from affidavit.plan import MalformedPlan, load_json

Anchor = Roots | SignedKeyset
"""What is trusted beforehand: root keys, or the keyset that was accepted last."""


def accept(chain: Sequence[SignedKeyset], anchor: Anchor | None, now: datetime) -> Keyset:
    """The last keyset of ``chain``, each of which is trusted by the one before.

    ``anchor`` is None for the first one of all, of which only its own roots can vouch.
    Raises ``KeysetError``.
    """
    for found in chain:
        follow(found, anchor)
        anchor = found
    keyset = chain[-1].keyset
    _current(keyset, now)
    return keyset


def follow(found: SignedKeyset, anchor: Anchor | None) -> None:
    """Check everything but the dates.

    Raises ``KeysetError``: ``keyset_unsigned``, ``keyset_untrusted``, ``keyset_rollback``,
    ``keyset_fork`` or ``keyset_unrevoked``.
    """
    if not found.keyset.roots.signed(found.envelope):
        raise KeysetError(
            "keyset_unsigned",
            f"fewer than {found.keyset.roots.threshold} of its own root keys signed the keyset.",
            "Have it signed by more of them: affidavit keyset sign.",
        )
    if anchor is None:
        return
    trusted = anchor if isinstance(anchor, Roots) else anchor.keyset.roots
    if not trusted.signed(found.envelope):
        raise KeysetError(
            "keyset_untrusted",
            f"fewer than {trusted.threshold} of the root keys that you trust signed the keyset.",
            "If the roots changed in between, give the versions between, oldest first.",
        )
    if isinstance(anchor, SignedKeyset):
        _after(found, anchor)


def _after(found: SignedKeyset, last: SignedKeyset) -> None:
    version, known = found.keyset.version, last.keyset.version
    if version < known:
        raise KeysetError(
            "keyset_rollback",
            f"the keyset is version {version}, older than version {known}, which you have seen.",
            "Fetch the newest; if this is what you are given, somebody hides a revocation.",
        )
    same = version == known and found.digest != last.digest
    if same or (version == known + 1 and found.keyset.previous != last.digest):
        raise KeysetError(
            "keyset_fork",
            f"there are two keysets of version {known}, and this one is not of yours.",
            "Ask the holders of the root keys which one they signed; trust neither until then.",
        )
    now_revoked = found.keyset.revoked_since()
    for key_id, since in last.keyset.revoked_since().items():
        if key_id not in now_revoked or now_revoked[key_id] > since:
            raise KeysetError(
                "keyset_unrevoked",
                f"the key {key_id[:16]} was revoked from {since:%Y-%m-%d %H:%M:%S}Z on, and "
                "this keyset takes that back.",
                "A revocation is for ever; issue the keyset anew with it.",
            )


def _current(keyset: Keyset, now: datetime) -> None:
    if now < read_instant(keyset.issued_at):
        raise KeysetError(
            "keyset_not_yet",
            f"the keyset is issued at {keyset.issued_at}, which is yet to come.",
            "Check this machine's clock.",
        )
    if now > read_instant(keyset.expires_at):
        raise KeysetError(
            "keyset_expired",
            f"the keyset expired at {keyset.expires_at}.",
            "Fetch the newest (GET /v1/keyset); its issuer has to publish one before it expires.",
        )


def read_anchor(raw: bytes) -> Anchor:
    """The trusted roots, or the keyset seen last, of a file's bytes; raises ``KeysetError``."""
    try:
        document = load_json(raw).data
    except MalformedPlan as error:
        raise KeysetError(
            "roots_malformed", error.reasons[0].message, "Give the roots, or a keyset."
        ) from None
    if isinstance(document, dict) and "payloadType" in document:
        return read_keyset(raw)
    return read_model(Roots, document)
