"""Verification in numbered steps, offline, of the bytes that were signed.

1. size and form: at most 8 MiB of strict JSON with exactly the fields of a bundle
2. payload type: an in-toto statement
3. key: the signature names a key that the verifier trusts
4. signature: it is that key's, over the payload as signed
5. statement: version, predicate, subject and every critical field are understood
6. key window: the certificate was issued while the key could sign; if the key was revoked later,
   witnesses or authorities must have seen the certificate in the log before
7. plan: the subject is the plan in the statement, and the verifier's plan if one is given; the
   guarantee has the plan's neighbours and noise, and meets its target
8. accountants and policy: as the verifier requires
9. validity: the current time lies between the certificate's dates
10. inclusion: the certificate's leaf is in the log's tree, at the given index
11. checkpoint: a trusted key signed that tree's root for the log, inside its window and not before
    the certificate was issued
12. consistency: the log only grew since the verifier last saw it
13. status: it has the required approvals and is not in the current status list

Each step raises ``VerificationError`` with its number and code; there is no boolean to forget. A
verified certificate may still be a refusal: read its verdict. A bundle made offline was never
logged: steps 10 to 12 are then listed as unchecked, unless the verifier requires them. So is
revocation without a status list.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from affidavit.certificate.issuance import (
    BUNDLE_TYPE,
    CRITICAL,
    PREDICATE_TYPE,
    follows_from_plan,
    is_readable,
)
from affidavit.certificate.policy.evaluation import policy_floor
from affidavit.certificate.policy.rules import at_least
from affidavit.certificate.verification import inclusion_verification as log_steps
from affidavit.certificate.verification.status_list import check_status
from affidavit.certificate.verification.verification_result import (
    VerificationOptions,
    VerifiedCertificate,
    Verifier,
)
from affidavit.plan import MalformedPlan, Plan, digest, digest_of, load_json
from affidavit.trust import (
    STEPS,
    BadEnvelope,
    KeyRole,
    PublicKey,
    TrustedKeys,
    TrustPolicy,
    VerificationError,
    format_instant,
    parse_instant,
    read_envelope,
)
from affidavit.trust.dates import DateFault, end_of_validity, fault_of_signature, fault_of_use
from affidavit.trust.dsse import (
    PAYLOAD_TYPE,
    STATEMENT_TYPE,
    Envelope,
    in_toto,
)
from affidavit.trust.log import (
    BadLogPart,
    Inclusion,
    read_inclusion,
)

MAX_BUNDLE_BYTES = 8 * 1024 * 1024
"""Enough for the certificate of a plan of the largest size."""


def verify(
    bundle: bytes,
    trusted: TrustedKeys,
    *,
    plan: Plan | None = None,
    options: VerificationOptions | None = None,
) -> VerifiedCertificate:
    """Check ``bundle`` against ``trusted`` keys, under their policy, and a plan if there is one.

    Raises ``VerificationError``.
    """
    options = options or VerificationOptions()
    verifier = Verifier(trusted, options, trusted.now())
    report = _Report()
    envelope, log = _read_bundle(bundle)
    report.add(1, f"{len(bundle)} bytes")
    if envelope.payload_type != PAYLOAD_TYPE:
        raise VerificationError(
            2,
            "bad_payload_type",
            "the envelope does not contain an in-toto statement.",
            "Fetch the bundle again.",
        )
    report.add(2, envelope.payload_type)
    key = _find_key(envelope, verifier)
    report.add(3, key.key_id[:16])
    _check_signature(envelope, key, verifier)
    report.add(4, "Ed25519 over the payload as signed")
    statement = _read_statement(envelope)
    predicate = statement["predicate"]
    report.add(5, f"verdict {predicate['verdict']}")
    not_before, not_after = _read_dates(predicate)
    attestation = log_steps.find_attestation(None if log is None else log.checkpoint, verifier)
    _check_key_window(key, not_before, log, attestation, verifier)
    report.add(6, f"issued {predicate['validity']['not_before']}")
    subject = _check_plan(statement, plan)
    report.add(7, subject + ("" if plan is not None else " (no plan given to compare)"))
    report.add(8, _check_requirements(predicate, options))
    not_after = _check_validity(key, not_before, not_after, options.used_at or verifier.now)
    report.add(9, f"until {format_instant(not_after)}")
    last_checkpoint = _check_log(
        envelope, statement, log, attestation, verifier, report, issued_at=not_before
    )
    status = check_status(envelope, predicate, verifier)
    report.add(13, status.detail, is_checked=status.is_checked)
    if last_checkpoint is not None and options.remember is not None:
        options.remember(last_checkpoint)
    return VerifiedCertificate(
        statement=statement,
        steps=tuple(report.steps),
        unchecked=tuple(report.unchecked),
        checkpoint=last_checkpoint,
    )


class _Report:
    """The results of the steps, in order."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, str, str]] = []
        self.unchecked: list[int] = []

    def add(self, step: int, detail: str, *, is_checked: bool = True) -> None:
        self.steps.append((step, STEPS[step - 1], detail))
        if not is_checked:
            self.unchecked.append(step)


