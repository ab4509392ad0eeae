"""A certificate whose key was revoked: what the service hands out shows when it was logged.

The same forgery, dated before the revocation and put into the log by the operator afterwards,
carries the witness's own date.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from affidavit.certificate import verify
from affidavit.service.__main__ import main
from affidavit.service.core.database import writer
from affidavit.service.keys.keyring import KeysetStore
from affidavit.service.log.checkpoint_publisher import Cosignatures
from affidavit.service.log.entries import append_certificates
from affidavit.service.log.reader import with_inclusion
from affidavit.trust import (
    KeyRole,
    Revocation,
    Roots,
    TrustPolicy,
    VerificationError,
    draft_keyset,
    format_instant,
)
from affidavit.trust.log import WitnessKey
from affidavit.trust.trust_policy import Timestamps, Witnesses
from tests.service.log.conftest import ORIGIN, Log
from tests.support.logged_certificate import NOW, certified, key_for
from tests.support.polling import wait_until
from tests.support.trust import trusting
from tests.support.witness import cosign

OTHER_ROOT = "openssl req -x509 -newkey rsa:2048 -nodes -keyout other.key -days 9 -subj /CN=Root"
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
    Cosignatures(log.engine).store(note, line, WITNESS_KEY)


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
        verify(served, trusting(trusted, policy=POLICY, at=LATER))
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


@pytest.mark.ordinary("sqlite")
def test_what_was_stamped_before_goes_on_and_what_was_not_fails_closed(
    log: Log,
    bundles: tuple[bytes, bytes],
    authority: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an authority in place of witnesses; its clock is this machine's."""
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    monkeypatch.setenv("DATABASE_URL", log.url)
    log.key = LOGGER
    genuine, later = bundles
    url, root = authority
    with writer(log.engine).begin() as connection:
        append_certificates(connection, [genuine])
    log.sequence()
    # Revoked in between is a second after the certificate's date.
    wait_until(lambda: datetime.now(UTC) >= NOW + timedelta(seconds=2))
    assert main(["audit", "export-checkpoint", str(tmp_path / "first"), "--stamp", url]) == 0
    pem = root.read_text()
    other = subprocess.run(OTHER_ROOT.split(), cwd=tmp_path, check=True, capture_output=True)
    stranger = other.stdout.decode()

    def outcome(bundle: bytes, since: datetime, roots: str = pem, **policy: Any) -> tuple[int, str]:
        trusted = (replace(SIGNER.public, revoked_from=since), LOGGER.public)
        trust = TrustPolicy(
            schema_version=1, origin=ORIGIN, timestamps=Timestamps(roots=roots), **policy
        )
        try:
            verify(bundle, trusting(trusted, policy=trust, at=since + HOUR))
        except VerificationError as error:
            return error.step, error.code
        return 0, "verified"

    served = with_inclusion(log.reader, genuine)
    before = NOW + timedelta(seconds=1)
    assert outcome(served, REVOKED) == (0, "verified")
    # Revoked before the stamp, by an authority nobody named, or where witnesses are named too.
    assert outcome(served, before) == (6, "key_revoked")
    assert outcome(served, REVOKED, stranger) == (6, "key_revoked")
    assert outcome(served, REVOKED, witnesses=POLICY.witnesses) == (6, "key_revoked")
    # Not stamped at all, also under a key that is not revoked.
    with writer(log.engine).begin() as connection:
        append_certificates(connection, [later])
    log.sequence()
    unstamped = with_inclusion(log.reader, later)
    assert outcome(unstamped, REVOKED) == (6, "key_revoked")
    # The stamp of one checkpoint under another.
    stamp = json.loads(served)["log"]["checkpoint"].partition("\n\n")[2].splitlines()[-1]
    moved = json.loads(unstamped)
    moved["log"]["checkpoint"] += f"{stamp}\n"
    assert outcome(json.dumps(moved, ensure_ascii=False).encode(), REVOKED) == (6, "key_revoked")
    # What checks timestamps is missing.
    monkeypatch.setitem(sys.modules, "rfc3161_client", None)
    assert outcome(served, REVOKED) == (11, "timestamps_unchecked")
