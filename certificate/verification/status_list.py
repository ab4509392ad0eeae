"""The status list: the signed certificates that are no longer valid, signed every few minutes.

A signed certificate cannot be recalled, so a verifier fetches its status. The status list is one
short-lived document for all certificates of a service. It is a DSSE envelope with its own payload
type, so that it can never pass for a certificate or the reverse::

    {"_type": "https://affidavit.dev/status-list/v1", "issuer": "log.example.org/main",
     "sequence": 41, "issued_at": "...", "next_update": "...", "keyset_version": 3,
     "keys": ["<key id>", ...],
     "listed": [{"envelope": "sha256:...", "certificate_id": "sha256:...", "issue": 1,
                 "status": "revoked", "reason": "plan_error", "since": "..."}]}

Its rules:

- It covers the certificates that ``keys`` signed and no others. A list of another service says
  nothing about this one's certificates.
- ``sequence`` only grows among the lists of one key. A list with a lower number than an earlier
  one, with the same number and other content, or of an older key, is a rollback. A newer key starts
  a new sequence, so that a number signed by a thief has no effect once the stolen key is replaced.
- It expires at ``next_update``, at most ``MAX_VALIDITY`` after ``issued_at``.
- It is valid only while its key is: the holder of a revoked or expired key can write any date.
- Issues are listed by their envelope's digest. A superseded issue that could otherwise still pass
  is listed too, as ``superseded``.
- An issue is listed until a day after the end of its validity.

References: secure-systems-lab/dsse, protocol.md; RFC 5280, sections 5 and 6.3 (thisUpdate,
nextUpdate, CRL number) for the rules; TUF specification, section 5.4 (timestamp), for rollback.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from affidavit.certificate.policy.evaluation import Approvals
from affidavit.certificate.verification.verification_result import SeenStatus, Verifier
from affidavit.plan import MAX_INTEGER, MalformedPlan, canonical_json, load_json
from affidavit.trust import (
    BadEnvelope,
    Instant,
    KeyRole,
    PublicKey,
    SigningPort,
    TrustedKeys,
    VerificationError,
    parse_instant,
    read_envelope,
    sign_envelope,
)
from affidavit.trust.dates import DateFault, fault_of_signature, fault_today, is_stale
from affidavit.trust.dsse import (
    Digest,
    Envelope,
    SignedPart,
    validated,
)
from affidavit.trust.key import by_id

PAYLOAD_TYPE = "application/vnd.affidavit.status-list.v1+json"
STATUS_TYPE = "https://affidavit.dev/status-list/v1"
MAX_BYTES = 32 * 1024 * 1024
"""Enough for a hundred thousand listed issues."""
MAX_VALIDITY = timedelta(days=7)
"""The longest time between ``issued_at`` and ``next_update``."""


class StatusEntry(SignedPart):
    """An issue that is no longer valid, since when and why."""

    envelope: Digest
    certificate_id: Digest
    issue: Annotated[int, Field(ge=1, le=MAX_INTEGER)]
    status: Literal["revoked", "superseded"]
    reason: str
    since: Instant


class StatusList(SignedPart):
    """The content of a status list; times are UTC in whole seconds."""

    type: Annotated[Literal["https://affidavit.dev/status-list/v1"], Field(alias="_type")]
    issuer: Annotated[str, Field(min_length=1, max_length=255)]
    sequence: Annotated[int, Field(ge=1, le=MAX_INTEGER)]
    issued_at: Instant
    next_update: Instant
    keyset_version: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None
    keys: tuple[str, ...]
    listed: tuple[StatusEntry, ...]

    @model_validator(mode="after")
    def _validate_times(self) -> Self:
        if parse_instant(self.issued_at) > parse_instant(self.next_update):
            raise ValueError("it ends before it begins")
        return self


class StatusCheck(NamedTuple):
    """The result of step 13: a description, and whether a list was checked."""

    detail: str
    is_checked: bool


def sign_status(content: Mapping[str, Any], key: SigningPort) -> bytes:
    """Sign a list, whose ``content`` lacks ``_type``, as ``GET /v1/status`` returns it."""
    status_list = StatusList.model_validate({"_type": STATUS_TYPE, **content})
    payload = canonical_json(status_list.as_document())
    return canonical_json(sign_envelope(payload, key, PAYLOAD_TYPE).as_document())


def read_status(raw: bytes, trusted: TrustedKeys) -> tuple[StatusList, Envelope]:
    """Parse a list that a trusted key signed inside its window.

    Raises ``VerificationError`` with the code ``bad_status``.
    """
    try:
        envelope = read_envelope(load_json(raw, MAX_BYTES).data)
    except MalformedPlan as error:
        raise _bad(error.reasons[0].message) from None
    except BadEnvelope as error:
        raise _bad(f"{error}.") from None
    if envelope.payload_type != PAYLOAD_TYPE:
        raise _bad("the envelope does not contain a status list.")
    key = trusted.key(envelope.key_id)
    if key is None or key.development:
        raise _bad("it was not signed by a key that you trust.")
    if not key.has_role(KeyRole.STATUS):
        raise _bad(f"the key {key.key_id[:16]} is not for status lists.")
    if not key.accepts(envelope.signature, envelope.signed_bytes):
        raise _bad("its signature does not match its content.")
    try:
        status_list = validated(StatusList, load_json(envelope.payload, MAX_BYTES).data)
    except MalformedPlan as error:
        raise _bad(error.reasons[0].message) from None
    except ValueError as error:
        raise _bad(f"{error}.") from None
    issued_at = parse_instant(status_list.issued_at)
    if fault_of_signature(key, issued_at, now=issued_at) is not None:
        raise _bad("its key was not allowed to sign when it was signed.")
    return status_list, envelope


def current_status(
    raw: bytes,
    trusted: TrustedKeys,
    seen: Mapping[str, SeenStatus],
) -> tuple[StatusList, Envelope]:
    """Parse a list that is signed, valid now and not older than ``seen``.

    ``seen`` has the newest list seen, by issuer. A verifier should store the returned list. Raises
    ``VerificationError`` with the codes ``bad_status``, ``stale_status`` and ``status_rollback``.
    """
    now = trusted.now()
    status_list, signed = read_status(raw, trusted)
    keys = by_id(trusted.keys)
    match fault_today(keys[signed.key_id], parse_instant(status_list.issued_at), now=now):
        case DateFault.NOT_YET:
            raise _bad("it is from the future; check this machine's clock.")
        case DateFault():
            raise _bad("its key was revoked or has expired, so its dates prove nothing.")
    _require_fresh(status_list, now)
    last = seen.get(status_list.issuer)
    if last is not None:
        _require_newer(status_list, signed, last, keys, now)
    return status_list, signed


def check_status(
    envelope: Envelope, predicate: Mapping[str, Any], verifier: Verifier
) -> StatusCheck:
    """Check that a certificate has the required approvals and is not revoked (step 13).

    Raises ``VerificationError`` with the codes ``not_approved``, ``no_status``, ``bad_status``,
    ``stale_status``, ``status_rollback``, ``other_status``, ``revoked`` and ``superseded``.
    """
    _require_approved(predicate)
    options, now = verifier.options, verifier.now
    hours = None if verifier.policy is None else verifier.policy.freshness.status_hours
    if options.status is None:
        if options.require_status or hours is not None:
            raise _error(
                "no_status",
                "no status list was given.",
                "Fetch one with `affidavit status` and pass --status.",
            )
        return StatusCheck("revocation not checked: no status list given", False)
    status_list, _ = current_status(options.status, verifier.trusted, options.status_seen)
    issued_at = parse_instant(status_list.issued_at)
    if is_stale(hours, issued_at, now):
        raise _error(
            "stale_status",
            f"the status list is from {status_list.issued_at}, older than {hours} hours.",
            _FETCH,
        )
    if envelope.key_id not in status_list.keys:
        raise _error(
            "other_status",
            "the status list is from another service and does not cover the certificate's key.",
            "Fetch the list of the service that issued the certificate.",
        )
    _require_unlisted(status_list, envelope.digest)
    return StatusCheck(
        f"not listed in status list {status_list.sequence} of {status_list.issuer}", True
    )


def _require_approved(predicate: Mapping[str, Any]) -> None:
    """Check the approvals; only a ``certified`` verdict allows a run and needs them."""
    if predicate["verdict"] != "certified":
        return
    remedy = "Have it approved (affidavit approve), then fetch its bundle again."
    try:
        approvals = Approvals.of(predicate)
    except ValueError as error:
        raise _error("not_approved", f"{error}.", remedy) from None
    others = {item.name for item in approvals.given} - {predicate.get("requester")}
    if len(others) < approvals.required:
        raise _error(
            "not_approved",
            f"{len(others)} of the {approvals.required} required approvals were given.",
            remedy,
        )
    if any(entry.envelope != predicate.get("supersedes") for entry in approvals.given):
        raise _error("not_approved", "its approvals are for another envelope.", remedy)


_FETCH = "Fetch a new one with `affidavit status`."


def _require_fresh(status_list: StatusList, now: datetime) -> None:
    life = parse_instant(status_list.next_update) - parse_instant(status_list.issued_at)
    if life > MAX_VALIDITY:
        raise _bad(
            f"it would be valid for {life.days} days; at most {MAX_VALIDITY.days} are allowed."
        )
    if parse_instant(status_list.next_update) < now:
        raise _error(
            "stale_status", f"the status list was valid until {status_list.next_update}.", _FETCH
        )


def _require_newer(
    status_list: StatusList,
    signed: Envelope,
    last: SeenStatus,
    trusted: Mapping[str, PublicKey],
    now: datetime,
) -> None:
    if last.key_id not in ("", signed.key_id):
        last_key, key = trusted.get(last.key_id), trusted[signed.key_id]
        if last_key is None or last_key.revoked_at(now) or key.not_before > last_key.not_before:
            return
        if key.not_before < last_key.not_before:
            raise _error(
                "status_rollback", "a status list from a newer key was seen before.", _FETCH
            )
    if status_list.sequence < last.sequence:
        raise _error(
            "status_rollback",
            f"status list {status_list.sequence} is older than {last.sequence}, which you saw "
            "before.",
            _FETCH,
        )
    if status_list.sequence == last.sequence and signed.digest != last.digest:
        raise _error(
            "status_rollback",
            f"another status list {status_list.sequence} was seen before; there can be only one.",
            "Ask the service's operator: one number was signed twice.",
        )


def _require_unlisted(status_list: StatusList, digest: str) -> None:
    for item in status_list.listed:
        if item.envelope != digest:
            continue
        if item.status == "superseded":
            raise _error(
                "superseded",
                f"issue {item.issue} was superseded at {item.since}.",
                "Fetch the current bundle: GET /v1/certificates/ID/bundle.",
            )
        raise _error(
            "revoked",
            f"it was revoked at {item.since}: {item.reason}.",
            "Do not use it; ask the issuer.",
        )


def _error(code: str, message: str, remedy: str) -> VerificationError:
    return VerificationError(13, code, message, remedy)


def _bad(message: str) -> VerificationError:
    return _error("bad_status", f"the status list: {message}", "Fetch it again (GET /v1/status).")