def _read_bundle(bundle: bytes) -> tuple[Envelope, Inclusion | None]:
    remedy = "Fetch the bundle again; it must be stored as it was sent."
    try:
        document = load_json(bundle, MAX_BUNDLE_BYTES).data
    except MalformedPlan as error:
        raise VerificationError(1, "bad_form", error.reasons[0].message, remedy) from None
    required = {"bundleType", "envelope"}
    if not isinstance(document, dict) or not required <= document.keys() <= required | {"log"}:
        raise VerificationError(1, "bad_form", "this is not a certificate bundle.", remedy)
    if document["bundleType"] != BUNDLE_TYPE:
        raise VerificationError(
            1,
            "bad_form",
            "the bundle has a different type or version.",
            "Verify it with the release that wrote it, or a later one.",
        )
    try:
        envelope = read_envelope(document["envelope"])
        return envelope, read_inclusion(document["log"]) if "log" in document else None
    except BadEnvelope as error:
        raise VerificationError(1, "bad_form", f"{error}.", remedy) from None
    except BadLogPart as error:
        raise VerificationError(1, "bad_log_part", f"its log part: {error}.", remedy) from None


def _find_key(envelope: Envelope, verifier: Verifier) -> PublicKey:
    key = verifier.trusted.key(envelope.key_id)
    if key is None:
        _require_named_signer(3, envelope, verifier)
        raise VerificationError(
            3,
            "unknown_key",
            f"the key {envelope.key_id[:16]!r} is not trusted.",
            "Get the issuer's keys (GET /v1/keys) over a channel you trust and pass --keys.",
        )
    if key.development:
        raise VerificationError(
            3,
            "untrusted_key",
            "it was signed with a development key, which nobody vouches for.",
            "Have it issued by a service that has a signing key (affidavit keys new).",
        )
    if not key.has_role(KeyRole.CERTIFICATE):
        raise VerificationError(
            3,
            "key_outside_role",
            f"the key {key.key_id[:16]!r} is for {', '.join(sorted(key.roles or ()))}, "
            "not for certificates.",
            "Do not use the certificate; tell the issuer that this key signed one.",
        )
    return key


def _require_named_signer(step: int, envelope: Envelope, verifier: Verifier) -> None:
    """Raise if another trusted key made the signature than the envelope names."""
    for key in verifier.trusted.keys:
        if key.accepts(envelope.signature, envelope.signed_bytes):
            raise VerificationError(
                step,
                "wrong_key_id",
                f"it names the key {envelope.key_id[:16]!r} and was signed by "
                f"{key.key_id[:16]!r}, which you trust.",
                "The key id was changed after it was signed; fetch it again.",
            )


def _check_signature(envelope: Envelope, key: PublicKey, verifier: Verifier) -> None:
    if not key.accepts(envelope.signature, envelope.signed_bytes):
        _require_named_signer(4, envelope, verifier)
        raise VerificationError(
            4,
            "bad_signature",
            "the signature does not match the statement.",
            "The bundle was changed after it was signed; fetch it again.",
        )


