"""Which keys a verification trusts: the key directory's, given ones, or those of a keyset.

A keyset is accepted by somebody who trusts root keys, or an earlier keyset, in these steps:

1. ``keyset_unsigned``: t of its own root keys signed it
2. ``keyset_untrusted``: t of the roots that are already trusted signed it too
3. ``keyset_rollback``: it is not older than the last one seen
4. ``keyset_fork``: it is that one or follows it; a version has one content
5. ``keyset_unrevoked``: revoked keys stay revoked, from no later than before
6. ``keyset_not_yet``, ``keyset_expired``: now lies between its dates

A verifier that missed versions in which the roots changed passes those in between as a chain;
only the last has to be current. The newest accepted from some roots is remembered in
``$AFFIDAVIT_HOME/keysets``, and trusted in their place from then on: so neither an older keyset nor
one that only replaced roots signed is accepted again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from affidavit.certificate.atomic_write import locked, write_atomically
from affidavit.certificate.keys.key import KeyFailure, PublicKey, parse_instant
from affidavit.certificate.keys.key_store import KeyStore, home, read_public_keys
from affidavit.certificate.keys.keyset import (
    Keyset,
    KeysetError,
    Roots,
    SignedKeyset,
    read_keyset,
    read_model,
)
from affidavit.certificate.verification.trust_policy import TrustPolicy
from affidavit.certificate.verification.verification_result import VerificationError
from affidavit.plan import MalformedPlan, canonical_json, load_json, read_limited

KEY_STEP = 3

log = logging.getLogger("affidavit.certificate")


@dataclass(frozen=True, slots=True)
class TrustRoot:
    """What the command line said: files of keys, or keysets with what is trusted already."""

    keys: Sequence[Path] | None
    keysets: Sequence[Path] | None = None
    root: Path | None = None

    def public_keys(self) -> tuple[PublicKey, ...]:
        """The trusted keys; raises as ``load`` does."""
        return self.load()[0]

    def load(self) -> tuple[tuple[PublicKey, ...], TrustPolicy | None]:
        """The trusted keys, and the keyset's default trust policy if it has one.

        Raises ``KeyFailure`` for files that cannot be used, and ``VerificationError``, as
        the step that looks for the key, when the keyset does not count.
        """
        if bool(self.keysets) != (self.root is not None):
            raise KeyFailure(
                "--keyset and --root go together: the keyset, and the roots that you trust or "
                "the keyset that you saw last."
            )
        if self.root is not None and self.keys:
            raise KeyFailure("give --keys or --keyset, not both.")
        if self.root is not None:
            return self._of_keyset(self.root)
        if not self.keys:
            return KeyStore(home() / "keys").public_keys(), None
        return _without_conflict(key for file in self.keys for key in read_public_keys(file)), None

    def _of_keyset(self, root: Path) -> tuple[tuple[PublicKey, ...], TrustPolicy | None]:
        try:
            chain = [read_keyset(_read(path)) for path in self.keysets or ()]
            anchor = read_anchor(_read(root))
            memory = _memory_of(anchor)
            seen = _remembered(memory)
            keyset = accept_keyset(chain, anchor, datetime.now(UTC), seen)
            if seen is None or seen.keyset.version < keyset.version:
                _remember(memory, chain[-1])
            return keyset.public_keys(), keyset.trust
        except KeysetError as error:
            raise VerificationError(KEY_STEP, error.code, error.message, error.remedy) from None


def _without_conflict(keys: Iterable[PublicKey]) -> tuple[PublicKey, ...]:
    """``keys``, each once; raises ``KeyFailure`` for two records of one key."""
    trusted: dict[str, PublicKey] = {}
    for key in keys:
        if trusted.setdefault(key.key_id, key) != key:
            raise KeyFailure(
                f"--keys has two records of the key {key.key_id[:16]}, which differ; give only the "
                "newest."
            )
    return tuple(trusted.values())


def _read(path: Path) -> bytes:
    try:
        return read_limited(path)
    except OSError as error:
        raise KeyFailure(f"{path} cannot be read: {error.strerror}.") from None


Anchor = Roots | SignedKeyset
"""What is trusted beforehand: root keys, or the keyset that was accepted last."""


def _memory_of(anchor: Anchor) -> Path:
    """The file of the newest keyset that was accepted from these roots."""
    roots = anchor if isinstance(anchor, Roots) else anchor.keyset.roots
    digest = hashlib.sha256(canonical_json(roots.model_dump(mode="json"))).hexdigest()
    return home() / "keysets" / f"{digest}.json"


def _remembered(memory: Path) -> SignedKeyset | None:
    try:
        return read_keyset(memory.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeysetError) as error:
        raise KeyFailure(
            f"{memory} cannot be read ({error}): it is needed to detect a keyset that was rolled "
            "back. Restore it, or move it away to start over."
        ) from None


def _remember(memory: Path, keyset: SignedKeyset) -> None:
    try:
        with locked(memory):
            # Another process may have accepted a newer one by now.
            seen = _remembered(memory)
            if seen is None or seen.keyset.version < keyset.keyset.version:
                write_atomically(memory, keyset.as_bytes())
    except OSError as error:
        log.warning("cannot write %s (%s): an older keyset will be accepted", memory, error)


def accept_keyset(
    chain: Sequence[SignedKeyset],
    anchor: Anchor | None,
    now: datetime,
    seen: SignedKeyset | None = None,
) -> Keyset:
    """The last keyset of ``chain``, each of which is trusted by the one before.

    ``anchor`` is None for the first one of all, of which only its own roots can vouch. ``seen`` is
    the newest that was accepted from it, and is trusted in its place.
    Raises ``KeysetError``.
    """
    if seen is not None:
        recent = [item for item in chain if item.keyset.version >= seen.keyset.version]
        if not recent:
            _after(chain[-1], seen)
        chain, anchor = recent, seen
    for candidate in chain:
        follow_keyset(candidate, anchor)
        anchor = candidate
    keyset = chain[-1].keyset
    _current(keyset, now)
    return keyset


def follow_keyset(candidate: SignedKeyset, anchor: Anchor | None) -> None:
    """Check everything but the dates.

    Raises ``KeysetError``: ``keyset_unsigned``, ``keyset_untrusted``, ``keyset_rollback``,
    ``keyset_fork`` or ``keyset_unrevoked``.
    """
    if not candidate.keyset.roots.signed(candidate.envelope):
        raise KeysetError(
            "keyset_unsigned",
            f"fewer than {candidate.keyset.roots.threshold} of its own root keys "
            "signed the keyset.",
            "Have it signed by more of them: affidavit keyset sign.",
        )
    if anchor is None:
        return
    trusted = anchor if isinstance(anchor, Roots) else anchor.keyset.roots
    if not trusted.signed(candidate.envelope):
        raise KeysetError(
            "keyset_untrusted",
            f"fewer than {trusted.threshold} of the root keys that you trust signed the keyset.",
            "If the roots changed in between, give the versions between, oldest first.",
        )
    if isinstance(anchor, SignedKeyset):
        _after(candidate, anchor)


def _after(candidate: SignedKeyset, last: SignedKeyset) -> None:
    version, known = candidate.keyset.version, last.keyset.version
    if version < known:
        raise KeysetError(
            "keyset_rollback",
            f"the keyset is version {version}, older than version {known}, which you have seen.",
            "Fetch the newest; if this is what you are given, somebody hides a revocation.",
        )
    same = version == known and candidate.digest != last.digest
    if same or (version == known + 1 and candidate.keyset.previous != last.digest):
        raise KeysetError(
            "keyset_fork",
            f"there are two keysets of version {known}, and this is not the one you have.",
            "Ask the holders of the root keys which one they signed; trust neither until then.",
        )
    now_revoked = candidate.keyset.revoked_since()
    for key_id, since in last.keyset.revoked_since().items():
        if key_id not in now_revoked or now_revoked[key_id] > since:
            raise KeysetError(
                "keyset_unrevoked",
                f"the key {key_id[:16]} was revoked from {since:%Y-%m-%d %H:%M:%S}Z on, but this "
                "keyset undoes that.",
                "Revocations are permanent; reissue the keyset with it.",
            )


def _current(keyset: Keyset, now: datetime) -> None:
    if now < parse_instant(keyset.issued_at):
        raise KeysetError(
            "keyset_not_yet",
            f"the keyset is dated {keyset.issued_at}, which is in the future.",
            "Check this machine's clock.",
        )
    if now > parse_instant(keyset.expires_at):
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
