"""Verification under a trust policy needs the right log, enough witnesses and freshness."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from affidavit.certificate.verification.bundle_verification import (
    VerificationError,
    VerificationOptions,
    verify,
)
from affidavit.certificate.verification.status_list import sign_status
from affidavit.trust import (
    BadTrustPolicy,
    KeyRole,
    KeysetError,
    PublicKey,
    Roots,
    SigningKey,
    TrustPolicy,
    draft_keyset,
    format_instant,
    parse_trust_policy,
    read_keyset,
    trust_policy,
)
from affidavit.trust.log import WitnessKey
from affidavit.trust.trust_policy import Timestamps
from tests.support.logged_certificate import NOW, ORIGIN, Log, certified, key_for, log_of
from tests.support.trust import trusting
from tests.support.witness import cosign

HOUR = timedelta(hours=1)
SIGNER = key_for(KeyRole.CERTIFICATE)
LOGGER = key_for(KeyRole.CHECKPOINT)
STATUS = key_for(KeyRole.STATUS)
TRUSTED = (SIGNER.public, LOGGER.public, STATUS.public)
WITNESSES = {f"w{number}.example": SigningKey.generate() for number in range(3)}
ALL = tuple(WITNESSES)


def policy(threshold: int = 2, names: Sequence[str] = ALL, **freshness: int) -> TrustPolicy:
    keys = [str(WitnessKey.of(name, WITNESSES[name])) for name in names]
    document = {
        "schema_version": 1,
        "origin": ORIGIN,
        "witnesses": {"threshold": threshold, "keys": keys},
        "freshness": freshness,
    }
    return parse_trust_policy(json.dumps(document).encode())


@pytest.fixture
def log(document: Callable[..., dict[str, Any]]) -> Log:
    return log_of(certified(document(), SIGNER), 3, 9)


def bundle_of(
    log: Log, cosigners: dict[str, datetime], size: int = 9, **checkpoint: Any
) -> dict[str, Any]:
    result = log.bundle(size, **{"key": LOGGER, **checkpoint})
    note = result["log"]["checkpoint"]
    lines = (cosign(note, name, WITNESSES[name], at) for name, at in cosigners.items())
    result["log"]["checkpoint"] = note + "".join(lines)
    return result


def outcome(
    bundle: dict[str, Any],
    trust: TrustPolicy | None,
    trusted: Sequence[PublicKey] = TRUSTED,
    now: datetime = NOW,
    **options: Any,
) -> tuple[int, str]:
    try:
        raw = json.dumps(bundle).encode()
        verify(
            raw,
            trusting(trusted, policy=trust, at=now),
            options=VerificationOptions(**options),
        )
    except VerificationError as error:
        return error.step, error.code
    return 0, "verified"


@pytest.mark.parametrize("count", range(4))
def test_t_of_n_witnesses_cosign(log: Log, count: int) -> None:
    bundle = bundle_of(log, dict.fromkeys(ALL[:count], NOW))
    expected = (0, "verified") if count >= 2 else (11, "not_witnessed")
    assert outcome(bundle, policy(2)) == expected


def test_a_bundle_without_a_log_or_of_another_log_is_rejected(log: Log) -> None:
    assert outcome(json.loads(log.certificate.bundle), policy()) == (10, "not_logged")
    other = bundle_of(log, dict.fromkeys(ALL, NOW), origin="example.com/other")
    assert outcome(other, policy()) == (11, "wrong_origin")


def test_a_cosignature_of_another_text_is_rejected(log: Log) -> None:
    bundle = bundle_of(log, dict.fromkeys(ALL, NOW))
    other = log.bundle(9, key=LOGGER, at=NOW + HOUR)
    cosignatures = bundle["log"]["checkpoint"].partition("\n\n")[2].split("\n", 1)[1]
    other["log"]["checkpoint"] += cosignatures
    assert outcome(other, policy()) == (11, "bad_cosignature")


def test_one_key_under_two_names_is_one_witness() -> None:
    key = SigningKey.generate()
    keys = [str(WitnessKey.of(name, key)) for name in ("a.example", "b.example")]
    document = {"schema_version": 1, "origin": ORIGIN, "witnesses": {"threshold": 2, "keys": keys}}
    with pytest.raises(BadTrustPolicy, match="listed twice"):
        parse_trust_policy(json.dumps(document).encode())


def test_the_log_does_not_witness_itself(log: Log) -> None:
    own = str(WitnessKey.of("w.example", LOGGER))
    document = {"schema_version": 1, "origin": ORIGIN, "witnesses": {"threshold": 1, "keys": [own]}}
    trust = parse_trust_policy(json.dumps(document).encode())
    assert outcome(bundle_of(log, {}), trust) == (11, "witness_not_independent")
    with pytest.raises(KeysetError, match="would witness itself"):
        keyset_of(trust)


@pytest.mark.parametrize(("hours", "code"), [(1, "verified"), (2, "stale_checkpoint")])
def test_a_checkpoint_is_as_fresh_as_its_witnesses(log: Log, hours: int, code: str) -> None:
    """Two of three must be fresh: one that is does not help."""
    times = {ALL[0]: NOW, ALL[1]: NOW - HOUR * hours, ALL[2]: NOW - HOUR * 9}
    assert outcome(bundle_of(log, times), policy(2, checkpoint_hours=1))[1] == code


@pytest.mark.parametrize("witnessed", [True, False])
def test_no_timestamp_makes_a_checkpoint_fresh(
    log: Log, witnessed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can have an old one stamped today."""
    stamps: dict[str, Any] = {"timestamps": Timestamps.model_construct(roots="")}
    trust = policy(2, checkpoint_hours=2).model_copy(
        update=stamps if witnessed else {**stamps, "witnesses": None}
    )
    bundle = bundle_of(log, dict.fromkeys(ALL, NOW))
    for now, expected in (
        (NOW + HOUR, (0, "verified")),
        (NOW + 9 * HOUR, (11, "stale_checkpoint")),
    ):
        monkeypatch.setattr(trust_policy, "stamped_at", lambda *_, now=now: now)
        assert outcome(bundle, trust, now=now) == expected


