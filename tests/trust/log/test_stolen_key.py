"""A thief with a revoked signing key can produce nothing that verifies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from affidavit.certificate.verification.bundle_verification import (
    VerificationError,
    VerificationOptions,
    verify,
)
from affidavit.certificate.verification.status_list import current_status, sign_status
from affidavit.certificate.verification.verification_result import SeenCheckpoint
from affidavit.trust import PublicKey, SigningKey, format_instant
from affidavit.trust.log import sign_checkpoint
from tests.support.logged_certificate import ORIGIN, Log, certified, key_for, log_of
from tests.support.trust import trusting

HOUR = timedelta(hours=1)
NOW = datetime.now(UTC).replace(microsecond=0) + 2 * HOUR


@pytest.fixture(scope="module")
def stolen() -> SigningKey:
    return SigningKey.generate("stolen")


@pytest.fixture(scope="module")
def valid(stolen: SigningKey) -> PublicKey:
    """The key as it was trusted, since before the test began."""
    return replace(stolen.public, not_before=stolen.public.not_before - HOUR)


@pytest.fixture(scope="module")
def revoked(valid: PublicKey) -> PublicKey:
    """From after everything that it dated, so that each date is one of before."""
    return replace(valid, revoked_from=NOW - HOUR)


@pytest.fixture
def forged(document: Callable[..., dict[str, Any]], stolen: SigningKey) -> Log:
    """A log of one leaf, the thief's own certificate."""
    return log_of(certified(document(), stolen), 0, 1)


def status_of(key: SigningKey, **changes: Any) -> bytes:
    content = {
        "issuer": ORIGIN,
        "sequence": 2**52,
        "issued_at": format_instant(NOW - 1.5 * HOUR),
        "next_update": format_instant(NOW + HOUR),
        "keyset_version": 1,
        "keys": (key.public.key_id,),
        "listed": (),
    }
    return sign_status({**content, **changes}, key)


def outcome(bundle: dict[str, Any], *keys: PublicKey, **options: Any) -> tuple[int, str]:
    try:
        raw = json.dumps(bundle).encode()
        verify(raw, trusting(keys, at=NOW), options=VerificationOptions(**options))
    except VerificationError as error:
        return error.step, error.code
    return 0, "verified"


def test_a_certificate_a_log_and_a_status_list_of_its_own_do_not_verify(
    forged: Log, stolen: SigningKey, valid: PublicKey, revoked: PublicKey
) -> None:
    requirements = {"require_log": True, "require_status": True, "status": status_of(stolen)}
    bundle = forged.bundle(1, key=stolen)
    assert outcome(bundle, valid, **requirements) == (0, "verified")
    assert outcome(bundle, revoked, **requirements) == (11, "checkpoint_key_revoked")
    del bundle["log"]
    assert outcome(bundle, revoked) == (6, "key_revoked")


def test_a_log_that_another_key_signed_vouches_for_it(forged: Log, revoked: PublicKey) -> None:
    """The service's current key signs the log again, with what the old one had issued."""
    current = SigningKey.generate("current")
    bundle = forged.bundle(1, key=current, at=current.public.not_before)
    assert outcome(bundle, revoked, current.public) == (0, "verified")
    assert outcome(bundle, revoked) == (11, "unknown_checkpoint_key")


def test_a_forged_checkpoint_binds_nobody_once_its_key_is_revoked(
    document: Callable[..., dict[str, Any]], stolen: SigningKey, revoked: PublicKey
) -> None:
    """A verifier that was shown a view of the thief's own accepts the genuine log again."""
    current = key_for()
    genuine = log_of(certified(document(), current), 0, 2)
    bundle = genuine.bundle(2, key=current)
    huge = sign_checkpoint(stolen, origin=ORIGIN, size=2**50, root_hash=bytes(32), at=NOW)

    def compared(at: datetime | None, *keys: PublicKey) -> tuple[int, str]:
        seen = {ORIGIN: SeenCheckpoint(huge, at)}
        return outcome(bundle, *keys, current.public, seen=seen, require_log=True)

    for at in (None, NOW - HOUR, NOW):
        assert compared(at, revoked) == (0, "verified")
    # What was seen before the theft binds, as does what a key signed that nobody revoked.
    assert compared(NOW - 1.1 * HOUR, revoked) == (12, "consistency_unproved")
    assert compared(None, stolen.public) == (12, "consistency_unproved")


def test_a_status_list_of_a_revoked_key_is_neither_accepted_nor_remembered(
    stolen: SigningKey, valid: PublicKey, revoked: PublicKey
) -> None:
    current_status(status_of(stolen), trusting(valid, at=NOW), {})
    with pytest.raises(VerificationError) as caught:
        current_status(status_of(stolen), trusting(revoked, at=NOW), {})
    assert caught.value.code == "bad_status"


@pytest.mark.parametrize("days", [8, 365 * 70])
def test_no_status_list_lives_longer_than_a_week(stolen: SigningKey, days: int) -> None:
    far = format_instant(NOW + timedelta(days=days))
    with pytest.raises(VerificationError) as caught:
        current_status(status_of(stolen, next_update=far), trusting(stolen.public, at=NOW), {})
    assert caught.value.code == "bad_status"