def _read_statement(envelope: Envelope) -> dict[str, Any]:
    remedy = "Verify it with a release that knows this kind of certificate."
    try:
        document = load_json(envelope.payload, MAX_BUNDLE_BYTES).data
    except MalformedPlan as error:
        raise VerificationError(5, "bad_statement", error.reasons[0].message, remedy) from None
    if (
        not isinstance(document, dict)
        or document.get("_type") != STATEMENT_TYPE
        or document.get("predicateType") != PREDICATE_TYPE
        or not isinstance(document.get("predicate"), dict)
    ):
        raise VerificationError(5, "bad_statement", "this is not a certificate.", remedy)
    predicate = document["predicate"]
    critical = predicate.get("critical")
    if not isinstance(critical, list) or not all(name in CRITICAL for name in critical):
        raise VerificationError(
            5,
            "unknown_critical_field",
            "it has critical fields that this release does not support.",
            remedy,
        )
    missing = [name for name in (*CRITICAL, "plan", "certificate_id") if name not in predicate]
    if missing:
        raise VerificationError(
            5, "bad_statement", f"the statement lacks {', '.join(missing)}.", remedy
        )
    if not is_readable(predicate):
        message = "its verdict, guarantee or requester is not that of a certificate."
        raise VerificationError(5, "bad_statement", message, remedy)
    return document


def _read_dates(predicate: dict[str, Any]) -> tuple[datetime, datetime]:
    try:
        validity = predicate["validity"]
        return parse_instant(validity["not_before"]), parse_instant(validity["not_after"])
    except (KeyError, TypeError, ValueError):
        raise VerificationError(
            5, "bad_statement", "the statement's dates cannot be read.", "Ask for a new one."
        ) from None


def _check_key_window(
    key: PublicKey,
    issued_at: datetime,
    log: Inclusion | None,
    attestation: log_steps.Attestation | None,
    verifier: Verifier,
) -> None:
    revoked = "" if key.revoked_from is None else f"{key.revoked_from:%Y-%m-%d %H:%M:%S}Z"
    # Step 9 compares the date of the certificate with the clock.
    fault = fault_of_signature(key, issued_at, now=max(issued_at, verifier.now))
    if fault is DateFault.REVOKED:
        raise VerificationError(
            6,
            "key_revoked",
            f"its key was revoked from {revoked} on, and it was issued after that.",
            "Ask for a certificate signed by a current key, and why the key was revoked.",
        )
    if fault is DateFault.REVOKED_SINCE:
        seen = _seen_before(key, revoked, issued_at, log, attestation, verifier.policy)
        fault = fault_of_signature(key, issued_at, now=verifier.now, seen=seen)
        if fault is DateFault.REVOKED_SINCE:
            raise VerificationError(
                6,
                "key_revoked",
                f"its key was revoked from {revoked} on, and others saw it in the log only at "
                f"{seen:%Y-%m-%d %H:%M:%S}Z.",
                "Certify the plan again.",
            )
    if fault is DateFault.OUTSIDE_WINDOW:
        raise VerificationError(
            6,
            "key_outside_window",
            "its key was not allowed to sign when it was issued.",
            "Ask for a certificate signed by a current key.",
        )


def _seen_before(
    key: PublicKey,
    revoked: str,
    issued_at: datetime,
    log: Inclusion | None,
    attestation: log_steps.Attestation | None,
    trust: TrustPolicy | None,
) -> datetime:
    """Return when others saw the certificate of a key that was revoked after its date.

    If the policy names attestors, or the key has roles, they must attest it; step 10 checks that
    the attested log contains the certificate. For a key with every role a log that another key
    signed suffices (step 11), and its own date counts.
    """
    needs_attestation = key.roles is not None or bool(trust and trust.has_attestors)
    if log is not None and not needs_attestation:
        return issued_at
    if log is None or attestation is None:
        raise VerificationError(
            6,
            "key_revoked",
            f"its key was revoked from {revoked} on, and that it was issued before is attested "
            f"only by that key{'' if log is None else ' and the log'}.",
            "Fetch its bundle from the service again: with the log's checkpoint of then, and the "
            "cosignatures or timestamps that your trust policy names (--trust), it shows that it "
            "is not backdated. Or certify the plan again.",
        )
    return attestation[0]