def status_list(issued_at: datetime) -> bytes:
    content = {
        "issuer": ORIGIN,
        "sequence": 1,
        "issued_at": format_instant(issued_at),
        "next_update": format_instant(issued_at + 4 * HOUR),
        "keyset_version": None,
        "keys": (SIGNER.key_id,),
        "listed": (),
    }
    return sign_status(content, STATUS)


@pytest.mark.parametrize(("hours", "code"), [(1, "verified"), (3, "stale_status")])
def test_a_status_list_is_needed_and_fresh(log: Log, hours: int, code: str) -> None:
    bundle = bundle_of(log, dict.fromkeys(ALL, NOW))
    assert outcome(bundle, policy(status_hours=2)) == (13, "no_status")
    later = NOW + hours * HOUR
    status = status_list(NOW)
    assert outcome(bundle, policy(status_hours=2), now=later, status=status)[1] == code


def test_what_expired_since_its_use_is_held_to_the_log_and_the_status_of_today(log: Log) -> None:
    """Both were fetched after the use, and are as fresh as they have to be now."""
    now = NOW + 400 * 24 * HOUR
    bundle = bundle_of(log, dict.fromkeys(ALL, now - HOUR), at=now - HOUR)
    trust = policy(status_hours=2, checkpoint_hours=2)
    status = status_list(now - HOUR)
    assert outcome(bundle, trust, now=now, status=status) == (9, "expired")
    used: dict[str, Any] = {"now": now, "used_at": NOW}
    assert outcome(bundle, trust, status=status, **used) == (0, "verified")
    assert outcome(bundle, trust, **used) == (13, "no_status")
    assert outcome(bundle, trust, status=status_list(now - 3 * HOUR), **used)[1] == "stale_status"
    early = {"now": now, "used_at": NOW - HOUR}
    assert outcome(bundle, trust, status=status, **early) == (9, "not_yet_valid")


# ---- Stolen keys, one after the other, and together with the operator of the service


def revoked(key: SigningKey, at: datetime) -> PublicKey:
    return replace(key.public, not_before=NOW - 9 * HOUR, revoked_from=at)


@pytest.mark.parametrize(
    ("cosigned", "expected"),
    [
        (NOW - 2 * HOUR, (0, "verified")),
        (NOW + HOUR, (6, "key_revoked")),
        (None, (6, "key_revoked")),
    ],
)
def test_only_witnesses_date_a_certificate_whose_key_was_revoked(
    log: Log, cosigned: datetime | None, expected: tuple[int, str]
) -> None:
    """The operator backdates the log's time; the witnesses' clocks are their own."""
    stolen = revoked(SIGNER, NOW + HOUR / 2)
    times = {} if cosigned is None else dict.fromkeys(ALL, cosigned)
    bundle = bundle_of(log, times, at=NOW)
    trusted = (stolen, LOGGER.public)
    assert outcome(bundle, policy(), trusted, now=NOW + 3 * HOUR) == expected
    # Without a policy nobody is known who could date it.
    assert outcome(bundle, None, trusted, now=NOW + 3 * HOUR) == (6, "key_revoked")


