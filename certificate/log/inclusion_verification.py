"""Steps 10 to 12 of verification: inclusion, checkpoint and consistency.

The proof leads from the certificate's own signed bytes to a root hash, the checkpoint's
signature says that the log vouches for that root, and consistency says that the log was
not rolled back or forked since the verifier last saw it. Only the last of these needs
memory, and only it catches an operator who shows different logs to different people.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from affidavit.certificate.dsse import Envelope
from affidavit.certificate.keys.key import PublicKey
from affidavit.certificate.log.entry import Inclusion, certificate_entry
from affidavit.certificate.log.note import (
    BadNote,
    Checkpoint,
    UnknownSigner,
    open_checkpoint,
    read_checkpoint,
)
from affidavit.certificate.log.tree import ProofError, verify_consistency, verify_inclusion
from affidavit.certificate.verification.trust_policy import AHEAD, TrustPolicy
from affidavit.certificate.verification.verification_result import (
    SeenCheckpoint,
    VerificationError,
    VerificationOptions,
    Verifier,
)


def require_logged(options: VerificationOptions) -> None:
    """Reject a bundle without a log part where the verifier asks for one."""
    if options.require_log or options.trust is not None:
        raise VerificationError(
            10,
            "not_logged",
            "the bundle does not give the certificate's place in a log.",
            "Fetch it from the service, which adds the proof within seconds of issuing it.",
        )


def cosigned(note: str | None, verifier: Verifier) -> tuple[datetime, datetime] | None:
    """When enough witnesses cosigned or an authority stamped it, first and last; None if never.

    Raises ``VerificationError`` of step 11.
    """
    trust = verifier.options.trust
    if note is None or trust is None:
        return None
    if (name := trust.dependent(verifier.trusted)) is not None:
        raise VerificationError(
            11,
            "witness_not_independent",
            f"the witness {name} has a key of the log that it witnesses.",
            "Name witnesses that others run.",
        )
    try:
        return trust.seen(note, verifier.now)
    except BadNote as error:
        raise _unsigned("bad_cosignature", f"{error}.") from None
    except ModuleNotFoundError:
        raise VerificationError(
            11,
            "timestamps_unchecked",
            "the trust policy relies on timestamps, but their package is not installed.",
            "Run: pip install 'affidavit[timestamps]'",
        ) from None


def require_trusted(
    checkpoint: Checkpoint,
    cosigned: tuple[datetime, datetime] | None,
    verifier: Verifier,
    *,
    dated: bool,
) -> str:
    """Step 11 under a trust policy: its log, witnessed, and fresh; says what was seen.

    ``dated`` is for a certificate whose key was revoked since: its checkpoint is to be old. Raises
    ``VerificationError`` of that step.
    """
    trust = verifier.options.trust
    if trust is None:
        return ""
    _require_origin(checkpoint, trust.origin)
    if trust.dated_by_others and cosigned is None:
        raise VerificationError(
            11,
            "not_witnessed",
            _unseen(trust),
            "Fetch the bundle again in a minute; if it stays so, ask the log's operator and the "
            "witnesses what they saw.",
        )
    # Without witnesses it is as fresh as its own key says: an old one can be stamped today.
    last = cosigned[1] if cosigned and trust.witnesses is not None else checkpoint.signed_at
    hours = trust.freshness.checkpoint_hours
    if not dated and last is not None and trust.stale(hours, last, verifier.now):
        raise VerificationError(
            11,
            "stale_checkpoint",
            f"the checkpoint is from {last:%Y-%m-%d %H:%M:%S}Z, older than {hours} hours.",
            "Fetch the bundle again.",
        )
    if cosigned is None:
        return ""
    if trust.witnesses is not None:
        return f", {trust.witnesses.threshold} or more witnesses"
    return f", stamped at {cosigned[0]:%Y-%m-%d %H:%M:%S}Z"


def _require_origin(checkpoint: Checkpoint, origin: str | None) -> None:
    if origin not in (None, checkpoint.origin):
        raise VerificationError(
            11,
            "wrong_origin",
            f"the checkpoint is of the log {checkpoint.origin!r}, not of {origin!r}.",
            "Ask for a bundle of the log that you follow.",
        )


def _unseen(trust: TrustPolicy) -> str:
    witnesses = trust.witnesses
    if witnesses is None:
        return "no authority that you trust stamped the checkpoint."
    return (
        f"fewer than {witnesses.threshold} of the {len(witnesses.keys)} witnesses that you trust "
        "cosigned the checkpoint."
    )


def included(envelope: Envelope, statement: dict[str, Any], part: Inclusion) -> Checkpoint:
    """Step 10: the certificate's leaf is in the tree of the checkpoint, which is returned.

    Raises ``VerificationError`` of that step.
    """
    remedy = "Fetch the bundle again; if it stays so, ask the log's operator."
    try:
        checkpoint = read_checkpoint(part.checkpoint)
    except BadNote as error:
        raise VerificationError(10, "bad_checkpoint", f"{error}.", remedy) from None
    if part.tree_size not in (None, checkpoint.size):
        raise VerificationError(
            10, "bad_tree_size", "the tree size does not match the checkpoint.", remedy
        )
    try:
        leaf = certificate_entry(envelope, statement).leaf_hash
    except (KeyError, TypeError, ValueError, AttributeError):
        raise VerificationError(
            10, "bad_leaf", "the statement lacks fields that its log entry needs.", remedy
        ) from None
    try:
        verify_inclusion(
            leaf,
            index=part.leaf_index,
            size=checkpoint.size,
            proof=part.proof,
            root=checkpoint.root_hash,
        )
    except ProofError as error:
        raise VerificationError(
            10, "not_included", f"the certificate is not in the log: {error}.", remedy
        ) from None
    return checkpoint


def signed(note: str, cosigned: tuple[datetime, datetime] | None, verifier: Verifier) -> PublicKey:
    """Step 11: a trusted key signed the checkpoint inside its window; that key.

    A key that is revoked by now does not count, whatever date it signed, unless witnesses
    cosigned the checkpoint before that. Raises ``VerificationError`` of that step.
    """
    now = verifier.now
    try:
        checkpoint, signers = open_checkpoint(note, verifier.trusted)
        at = checkpoint.signed_at
    except UnknownSigner:
        raise _unsigned(
            "unknown_checkpoint_key", "it was not signed by a key that you trust for checkpoints."
        ) from None
    except BadNote as error:
        raise _unsigned("bad_checkpoint_signature", f"{error}.") from None
    _require_origin(checkpoint, verifier.options.log_origin)
    if at is None:
        raise _unsigned("undated_checkpoint", "the checkpoint does not say when it was signed.")
    keys = [signer for signer in signers if not signer.development]
    if not keys:
        raise _unsigned("untrusted_checkpoint_key", "a development key signed the checkpoint.")
    for key in keys:
        seen = now if cosigned is None else cosigned[0]
        if key.covers(at) and not key.revoked_at(seen):
            _require_past(at, now)
            return key
    if any(key.revoked_at(now) for key in keys):
        raise _unsigned(
            "checkpoint_key_revoked", "the checkpoint's key is revoked, so its date proves nothing."
        )
    raise _unsigned(
        "checkpoint_key_outside_window",
        "the checkpoint's key was not allowed to sign at that time.",
    )


def _require_past(at: datetime, now: datetime) -> None:
    if at > now + AHEAD:
        raise VerificationError(
            11,
            "checkpoint_not_yet",
            f"the checkpoint is dated {at:%Y-%m-%d %H:%M:%S}Z, which is in the future.",
            "Check this machine's clock; if it is right, ask the log's operator.",
        )


class Link(NamedTuple):
    """What step 12 found: what to say, whether it was checked, whether to keep it as seen."""

    detail: str
    checked: bool
    keep: bool


def consistent(checkpoint: Checkpoint, verifier: Verifier) -> Link:
    """Step 12: the checkpoint and the last one seen of its log are of one growing tree.

    One that was seen only after its key was revoked binds nobody: a thief may have signed it.
    """
    options = verifier.options
    seen = options.seen.get(checkpoint.origin)
    if seen is None:
        return Link(f"the first checkpoint of {checkpoint.origin} seen here", True, True)
    last = _last(seen.note, checkpoint.origin)
    if _revoked_when_seen(seen, verifier):
        return Link("the key of the checkpoint seen before was revoked", True, True)
    older, newer = sorted((last, checkpoint), key=lambda item: item.size)
    if older.size > 0:
        hashes: tuple[bytes, ...] = ()
        if older.size != newer.size:
            proof = options.consistency
            if proof is None or (proof.first, proof.second) != (older.size, newer.size):
                if options.trust is not None and options.trust.witnesses is not None:
                    grew = checkpoint.size >= last.size
                    return Link("the witnesses saw that the log only grew", True, grew)
                return Link(_unlinked(older, newer, options), False, False)
            hashes = proof.hashes
        _require_consistency(older, newer, hashes)
    grew = checkpoint.size >= last.size
    relation = "continues" if grew else "is continued by"
    return Link(f"{relation} the checkpoint of size {last.size} seen before", True, grew)


def _revoked_when_seen(seen: SeenCheckpoint, verifier: Verifier) -> bool:
    trust, now = verifier.options.trust, verifier.now
    try:
        _, signers = open_checkpoint(seen.note, verifier.trusted)
        cosigned = None if trust is None else trust.seen(seen.note, now)
    except (BadNote, ModuleNotFoundError):
        return False
    at = min(seen.at or now, now if cosigned is None else cosigned[0])
    return all(key.revoked_at(at) for key in signers)


def _last(note: str, origin: str) -> Checkpoint:
    try:
        last = read_checkpoint(note)
    except BadNote as error:
        raise _inconsistent("bad_seen_checkpoint", f"the last checkpoint seen: {error}.") from None
    if last.origin != origin:
        raise _inconsistent("bad_seen_checkpoint", "the last checkpoint seen is of another log.")
    return last


def _require_consistency(older: Checkpoint, newer: Checkpoint, hashes: tuple[bytes, ...]) -> None:
    try:
        verify_consistency(
            first=older.size,
            second=newer.size,
            first_root=older.root_hash,
            second_root=newer.root_hash,
            proof=hashes,
        )
    except ProofError as error:
        raise _inconsistent(
            "log_rewritten", f"the log was rolled back or forked after you last saw it: {error}."
        ) from None


def _unlinked(older: Checkpoint, newer: Checkpoint, options: VerificationOptions) -> str:
    where = f"/v1/log/proof/consistency?first={older.size}&second={newer.size}"
    if options.require_log:
        raise VerificationError(
            12,
            "consistency_unproved",
            f"no proof links log size {older.size} to size {newer.size}.",
            f"Pass --consistency with the answer of GET {where}.",
        )
    return f"not checked: pass --consistency with the answer of GET {where}"


def _unsigned(code: str, message: str) -> VerificationError:
    return VerificationError(
        11, code, message, "Get the log's keys over a channel you trust, or a newer bundle."
    )


def _inconsistent(code: str, message: str) -> VerificationError:
    return VerificationError(
        12,
        code,
        message,
        "Keep both checkpoints: together they are the evidence. Do not rely on this log.",
    )
