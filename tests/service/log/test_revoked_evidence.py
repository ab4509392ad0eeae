"""A certificate whose key was revoked: what the service hands out shows when it was logged.

The same forgery, dated before the revocation and put into the log by the operator afterwards,
carries the witness's own date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from affidavit.certificate import (
    KeyRole,
    Revocation,
    Roots,
    TrustPolicy,
    VerificationError,
    VerificationOptions,
    draft_keyset,
    format_instant,
    verify,
)
from affidavit.certificate.log import WitnessKey, cosign
from affidavit.certificate.trust_policy import Witnesses
from affidavit.service.database import writer
from affidavit.service.keysets import KeysetStore
from affidavit.service.log.cosignatures import Cosignatures
from affidavit.service.log.entries import append_certificates
from affidavit.service.log.reader import with_inclusion
from tests.certificate.log.logged import NOW, certified, key_for
from tests.service.log.conftest import ORIGIN, Log

HOUR = timedelta(hours=1)
REVOKED = NOW + HOUR
LATER = NOW + 3 * HOUR
ROOT, WITNESS = key_for(), key_for()
SIGNER, LOGGER = key_for(KeyRole.CERTIFICATE), key_for(KeyRole.CHECKPOINT)
WITNESS_KEY = WitnessKey.of("w.example", WITNESS)
POLICY = TrustPolicy(
    schema_version=1, origin=ORIGIN, witnesses=Witnesses(threshold=1, keys=(str(WITNESS_KEY),))
)


def enter(log: Log, bundle: bytes, at: datetime) -> None:
    """Log a certificate, and have the checkpoint cosigned at that time by the witness's clock."""
    with writer(log.engine).begin() as connection:
        append_certificates(connection, [bundle])
    note = log.sequence().note
    line = cosign(note, WITNESS_KEY.name, WITNESS, at)
    Cosignatures(log.engine).keep(note, line, WITNESS_KEY)


def revoke(log: Log) -> None:
    """A keyset of the roots revokes the key from an hour after the certificate's date on."""
    signed = draft_keyset(
        None,
        roots=Roots.of([ROOT.public], threshold=1),
        keys=[SIGNER.public, LOGGER.public],
        revoked=[Revocation(key_id=SIGNER.key_id, since=format_instant(REVOKED))],
        issued_at=NOW,
        expires_at=NOW + timedelta(days=1),
        trust=POLICY,
    ).signed_by(ROOT)
    KeysetStore(log.engine).publish(signed.as_bytes(), actor="me", at=NOW)


def outcome(log: Log, bundle: bytes) -> tuple[int, str]:
    trusted = (replace(SIGNER.public, revoked_from=REVOKED), LOGGER.public)
    served = with_inclusion(log.reader, bundle)
    try:
        verify(served, trusted, now=LATER, options=VerificationOptions(trust=POLICY))
    except VerificationError as error:
        return error.step, error.code
    return 0, "verified"


@pytest.fixture
def bundles(document: Callable[..., dict[str, Any]]) -> tuple[bytes, bytes]:
    """A genuine certificate, and one of a thief, with the same date."""
    genuine, forged = (
        certified(document(target={"epsilon": 8, "delta": delta}), SIGNER) for delta in (1e-5, 1e-6)
    )
    return genuine.bundle, forged.bundle


def test_what_was_witnessed_before_goes_on_and_what_was_backdated_does_not(
    log: Log, bundles: tuple[bytes, bytes]
) -> None:
    log.key = LOGGER
    genuine, forged = bundles
    enter(log, genuine, NOW + HOUR / 2)
    assert outcome(log, genuine) == (0, "verified")
    revoke(log)
    enter(log, forged, NOW + 2 * HOUR)
    assert outcome(log, genuine) == (0, "verified")
    assert outcome(log, forged) == (6, "key_revoked")