@pytest.mark.parametrize(
    ("cosigned", "code"), [(NOW, "verified"), (NOW + HOUR, "checkpoint_key_revoked")]
)
def test_only_witnesses_date_a_checkpoint_whose_key_was_revoked(
    log: Log, cosigned: datetime, code: str
) -> None:
    trusted = (SIGNER.public, revoked(LOGGER, NOW + HOUR / 2))
    bundle = bundle_of(log, dict.fromkeys(ALL, cosigned))
    assert outcome(bundle, policy(), trusted, now=NOW + 3 * HOUR)[1] == code


def test_a_thief_of_both_service_keys_forges_nothing_that_witnesses_did_not_see(log: Log) -> None:
    """A view of the log made for one victim, before anybody knows of the theft."""
    forged = bundle_of(log, {})
    assert outcome(forged, None, require_log=True) == (0, "verified")
    assert outcome(forged, policy(1)) == (11, "not_witnessed")
    # With a witness's key too, one of three is still too few.
    forged = bundle_of(log, {ALL[0]: NOW})
    assert outcome(forged, policy(2)) == (11, "not_witnessed")


# ---- The policy that travels in the keyset


def keyset_of(trust: TrustPolicy | None) -> bytes:
    root = SigningKey.generate()
    draft = draft_keyset(
        None,
        roots=Roots.of([root.public], threshold=1),
        keys=TRUSTED,
        revoked=[],
        issued_at=NOW,
        expires_at=NOW + HOUR,
        trust=trust,
    )
    return draft.signed_by(root).as_bytes()


def test_the_default_policy_is_part_of_what_the_roots_sign() -> None:
    assert read_keyset(keyset_of(policy())).keyset.trust == policy()
    assert read_keyset(keyset_of(None)).keyset.trust is None
    assert b"trust" not in read_keyset(keyset_of(None)).envelope.payload


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"origin": "a b"}, "origin"),
        ({"schema_version": 2}, "schema_version"),
        ({"witness": {}}, "witness"),
        ({"witnesses": {"threshold": 0, "keys": ["x"]}}, "threshold"),
        ({"witnesses": {"threshold": 1, "keys": ["x"]}}, "witnesses"),
        ({"freshness": {"checkpoint_hours": 0}}, "checkpoint_hours"),
        ({"freshness": {"checkpoint_hours": True}}, "checkpoint_hours"),
    ],
)
def test_what_is_no_policy_is_refused_by_its_field(change: dict[str, Any], said: str) -> None:
    document = {"schema_version": 1, "origin": ORIGIN, **change}
    with pytest.raises(BadTrustPolicy, match=said):
        parse_trust_policy(json.dumps(document).encode())
    for raw in (b"", b"[]", b"origin: &a x", b"\xff"):
        with pytest.raises(BadTrustPolicy):
            parse_trust_policy(raw)


@pytest.mark.parametrize("names", [(), ALL], ids=["of the log", "of its witnesses"])
def test_a_date_that_is_yet_to_come_keeps_nothing_fresh(log: Log, names: tuple[str, ...]) -> None:
    """Or one checkpoint, signed ahead by a thief or a fast clock, would hide all later ones."""
    trust = policy(2, checkpoint_hours=1)
    if not names:
        trust = trust.model_copy(update={"witnesses": None})
    at = NOW + HOUR * 24 * 30
    dates = {} if names else {"at": at}
    bundle = bundle_of(log, dict.fromkeys(names, at), **dates)
    code = "not_witnessed" if names else "checkpoint_not_yet"
    assert outcome(bundle, trust) == (11, code)


def test_one_fast_witness_stops_nobody(log: Log) -> None:
    """The threshold is of others, whose clocks are right."""
    times = {ALL[0]: NOW, ALL[1]: NOW, ALL[2]: NOW + HOUR * 24}
    assert outcome(bundle_of(log, times), policy(2, checkpoint_hours=1)) == (0, "verified")


def test_one_witness_that_cosigns_twice_is_one(log: Log) -> None:
    bundle = bundle_of(log, {ALL[0]: NOW})
    note = bundle["log"]["checkpoint"]
    later = cosign(note, ALL[0], WITNESSES[ALL[0]], NOW + timedelta(seconds=1))
    stranger = cosign(note, "w9.example", SigningKey.generate(), NOW)
    for more in (later, note.splitlines(keepends=True)[-1], stranger):
        bundle["log"]["checkpoint"] = note + more
        assert outcome(bundle, policy(2))[1] in ("not_witnessed", "bad_checkpoint")
