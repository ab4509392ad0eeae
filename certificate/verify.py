"""Verification in numbered steps, offline, of the bytes that were signed.

1. size and form: at most 8 MiB of strict JSON with exactly the fields of a bundle
2. payload type: an in-toto statement
3. key: the signature names a key that the verifier trusts
4. signature: it is that key's, over the payload as it stands
5. statement: version, predicate, subject and every critical field are understood
6. key window: the certificate was issued while the key might sign
7. plan: the subject is the plan carried inside, and the plan at hand if one is given
8. validity: now lies between the certificate's dates

Each step raises ``VerificationError`` with its own number and code; there is no boolean
to forget. A verified certificate may still be a refusal: read its verdict.

Not checked yet: inclusion in a transparency log, and revocation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from affidavit.certificate.envelope import PAYLOAD_TYPE, BadEnvelope, Envelope, read_envelope
from affidavit.certificate.issue import BUNDLE_TYPE
from affidavit.certificate.keys import PublicKey, by_id
from affidavit.certificate.statement import (
    CRITICAL,
    PREDICATE_TYPE,
    STATEMENT_TYPE,
    TIME_FORMAT,
)
from affidavit.plan.canonical import digest, digest_of
from affidavit.plan.loading import load_json
from affidavit.plan.model import Plan
from affidavit.plan.reasons import MalformedPlan

STEPS = (
    "size and form",
    "payload type",
    "key",
    "signature",
    "statement",
    "key window",
    "plan",
    "validity",
)


MAX_BUNDLE_BYTES = 8 * 1024 * 1024
"""A plan of the largest size, with what is said about each of its releases, fits."""


class VerificationError(Exception):
    """The step that rejected a bundle, by number, name and code, and what to do."""

    def __init__(self, step: int, code: str, message: str, remedy: str) -> None:
        self.step = step
        self.step_name = STEPS[step - 1]
        self.code = code
        self.message = message
        self.remedy = remedy
        super().__init__(f"step {step} ({self.step_name}): {message} {remedy}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """A bundle that passed every step: its statement and what each step saw."""

    statement: dict[str, Any]
    steps: tuple[tuple[int, str, str], ...]

    @property
    def predicate(self) -> dict[str, Any]:
        """The certificate's content."""
        predicate: dict[str, Any] = self.statement["predicate"]
        return predicate


def verify(
    bundle: bytes,
    trusted: Iterable[PublicKey],
    *,
    plan: Plan | None = None,
    now: datetime | None = None,
) -> Verified:
    """Check ``bundle`` against ``trusted`` keys and, if given, the plan at hand."""
    seen: list[tuple[int, str, str]] = []

    def passed(step: int, detail: str) -> None:
        seen.append((step, STEPS[step - 1], detail))

    envelope = _form(bundle)
    passed(1, f"{len(bundle)} bytes")
    _payload_type(envelope)
    passed(2, envelope.payload_type)
    key = _key(envelope, trusted)
    passed(3, f"key {key.key_id[:16]}")
    _signature(envelope, key)
    passed(4, "Ed25519 over the payload as signed")
    statement = _statement(envelope)
    predicate = statement["predicate"]
    passed(5, f"verdict {predicate['verdict']}")
    not_before, not_after = _dates(predicate)
    _window(key, not_before)
    passed(6, f"issued {predicate['validity']['not_before']}")
    subject = _plan(statement, plan)
    passed(7, subject + ("" if plan is not None else " (no plan at hand to compare)"))
    _validity(not_before, not_after, now or datetime.now(UTC))
    passed(8, f"until {predicate['validity']['not_after']}")
    return Verified(statement=statement, steps=tuple(seen))


