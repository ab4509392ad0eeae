"""A certificate is valid if its key signed it inside its window and before its revocation."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from affidavit.assessment import certify
from affidavit.certificate.issuance import issue
from affidavit.certificate.verification.bundle_verification import verify
from affidavit.plan import Plan
from affidavit.trust import (
    KeyFailure,
    PublicKey,
    SigningKey,
    TrustRoot,
    VerificationError,
)
from tests.support.trust import trusting

ISSUED = datetime.now(UTC).replace(microsecond=0)
SECOND = timedelta(seconds=1)


@pytest.fixture
def bundle(plan: Plan, key: SigningKey) -> bytes:
    assessment = certify(plan, second_opinion=False)
    return issue(assessment, key, requester="tests", issued_at=ISSUED).bundle


def outcome(bundle: bytes, *trusted: PublicKey, now: datetime = ISSUED) -> tuple[int, str]:
    try:
        verify(bundle, trusting(trusted, at=now))
    except VerificationError as error:
        return error.step, error.code
    return 0, "verified"


@pytest.mark.parametrize(
    ("opens", "closes", "found"),
    [
        (0, 0, (0, "verified")),
        (-1, 1, (0, "verified")),
        (1, 2, (6, "key_outside_window")),
        (-2, -1, (6, "key_outside_window")),
    ],
)
def test_both_ends_belong_to_the_window(
    bundle: bytes, key: SigningKey, opens: int, closes: int, found: tuple[int, str]
) -> None:
    window = replace(
        key.public, not_before=ISSUED + opens * SECOND, not_after=ISSUED + closes * SECOND
    )
    assert outcome(bundle, window) == found


@pytest.mark.parametrize(
    ("since", "found"),
    [(1, (0, "verified")), (0, (6, "key_revoked")), (-1, (6, "key_revoked"))],
)
def test_a_key_counts_until_it_is_revoked(
    bundle: bytes, key: SigningKey, since: int, found: tuple[int, str]
) -> None:
    window = {"not_before": ISSUED - 9 * SECOND, "not_after": ISSUED + 9 * SECOND}
    revoked = replace(key.public, **window, revoked_from=ISSUED + since * SECOND)
    assert outcome(bundle, revoked) == found


def test_a_key_that_is_revoked_says_nothing_of_when_it_signed(
    bundle: bytes, key: SigningKey
) -> None:
    """Whoever stole it can put an earlier date on a certificate."""
    revoked = replace(key.public, revoked_from=ISSUED + SECOND)
    assert outcome(bundle, revoked, now=ISSUED + SECOND) == (6, "key_revoked")


def test_a_key_that_was_compromised_since_its_start_counts_for_nothing(
    bundle: bytes, key: SigningKey
) -> None:
    start = ISSUED - 9 * SECOND
    assert outcome(bundle, replace(key.public, not_before=start, revoked_from=start)) == (
        6,
        "key_revoked",
    )


def test_a_wrong_key_id_over_the_right_keys_signature_is_named(
    bundle: bytes, key: SigningKey
) -> None:
    other = SigningKey.generate().public
    document = json.loads(bundle)
    signature = document["envelope"]["signatures"][0]
    signature["keyid"] = "0" * 64
    unknown = json.dumps(document).encode()
    assert outcome(unknown, key.public, other) == (3, "wrong_key_id")
    assert outcome(unknown, other) == (3, "unknown_key")
    signature["keyid"] = other.key_id
    swapped = json.dumps(document).encode()
    assert outcome(swapped, key.public, other) == (4, "wrong_key_id")
    assert outcome(swapped, other) == (4, "bad_signature")


def test_two_records_of_one_key_are_refused(key: SigningKey, tmp_path: Path) -> None:
    """The later one would decide silently, and it may be the one with the longer window."""
    newest = replace(key.public, not_after=key.public.not_after - SECOND)
    other = SigningKey.generate().public
    files = []
    for number, record in enumerate((key.public, newest, key.public, other)):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(record.as_record()))
        files.append(path)
    assert TrustRoot([files[0], *files[2:]]).load().keys == (key.public, other)
    for pair in (files[:2], files[1::-1]):
        with pytest.raises(KeyFailure, match="two records"):
            TrustRoot(pair).load()
