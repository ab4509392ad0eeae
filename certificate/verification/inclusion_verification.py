"""Steps 10 to 12 of verification: inclusion, checkpoint and consistency.

The proof leads from the certificate's signed bytes to a root hash, the checkpoint's signature shows
that the log vouches for that root, and consistency shows that the log was not rolled back or forked
since the verifier last saw it. Only the last step needs stored state, and only it detects an
operator who shows different logs to different people.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from affidavit.certificate.verification.verification_result import (
    SeenCheckpoint,
    VerificationOptions,
    Verifier,
)
from affidavit.trust import PublicKey, VerificationError
from affidavit.trust.dates import DateFault, fault_of_signature, is_ahead, is_stale
from affidavit.trust.dsse import Envelope
from affidavit.trust.log import (
    BadNote,
    Checkpoint,
    Inclusion,
    certificate_entry,
    merkle_tree,
    open_checkpoint,
    read_checkpoint,
)
from affidavit.trust.log.note import UnknownSigner

Attestation = tuple[datetime, datetime]
"""When others first and last saw a checkpoint: witnesses or time-stamping authorities."""


def require_logged(verifier: Verifier) -> None:
    """Reject a bundle without a log part if the verifier requires one."""
    if verifier.options.require_log or verifier.policy is not None:
        raise VerificationError(
            10,
            "not_logged",
            "the bundle does not give the certificate's place in a log.",
            "Fetch it from the service, which adds the proof within seconds of issuing it.",
        )


def find_attestation(note: str | None, verifier: Verifier) -> Attestation | None:
    """Return when enough witnesses or an authority saw the checkpoint, or None.

    Raises ``VerificationError`` of step 11.
    """
    trust = verifier.policy
    if note is None or trust is None:
        return None
    if (name := trust.dependent_witness(verifier.trusted.keys)) is not None:
        raise VerificationError(
            11,
            "witness_not_independent",
            f"the witness {name} has a key of the log that it witnesses.",
            "Name witnesses that others run.",
        )
    try:
        return trust.attested(note, verifier.now)
    except BadNote as error:
        raise _unsigned("bad_cosignature", f"{error}.") from None
    except ModuleNotFoundError:
        raise VerificationError(
            11,
            "timestamps_unchecked",
            "the trust policy relies on timestamps, but their package is not installed.",
            "Run: pip install 'affidavit[timestamps]'",
        ) from None


def check_inclusion(
    envelope: Envelope, statement: dict[str, Any], inclusion: Inclusion
) -> Checkpoint:
    """Check that the certificate's leaf is in the tree of the returned checkpoint (step 10).

    Raises ``VerificationError``.
    """
    remedy = "Fetch the bundle again; if it stays so, ask the log's operator."
    try:
        checkpoint = read_checkpoint(inclusion.checkpoint)
    except BadNote as error:
        raise VerificationError(10, "bad_checkpoint", f"{error}.", remedy) from None
    if inclusion.tree_size not in (None, checkpoint.size):
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
        merkle_tree.verify_inclusion(
            leaf,
            index=inclusion.leaf_index,
            size=checkpoint.size,
            proof=inclusion.proof,
            root=checkpoint.root_hash,
        )
    except merkle_tree.ProofError as error:
        raise VerificationError(
            10, "not_included", f"the certificate is not in the log: {error}.", remedy
        ) from None
    return checkpoint


def check_signature(
    note: str,
    attestation: Attestation | None,
    verifier: Verifier,
    *,
    issued_at: datetime | None,
) -> PublicKey:
    """Return the trusted key that signed the checkpoint inside its window (step 11).

    A checkpoint is signed after what it contains and before now: ``issued_at`` is the date of the
    certificate, or None if there is none. Both orders hold up to ``MAX_CLOCK_SKEW``: a service
    dates its certificates and its checkpoints by the clock of its database, of which each replica
    keeps an estimate, and a database that takes over may be behind.

    The signature of a revoked key is invalid, whatever its date, unless others saw the checkpoint
    before the revocation. Raises ``VerificationError``.
    """
    now = verifier.now
    try:
        checkpoint, signers = open_checkpoint(note, verifier.trusted.keys)
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
    if issued_at is not None and is_ahead(issued_at, at):
        raise VerificationError(
            11,
            "checkpoint_before_certificate",
            f"the checkpoint is dated {at:%Y-%m-%d %H:%M:%S}Z, before the certificate that it "
            f"contains, which was issued at {issued_at:%Y-%m-%d %H:%M:%S}Z.",
            "One of the two dates is false: do not use the certificate, and tell the log's "
            "operator.",
        )
    keys = [signer for signer in signers if not signer.development]
    if not keys:
        raise _unsigned("untrusted_checkpoint_key", "a development key signed the checkpoint.")
    seen = None if attestation is None else attestation[0]
    faults = [fault_of_signature(key, at, now=now, seen=seen) for key in keys]
    if None in faults:
        return keys[faults.index(None)]
    if DateFault.NOT_YET in faults:
        raise VerificationError(
            11,
            "checkpoint_not_yet",
            f"the checkpoint is dated {at:%Y-%m-%d %H:%M:%S}Z, which is in the future.",
            "Check this machine's clock; if it is right, ask the log's operator.",
        )
    if DateFault.REVOKED in faults or DateFault.REVOKED_SINCE in faults:
        raise _unsigned(
            "checkpoint_key_revoked", "the checkpoint's key is revoked, so its date proves nothing."
        )
    raise _unsigned(
        "checkpoint_key_outside_window",
        "the checkpoint's key was not allowed to sign at that time.",
    )


def check_trust_policy(
    checkpoint: Checkpoint,
    attestation: Attestation | None,
    verifier: Verifier,
    *,
    may_be_old: bool,
) -> str:
    """Check log, witnesses and freshness by the trust policy; return a description (step 11).

    ``may_be_old`` is for a certificate whose key was revoked later: it needs an old checkpoint.
    Raises ``VerificationError``.
    """
    trust = verifier.policy
    if trust is None:
        return ""
    _require_origin(checkpoint, trust.origin)
    witnesses = trust.witnesses
    if trust.has_attestors and attestation is None:
        raise VerificationError(
            11,
            "not_witnessed",
            "no authority that you trust stamped the checkpoint."
            if witnesses is None
            else f"fewer than {witnesses.threshold} of the {len(witnesses.keys)} witnesses that "
            "you trust cosigned the checkpoint.",
            "Fetch the bundle again in a minute; if it stays so, ask the log's operator and the "
            "witnesses what they saw.",
        )
    # Without witnesses the log's own date decides: an old checkpoint can be stamped today.
    last = attestation[1] if attestation and witnesses is not None else checkpoint.signed_at
    hours = trust.freshness.checkpoint_hours
    if not may_be_old and last is not None and is_stale(hours, last, verifier.now):
        raise VerificationError(
            11,
            "stale_checkpoint",
            f"the checkpoint is from {last:%Y-%m-%d %H:%M:%S}Z, older than {hours} hours.",
            "Fetch the bundle again.",
        )
    if attestation is None:
        return ""
    if witnesses is not None:
        return f", {witnesses.threshold} or more witnesses"
    return f", stamped at {attestation[0]:%Y-%m-%d %H:%M:%S}Z"


def _require_origin(checkpoint: Checkpoint, origin: str | None) -> None:
    if origin not in (None, checkpoint.origin):
        raise VerificationError(
            11,
            "wrong_origin",
            f"the checkpoint is of the log {checkpoint.origin!r}, not of {origin!r}.",
            "Ask for a bundle of the log that you follow.",
        )


class ConsistencyResult(NamedTuple):
    """The result of step 12; store the checkpoint as the last one seen if ``is_newest``."""

    detail: str
    is_checked: bool
    is_newest: bool


def check_consistency(checkpoint: Checkpoint, verifier: Verifier) -> ConsistencyResult:
    """Check that the checkpoint and the last one seen are of one growing tree (step 12).

    A checkpoint that was first seen after the revocation of its key is ignored: a thief may have
    signed it. Raises ``VerificationError``.
    """
    options = verifier.options
    seen = options.seen.get(checkpoint.origin)
    if seen is None:
        detail = f"the first checkpoint of {checkpoint.origin} seen here"
        return ConsistencyResult(detail, True, True)
    try:
        last = read_checkpoint(seen.note)
    except BadNote as error:
        raise _inconsistent("bad_seen_checkpoint", f"the last checkpoint seen: {error}.") from None
    if last.origin != checkpoint.origin:
        raise _inconsistent("bad_seen_checkpoint", "the last checkpoint seen is of another log.")
    if _was_revoked_when_seen(seen, verifier):
        detail = "the key of the checkpoint seen before was revoked"
        return ConsistencyResult(detail, True, True)
    grew = checkpoint.size >= last.size
    older, newer = (last, checkpoint) if grew else (checkpoint, last)
    if older.size > 0:
        hashes: tuple[bytes, ...] = ()
        if older.size != newer.size:
            proof = options.consistency
            if proof is None or (proof.first, proof.second) != (older.size, newer.size):
                if verifier.policy is not None and verifier.policy.witnesses is not None:
                    detail = "the witnesses saw that the log only grew"
                    return ConsistencyResult(detail, True, grew)
                return ConsistencyResult(_unlinked(older, newer, options), False, False)
            hashes = proof.hashes
        try:
            merkle_tree.verify_consistency(
                first=older.size,
                second=newer.size,
                first_root=older.root_hash,
                second_root=newer.root_hash,
                proof=hashes,
            )
        except merkle_tree.ProofError as error:
            message = f"the log was rolled back or forked after you last saw it: {error}."
            raise _inconsistent("log_rewritten", message) from None
    relation = "continues" if grew else "is continued by"
    detail = f"{relation} the checkpoint of size {last.size} seen before"
    return ConsistencyResult(detail, True, grew)


def _was_revoked_when_seen(seen: SeenCheckpoint, verifier: Verifier) -> bool:
    trust, now = verifier.policy, verifier.now
    try:
        _, signers = open_checkpoint(seen.note, verifier.trusted.keys)
        attestation = None if trust is None else trust.attested(seen.note, now)
    except (BadNote, ModuleNotFoundError):
        return False
    at = min(seen.at or now, now if attestation is None else attestation[0])
    return all(key.revoked_at(at) for key in signers)


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