def _check_plan(statement: dict[str, Any], plan: Plan | None) -> str:
    predicate = statement["predicate"]
    carried = digest_of(predicate["plan"])
    subject = {"plan": carried.removeprefix("sha256:")}
    if statement.get("subject") != in_toto(subject, PREDICATE_TYPE, predicate)["subject"]:
        raise VerificationError(
            7,
            "bad_subject",
            "its subject does not match the plan in the statement.",
            "Ask for a new certificate.",
        )
    if not follows_from_plan(predicate):
        raise VerificationError(
            7,
            "bad_statement",
            "its guarantee or joint noise multiplier is not one that its plan can have.",
            "Do not use the certificate; tell the issuer that this key signed one.",
        )
    if plan is not None and digest(plan) != carried:
        raise VerificationError(
            7,
            "other_plan",
            f"it is about another plan, {carried[:23]}…; your plan is {digest(plan)[:23]}….",
            "Certify your plan, or compare it with the certified one.",
        )
    return carried


def _check_requirements(predicate: dict[str, Any], options: VerificationOptions) -> str:
    """Check the versions of the accountants and the policy (step 8)."""
    try:
        versions = {str(item["name"]): str(item["version"]) for item in predicate["engines"]}
    except (KeyError, TypeError):
        versions = {}
    for name, lowest in options.accountants.items():
        version = versions.get(name)
        if version is None or not at_least(version, lowest):
            raise VerificationError(
                8,
                "old_accountant",
                f"it was accounted by a release with {name} {version or 'missing'}; "
                f"you ask for {lowest} or later.",
                "Certify the plan again with a newer release.",
            )
    policy = predicate.get("policy")
    accepted = policy.get("digest") if isinstance(policy, dict) else None
    if options.policies and accepted not in options.policies:
        raise VerificationError(
            8,
            "other_policy",
            f"it was issued under the policy {str(accepted)[:23]}…, which you do not accept.",
            "Certify the plan under a policy that you accept.",
        )
    for floor in options.floors:
        for reason in policy_floor(predicate, floor):
            raise VerificationError(
                8, "below_policy", f"{reason.code}: {reason.message}", reason.remedy
            )
    if not options.accountants and not options.policies and not options.floors:
        return "no minimum version or policy required"
    return "as required"


def _check_validity(
    key: PublicKey, not_before: datetime, not_after: datetime, now: datetime
) -> datetime:
    """Return the end of the validity, no later than the window of a key with roles (step 9)."""
    end = end_of_validity(key, not_after)
    fault = fault_of_use(now, not_before, end)
    if fault is DateFault.NOT_YET:
        raise VerificationError(
            9, "not_yet_valid", "it is not valid yet.", "Check this machine's clock."
        )
    if fault is not None:
        raise VerificationError(
            9,
            "expired",
            f"it has expired{'' if end == not_after else ' with the window of its key'}.",
            "Certify the plan again.",
        )
    return end


def _check_log(
    envelope: Envelope,
    statement: dict[str, Any],
    log: Inclusion | None,
    attestation: log_steps.Attestation | None,
    verifier: Verifier,
    report: _Report,
    *,
    issued_at: datetime,
) -> str | None:
    """Perform steps 10 to 12; return the checkpoint to store as the last one seen, or None."""
    if log is None:
        log_steps.require_logged(verifier)
        for step in (10, 11, 12):
            report.add(step, "not logged: the bundle has no log proof", is_checked=False)
        return None
    checkpoint = log_steps.check_inclusion(envelope, statement, log)
    report.add(10, f"leaf {log.leaf_index} of {checkpoint.size}")
    key = log_steps.check_signature(log.checkpoint, attestation, verifier, issued_at=issued_at)
    signer = verifier.trusted.key(envelope.key_id)
    may_be_old = signer is not None and signer.revoked_at(verifier.now)
    witnesses = log_steps.check_trust_policy(
        checkpoint, attestation, verifier, may_be_old=may_be_old
    )
    report.add(11, f"{checkpoint.origin}, key {key.key_id[:16]}{witnesses}")
    consistency = log_steps.check_consistency(checkpoint, verifier)
    report.add(12, consistency.detail, is_checked=consistency.is_checked)
    return log.checkpoint if consistency.is_newest else None
