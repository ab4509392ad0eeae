"""Keys with one role: what a thief can forge, and what expires with the window."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from affidavit.certificate.verification.bundle_verification import verify
from affidavit.certificate.verification.status_list import current_status, sign_status
from affidavit.certificate.verification.verification_result import SeenStatus, VerificationOptions
from affidavit.evidence import (
    BadProvenance,
    Conformance,
    read_provenance,
    sign_provenance,
)
from affidavit.trust import (
    KeyFailure,
    KeyRole,
    KeysetError,
    KeyStore,
    PublicKey,
    Roots,
    SigningKey,
    VerificationError,
    accept_keyset,
    draft_keyset,
    format_instant,
    read_envelope,
    read_keyset,
    sign_envelope,
)
from affidavit.trust.log import open_checkpoint
from affidavit.trust.log.note import UnknownSigner
from tests.support.logged_certificate import NOW, ORIGIN, Log, certified, key_for, log_of
from tests.support.trust import trusting

HOUR = timedelta(hours=1)


KEYS = {role: key_for(role) for role in KeyRole}
TRUSTED = tuple(key.public for key in KEYS.values())


@pytest.fixture
def logs(document: Callable[..., dict[str, Any]]) -> dict[KeyRole, Log]:
    """For each key, a log of one leaf: a certificate that this key signed."""
    return {role: log_of(certified(document(), key), 0, 1) for role, key in KEYS.items()}


def status_of(key: SigningKey, **changes: Any) -> bytes:
    content = {
        "issuer": ORIGIN,
        "sequence": 7,
        "issued_at": format_instant(NOW),
        "next_update": format_instant(NOW + HOUR),
        "keyset_version": 1,
        "keys": (KEYS[KeyRole.CERTIFICATE].key_id,),
        "listed": (),
    }
    return sign_status({**content, **changes}, key)


def outcome(
    bundle: dict[str, Any], trusted: tuple[PublicKey, ...] = TRUSTED, **options: Any
) -> tuple[int, str]:
    at = options.pop("now", NOW)
    try:
        verify(
            json.dumps(bundle).encode(),
            trusting(trusted, at=at),
            options=VerificationOptions(**options),
        )
    except VerificationError as error:
        return error.step, error.code
    return 0, "verified"


def test_keys_of_their_roles_verify_together(logs: dict[KeyRole, Log]) -> None:
    bundle = logs[KeyRole.CERTIFICATE].bundle(1, key=KEYS[KeyRole.CHECKPOINT], at=NOW)
    status = status_of(KEYS[KeyRole.STATUS])
    every = {"require_log": True, "require_status": True, "status": status}
    assert outcome(bundle, **every) == (0, "verified")


@pytest.mark.parametrize("role", KeyRole)
def test_a_stolen_key_forges_documents_of_its_own_role_only(
    logs: dict[KeyRole, Log], role: KeyRole
) -> None:
    """The thief makes everything with it: certificate, log, status list."""
    stolen = KEYS[role]
    forged = logs[role].bundle(1, key=stolen, at=NOW)
    expected = (
        (11, "unknown_checkpoint_key") if role is KeyRole.CERTIFICATE else (3, "key_outside_role")
    )
    assert outcome(forged, require_log=True) == expected
    genuine = logs[KeyRole.CERTIFICATE].bundle(1, key=stolen, at=NOW)
    assert outcome(genuine, require_log=True) == (
        (0, "verified") if role is KeyRole.CHECKPOINT else (11, "unknown_checkpoint_key")
    )
    del genuine["log"]
    assert outcome(genuine, status=status_of(stolen)) == (
        (0, "verified") if role is KeyRole.STATUS else (13, "bad_status")
    )


@pytest.mark.parametrize("role", [role for role in KeyRole if role is not KeyRole.RUN])
def test_run_records_are_signed_by_keys_for_them(role: KeyRole) -> None:
    envelope = {
        "payloadType": "application/vnd.in-toto+json",
        "payload": "e30=",
        "signatures": [{"keyid": KEYS[role].key_id, "sig": "A" * 86 + "=="}],
    }
    with pytest.raises(BadProvenance, match="not for run records"):
        read_provenance(envelope, trusting(TRUSTED))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (rb"(\d+-\d+-\d+T\d+:\d+:\d+)Z", b"0001-01-01T00:00:00+14:00"),
        (rb'"conformant"', b'"deep": ' + b"[" * 60_000 + b"]" * 60_000 + b', "conformant"'),
    ],
)
def test_the_provenance_of_a_run_is_read_strictly(ours: bytes, theirs: bytes) -> None:
    key = KEYS[KeyRole.RUN]
    genuine = read_envelope(provenance_of_a_run(key)).payload
    altered = sign_envelope(re.sub(ours, theirs, genuine), key).as_document()
    with pytest.raises(BadProvenance, match="not the provenance"):
        read_provenance(altered, trusting(key.public))


def provenance_of_a_run(key: SigningKey) -> dict[str, Any]:
    report = Conformance(
        certificate_id="sha256:" + "1" * 64,
        plan_digest="sha256:" + "2" * 64,
        run="r",
        head=None,
        steps_certified=4,
        steps_charged=4,
        steps_released=4,
        steps_to_charge=4,
        findings=(),
    )
    about = {"run": "r", "fence": 1, "data": "d", "model": "m", "worker": "w", "weights": None}
    return sign_provenance(key, report, **about, header={}, began=NOW)


def test_a_revoked_run_key_signs_nothing_whatever_date_it_states() -> None:
    key = KEYS[KeyRole.RUN]
    signed = provenance_of_a_run(key)
    finished = read_provenance(signed, trusting(key.public)).finished
    ended = replace(key.public, not_after=finished)
    soon = replace(key.public, revoked_from=finished + HOUR)
    assert read_provenance(signed, trusting(ended), later=True).run == "r"
    assert read_provenance(signed, trusting(soon), later=True).run == "r"
    # Revoked a moment after what it says: who holds the key may have said it just now.
    revoked = replace(key.public, revoked_from=finished + timedelta(microseconds=1))
    for refused, later in ((ended, False), (revoked, False), (revoked, True)):
        with pytest.raises(BadProvenance, match="not allowed to sign"):
            read_provenance(signed, trusting(refused), later=later)


def test_a_checkpoint_under_another_role_is_unsigned(logs: dict[KeyRole, Log]) -> None:
    note = logs[KeyRole.CERTIFICATE].checkpoint(1, key=KEYS[KeyRole.STATUS])
    with pytest.raises(UnknownSigner):
        open_checkpoint(note, TRUSTED)


def test_a_certificate_ends_with_the_window_of_its_key(
    document: Callable[..., dict[str, Any]],
) -> None:
    key = KEYS[KeyRole.CERTIFICATE]
    bundle = json.loads(certified(document(), key).bundle)
    short = replace(key.public, not_after=NOW + HOUR)
    assert outcome(bundle, (short,), now=NOW + HOUR) == (0, "verified")
    assert outcome(bundle, (short,), now=NOW + 2 * HOUR) == (9, "expired")
    every_role = replace(short, roles=None)
    assert outcome(bundle, (every_role,), now=NOW + 2 * HOUR) == (0, "verified")
    signed = certified(document(), replace(key, public=short))
    assert signed.statement["predicate"]["validity"]["not_after"] == format_instant(NOW + HOUR)


def test_a_forged_number_binds_nobody_under_the_next_key() -> None:
    """Its thief signed the largest number; the next key for status lists begins a new count."""
    stolen = KEYS[KeyRole.STATUS]
    later = replace(stolen.public, not_before=stolen.public.not_before + timedelta(seconds=30))
    successor = SigningKey.generate(roles=(KeyRole.STATUS,))
    successor = replace(successor, public=replace(successor.public, not_before=later.not_before))
    trusted = [stolen.public, successor.public]
    now = NOW + HOUR / 2
    times = {"issued_at": format_instant(now)}
    poisoned = {ORIGIN: SeenStatus(2**53, "sha256:x", stolen.key_id)}
    current_status(status_of(successor, sequence=1, **times), trusting(trusted, at=now), poisoned)
    # Within one key's count, and from a newer key back to an older one, it only grows.
    for key, seen in (
        (stolen, poisoned),
        (successor, {ORIGIN: SeenStatus(2, "sha256:x", successor.key_id)}),
        (stolen, {ORIGIN: SeenStatus(1, "sha256:x", successor.key_id)}),
    ):
        with pytest.raises(VerificationError) as caught:
            current_status(status_of(key, sequence=1, **times), trusting(trusted, at=now), seen)
        assert caught.value.code == "status_rollback"


def test_a_revocation_that_a_thief_invents_ends_with_the_key(logs: dict[KeyRole, Log]) -> None:
    stolen, bundle = KEYS[KeyRole.STATUS], logs[KeyRole.CERTIFICATE].bundle(1, at=NOW)
    del bundle["log"]
    certificate = logs[KeyRole.CERTIFICATE].certificate
    invented = {
        "envelope": certificate.envelope_digest,
        "certificate_id": certificate.id,
        "issue": 1,
        "status": "revoked",
        "reason": "other",
        "since": format_instant(NOW),
    }
    forged = status_of(stolen, sequence=2**53 - 1, listed=(invented,))
    assert outcome(bundle, status=forged) == (13, "revoked")
    successor = key_for(KeyRole.STATUS)
    revoked = replace(stolen.public, revoked_from=NOW)
    trusted = (KEYS[KeyRole.CERTIFICATE].public, revoked, successor.public)
    assert outcome(bundle, trusted, status=forged) == (13, "bad_status")
    seen = {ORIGIN: SeenStatus(2**53 - 1, "sha256:x", stolen.key_id)}
    genuine = status_of(successor, sequence=8)
    assert outcome(bundle, trusted, status=genuine, status_seen=seen) == (0, "verified")


LATER = NOW + HOUR
"""When version 2 of a keyset is read that version 1 signed the certificate under."""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (0, "verified")),
        ({"not_after": LATER}, (0, "verified")),
        ({"not_after": LATER - timedelta(seconds=1)}, (9, "expired")),
        ({"not_after": NOW}, (9, "expired")),
        ({"not_after": NOW - timedelta(seconds=1)}, (6, "key_outside_window")),
        ({"not_before": NOW}, (0, "verified")),
        ({"not_before": NOW + timedelta(seconds=1)}, (6, "key_outside_window")),
        ({"roles": frozenset({KeyRole.STATUS})}, (3, "key_outside_role")),
        ({"roles": frozenset({KeyRole.CERTIFICATE, KeyRole.STATUS})}, (0, "verified")),
        (None, (3, "unknown_key")),
    ],
    ids=[
        "as it was",
        "ends later",
        "ended a second ago",
        "ended as it signed",
        "ended before it signed",
        "begins as it signed",
        "begins after it signed",
        "another role",
        "one role more",
        "left out",
    ],
)
def test_the_newest_keyset_decides_about_window_and_roles(
    document: Callable[..., dict[str, Any]], change: dict[str, Any] | None, expected: Any
) -> None:
    """A window that was shortened or lengthened since, a key that was moved, and one left out."""
    key, root = KEYS[KeyRole.CERTIFICATE], SigningKey.generate()
    bundle = json.loads(certified(document(), key).bundle)
    records = [KEYS[KeyRole.STATUS].public]
    records += [] if change is None else [replace(key.public, **change)]
    version = None
    for keys in ([key.public], records):
        version = draft_keyset(
            version,
            roots=Roots.of([root.public], threshold=1),
            keys=keys,
            revoked=[],
            issued_at=NOW,
            expires_at=LATER,
        ).signed_by(root)
    assert version is not None
    anchor = Roots.of([root.public], threshold=1)
    accepted = accept_keyset([read_keyset(version.as_bytes())], anchor, LATER)
    assert outcome(bundle, accepted.public_keys(), now=LATER) == expected
    with pytest.raises(KeysetError) as caught:
        accept_keyset([version], anchor, LATER + timedelta(seconds=1))
    assert caught.value.code == "keyset_expired"


def test_roles_travel_in_records_and_keysets() -> None:
    for key in KEYS.values():
        assert PublicKey.from_record(key.public.as_record()) == key.public
    root = SigningKey.generate()
    draft = draft_keyset(
        None,
        roots=Roots.of([root.public], threshold=1),
        keys=[*TRUSTED, (every_role := SigningKey.generate()).public],
        revoked=[],
        issued_at=NOW,
        expires_at=NOW + HOUR,
    )
    keyset = read_keyset(draft.signed_by(root).as_bytes()).keyset
    assert keyset.public_keys() == (*TRUSTED, every_role.public)
    assert (
        b'"roles"'
        not in draft.envelope.payload.partition(b'"keys":')[2]
        .partition(every_role.key_id.encode())[2]
        .partition(b"}")[0]
    )


@pytest.mark.parametrize("roles", [[], "certificate", ["notary"], [3]])
def test_unknown_roles_are_refused(roles: Any) -> None:
    record = {**TRUSTED[0].as_record(), "roles": roles}
    with pytest.raises(KeyFailure):
        PublicKey.from_record(record)


def test_the_newest_key_of_a_role_signs_and_rotation_replaces_it_alone(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    for role in (KeyRole.CERTIFICATE, KeyRole.CHECKPOINT, KeyRole.STATUS):
        store.new(roles=(role,))
    status = store.signing_key(role=KeyRole.STATUS)
    assert status is not None
    assert status.public.roles == {KeyRole.STATUS}
    assert store.signing_key(role=KeyRole.RUN) is None
    _, shortened = store.rotate(HOUR, role=KeyRole.STATUS)
    assert shortened == 1
    # Its certificates would end with it.
    assert store.rotate(HOUR, role=KeyRole.CERTIFICATE)[1] == 0
    checkpoint = store.signing_key(role=KeyRole.CHECKPOINT)
    assert checkpoint is not None
    with pytest.raises(KeyFailure, match="only key"):
        store.retire(checkpoint.key_id)


def test_a_key_for_everything_is_replaced_once_each_role_has_its_own(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.new()
    roles = (KeyRole.CERTIFICATE, KeyRole.CHECKPOINT, KeyRole.STATUS)
    assert [store.rotate(HOUR, role=role)[1] for role in roles] == [0, 0, 1]