def _form(bundle: bytes) -> Envelope:
    remedy = "Fetch the bundle again; it must be stored as it was sent."
    try:
        document = load_json(bundle, MAX_BUNDLE_BYTES).data
    except MalformedPlan as error:
        raise VerificationError(1, "bad_form", error.reasons[0].message, remedy) from None
    if not isinstance(document, dict) or document.keys() != {"bundleType", "envelope"}:
        raise VerificationError(1, "bad_form", "this is not a certificate bundle.", remedy)
    if document["bundleType"] != BUNDLE_TYPE:
        raise VerificationError(
            1,
            "bad_form",
            "the bundle is of another type or version.",
            "Verify it with the release that wrote it, or a later one.",
        )
    try:
        return read_envelope(document["envelope"])
    except BadEnvelope as error:
        raise VerificationError(1, "bad_form", f"{error}.", remedy) from None


def _payload_type(envelope: Envelope) -> None:
    if envelope.payload_type != PAYLOAD_TYPE:
        raise VerificationError(
            2,
            "bad_payload_type",
            "the envelope does not hold an in-toto statement.",
            "Fetch the bundle again.",
        )


def _key(envelope: Envelope, trusted: Iterable[PublicKey]) -> PublicKey:
    key = by_id(trusted).get(envelope.key_id)
    if key is None:
        raise VerificationError(
            3,
            "unknown_key",
            f"the key {envelope.key_id[:16]!r} is not one that you trust.",
            "Get the issuer's keys (GET /v1/keys) over a channel you trust and pass --keys.",
        )
    if key.development:
        raise VerificationError(
            3,
            "untrusted_key",
            "it was signed with a development key, which vouches for nothing.",
            "Have it issued by a service that has a signing key (affidavit keys new).",
        )
    return key


def _signature(envelope: Envelope, key: PublicKey) -> None:
    if not key.accepts(envelope.signature, envelope.signed_bytes):
        raise VerificationError(
            4,
            "bad_signature",
            "the signature does not fit the statement.",
            "The bundle was changed after it was signed; fetch it again.",
        )


def _statement(envelope: Envelope) -> dict[str, Any]:
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
    if not isinstance(critical, list) or not set(critical) <= set(CRITICAL):
        raise VerificationError(
            5,
            "unknown_critical_field",
            "it has critical fields this release does not know.",
            remedy,
        )
    missing = [name for name in (*CRITICAL, "plan", "certificate_id") if name not in predicate]
    if missing:
        raise VerificationError(
            5, "bad_statement", f"the statement lacks {', '.join(missing)}.", remedy
        )
    return document


def _dates(predicate: dict[str, Any]) -> tuple[datetime, datetime]:
    try:
        validity = predicate["validity"]
        not_before, not_after = (
            datetime.strptime(validity[name], TIME_FORMAT).replace(tzinfo=UTC)
            for name in ("not_before", "not_after")
        )
    except (KeyError, TypeError, ValueError):
        raise VerificationError(
            5, "bad_statement", "the statement's dates cannot be read.", "Ask for a new one."
        ) from None
    return not_before, not_after


def _window(key: PublicKey, issued_at: datetime) -> None:
    if not key.covers(issued_at):
        raise VerificationError(
            6,
            "key_outside_window",
            "it was issued when its key might not sign.",
            "Ask for a certificate signed by a current key.",
        )


def _plan(statement: dict[str, Any], plan: Plan | None) -> str:
    predicate = statement["predicate"]
    carried = digest_of(predicate["plan"])
    algorithm, _, value = carried.partition(":")
    subject = [{"name": "plan", "digest": {algorithm: value}}]
    if statement.get("subject") != subject:
        raise VerificationError(
            7,
            "bad_subject",
            "its subject is not the plan that it carries.",
            "Ask for a new certificate.",
        )
    if plan is not None and digest(plan) != carried:
        raise VerificationError(
            7,
            "other_plan",
            f"it is about another plan, {carried[:23]}…; the plan at hand is {digest(plan)[:23]}….",
            "Certify the plan at hand, or compare it with the certified one.",
        )
    return carried


def _validity(not_before: datetime, not_after: datetime, now: datetime) -> None:
    if now < not_before:
        raise VerificationError(
            8, "not_yet_valid", "it is not valid yet.", "Check this machine's clock."
        )
    if now > not_after:
        raise VerificationError(8, "expired", "it has expired.", "Certify the plan again.")
