"""The keys that a verification trusts: those of the key directory, of files, or of a keyset.

A verifier who trusts root keys or an earlier keyset accepts a keyset in these steps, each with the
codes of its errors:

1. ``keyset_unsigned``: t of its own root keys signed it
2. ``keyset_untrusted``: t of the trusted root keys signed it too
3. ``keyset_rollback``: it is not older than the last one seen
4. ``keyset_fork``: it is the last one seen or follows it; a version has one content
5. ``keyset_unrevoked``: revoked keys stay revoked, from the same instant or earlier
6. ``keyset_not_yet``, ``keyset_expired``: the current time lies between its dates

A verifier that missed versions in which the roots changed passes the missed versions as a chain;
only the last must be current. The newest keyset accepted from given roots is stored in
``$AFFIDAVIT_HOME/keysets`` and replaces them as the trusted one: neither an older keyset nor one
that only replaced roots signed is accepted again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from affidavit.plan import MalformedPlan, canonical_json, load_json, read_inside, read_limited
from affidavit.trust.atomic_write import locked, write_atomically
from affidavit.trust.errors import KeysetError, VerificationError
from affidavit.trust.home_directory import home
from affidavit.trust.key import (
    KeyFailure,
    PublicKey,
    by_id,
    parse_instant,
)
from affidavit.trust.key_store import (
    KeyStore,
    read_public_keys,
)
from affidavit.trust.keyset import (
    MAX_BYTES,
    Keyset,
    Roots,
    SignedKeyset,
    read_keyset,
    read_model,
)
from affidavit.trust.trust_policy import BadTrustPolicy, TrustPolicy, parse_trust_policy

KEY_STEP = 3
"""The verification step that looks for the key."""

log = logging.getLogger("affidavit.certificate")


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """The keys that a verification trusts, the policy under which it does, and its clock.

    Every verifier takes this object, and it cannot be made without saying which policy applies:
    None is for keys that come without one, as files of keys do. ``at`` is the time of the
    verification; by default it is the clock's.
    """

    keys: tuple[PublicKey, ...]
    policy: TrustPolicy | None
    at: datetime | None = None

    def __post_init__(self) -> None:
        if not all(isinstance(key, PublicKey) for key in self.keys):
            raise TypeError("keys has an item that is no PublicKey")
        policy: object = self.policy
        if not isinstance(policy, TrustPolicy | None):
            raise TypeError("policy is no TrustPolicy, nor None, which says that there is none")

    def key(self, key_id: str) -> PublicKey | None:
        """Return the trusted key with the id, or None."""
        return by_id(self.keys).get(key_id)

    def now(self) -> datetime:
        """Return the time of the verification."""
        return self.at or datetime.now(UTC)

    def for_past_use(self) -> TrustedKeys:
        """Return the same trust for a use in the past, of which the checkpoint may be old."""
        policy = None if self.policy is None else self.policy.for_past_use()
        return replace(self, policy=policy)


@dataclass(frozen=True, slots=True)
class TrustRoot:
    """The options of the command line: files of keys, or keysets with a trusted root.

    ``trust`` is the file of a trust policy, which replaces that of the keyset. Keysets ``within`` a
    folder of somebody else must be regular files that lie in it, with no link that leads out.
    """

    keys: Sequence[Path] | None
    keysets: Sequence[Path] | None = None
    root: Path | None = None
    trust: Path | None = None
    within: Path | None = None

    def load(self) -> TrustedKeys:
        """Return the trusted keys under the trust policy given, or that of their keyset.

        Raises ``KeyFailure`` for files that cannot be used, and ``VerificationError`` of the step
        that looks for the key if the keyset is not accepted.
        """
        if bool(self.keysets) != (self.root is not None):
            raise KeyFailure(
                "--keyset and --root go together: the keyset, and the roots that you trust or "
                "the keyset that you saw last."
            )
        if self.root is not None and self.keys:
            raise KeyFailure("give --keys or --keyset, not both.")
        if self.root is not None:
            policy, keyset = read_trust_policy(self.trust), self._accepted(self.root)
            return TrustedKeys(keyset.public_keys(), policy or keyset.trust)
        if not self.keys:
            return TrustedKeys(
                KeyStore(home() / "keys").public_keys(), read_trust_policy(self.trust)
            )
        trusted: dict[str, PublicKey] = {}
        for key in (key for file in self.keys for key in read_public_keys(file)):
            if trusted.setdefault(key.key_id, key) != key:
                raise KeyFailure(
                    f"--keys has two records of the key {key.key_id[:16]}, which differ; give only "
                    "the newest."
                )
        return TrustedKeys(tuple(trusted.values()), read_trust_policy(self.trust))

    def arguments(self) -> tuple[str, ...]:
        """Return the same options for the command line of another program."""
        return (
            *(f"--keys={path.resolve()}" for path in self.keys or ()),
            *(f"--keyset={path.resolve()}" for path in self.keysets or ()),
            *(f"--root={path.resolve()}" for path in (self.root,) if path),
            *(f"--trust={path.resolve()}" for path in (self.trust,) if path),
        )

    def _accepted(self, root: Path) -> Keyset:
        try:
            chain = [read_keyset(_read(path, self.within)) for path in self.keysets or ()]
            anchor = read_anchor(_read(root))
            store = _store_of(anchor)
            seen = _load_seen(store)
            keyset = accept_keyset(chain, anchor, datetime.now(UTC), seen)
            if seen is None or seen.keyset.version < keyset.version:
                _save_seen(store, chain[-1])
            return keyset
        except KeysetError as error:
            raise VerificationError(KEY_STEP, error.code, error.message, error.remedy) from None


def trusted_or_own(trusted: TrustedKeys | None) -> TrustedKeys:
    """Return ``trusted``, or by default the keys of the key directory, which have no policy.

    Raises ``TypeError`` for anything else, such as bare public keys, and ``KeyFailure``.
    """
    if trusted is None:
        return TrustRoot(None).load()
    if not isinstance(trusted, TrustedKeys):
        raise TypeError(
            f"trusted is {type(trusted).__name__}, which does not say under which policy keys are "
            "trusted. Make it with affidavit.keys.trusted(...)."
        )
    return trusted


def read_trust_policy(path: Path | None) -> TrustPolicy | None:
    """Read the trust policy in a file, if one is named; raises ``KeyFailure``."""
    try:
        return None if path is None else parse_trust_policy(_read(path))
    except BadTrustPolicy as error:
        raise KeyFailure(f"{path} is not a trust policy: {error}.") from None


def _read(path: Path, within: Path | None = None) -> bytes:
    try:
        if within is not None:
            return read_inside(path, within, MAX_BYTES)
        return read_limited(path)
    except OSError as error:
        raise KeyFailure(f"{path} cannot be read: {error.strerror}.") from None


Anchor = Roots | SignedKeyset
"""The trusted starting point: root keys, or the last accepted keyset."""


def _store_of(anchor: Anchor) -> Path:
    """Return the file of the newest keyset that was accepted from these roots."""
    roots = anchor if isinstance(anchor, Roots) else anchor.keyset.roots
    digest = hashlib.sha256(canonical_json(roots.model_dump(mode="json"))).hexdigest()
    return home() / "keysets" / f"{digest}.json"


def _load_seen(store: Path) -> SignedKeyset | None:
    try:
        return read_keyset(store.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeysetError) as error:
        raise KeyFailure(
            f"{store} cannot be read ({error}): it is needed to detect a keyset that was rolled "
            "back. Restore it, or move it away to start over."
        ) from None


def _save_seen(store: Path, keyset: SignedKeyset) -> None:
    try:
        with locked(store):
            # Another process may have accepted a newer one meanwhile.
            seen = _load_seen(store)
            if seen is None or seen.keyset.version < keyset.keyset.version:
                write_atomically(store, keyset.as_bytes())
    except OSError as error:
        log.warning("cannot write %s (%s): an older keyset will be accepted", store, error)


def accept_keyset(
    chain: Sequence[SignedKeyset],
    anchor: Anchor | None,
    now: datetime,
    seen: SignedKeyset | None = None,
) -> Keyset:
    """Return the last keyset of ``chain``, in which each keyset makes the next one trusted.

    ``anchor`` is None for the very first keyset, which only its own roots sign. ``seen`` is the
    newest keyset that was accepted from the anchor and replaces it. Raises ``KeysetError``.
    """
    if seen is not None:
        recent = [item for item in chain if item.keyset.version >= seen.keyset.version]
        if not recent:
            _require_newer(chain[-1], seen)
        chain, anchor = recent, seen
    for candidate in chain:
        check_keyset(candidate, anchor)
        anchor = candidate
    keyset = chain[-1].keyset
    _require_current(keyset, now)
    return keyset


def check_keyset(candidate: SignedKeyset, anchor: Anchor | None) -> None:
    """Check a keyset against the trusted ``anchor``, except for the dates.

    Raises ``KeysetError``: ``keyset_unsigned``, ``keyset_untrusted``, ``keyset_rollback``,
    ``keyset_fork`` or ``keyset_unrevoked``.
    """
    if not candidate.keyset.roots.accept(candidate.envelope):
        raise KeysetError(
            "keyset_unsigned",
            f"fewer than {candidate.keyset.roots.threshold} of its own root keys "
            "signed the keyset.",
            "Have it signed by more of them: affidavit keyset sign.",
        )
    if anchor is None:
        return
    trusted = anchor if isinstance(anchor, Roots) else anchor.keyset.roots
    if not trusted.accept(candidate.envelope):
        raise KeysetError(
            "keyset_untrusted",
            f"fewer than {trusted.threshold} of the root keys that you trust signed the keyset.",
            "If the roots changed in between, give the versions between, oldest first.",
        )
    if isinstance(anchor, SignedKeyset):
        _require_newer(candidate, anchor)


def _require_newer(candidate: SignedKeyset, last: SignedKeyset) -> None:
    version, known = candidate.keyset.version, last.keyset.version
    if version < known:
        raise KeysetError(
            "keyset_rollback",
            f"the keyset is version {version}, older than version {known}, which you have seen.",
            "Fetch the newest; if this is the newest one offered, a revocation is being hidden.",
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


def _require_current(keyset: Keyset, now: datetime) -> None:
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
    """Parse the trusted roots, or the keyset seen last; raises ``KeysetError``."""
    try:
        document = load_json(raw).data
    except MalformedPlan as error:
        raise KeysetError(
            "roots_malformed", error.reasons[0].message, "Give the roots, or a keyset."
        ) from None
    if isinstance(document, dict) and "payloadType" in document:
        return read_keyset(raw)
    return read_model(Roots, document)
