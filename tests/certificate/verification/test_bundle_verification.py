"""Every step of verification has an input that only it rejects."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.certificate.issuance import Certificate, issue
from affidavit.certificate.verification.bundle_verification import verify
from affidavit.plan import Plan, canonical_json
from affidavit.trust import (
    STEPS,
    PublicKey,
    SigningKey,
    VerificationError,
    development_key,
    sign_envelope,
)
from affidavit.trust.dsse import PAYLOAD_TYPE
from tests.support.trust import trusting

GUARANTEE = {
    "epsilon": {"lower": "1", "upper": "2"},
    "delta": {"lower": "1e-5", "upper": "1e-5"},
    "adjacency": "zero_out",
    "unit": "example",
    "mu": None,
}


def rejected(
    bundle: bytes, key: SigningKey, *, plan: Plan | None = None, now: datetime | None = None
) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        verify(bundle, trusting(key.public, at=now), plan=plan)
    assert caught.value.step_name == STEPS[caught.value.step - 1]
    assert caught.value.remedy
    return caught.value


def resigned(
    certificate: Certificate, key: SigningKey, payload_type: str = PAYLOAD_TYPE, **changes: Any
) -> bytes:
    """The bundle with its predicate (or statement, for names in it) changed and signed anew."""
    statement = json.loads(json.dumps(certificate.statement))
    for name, value in changes.items():
        (statement if name in statement else statement["predicate"])[name] = value
    payload = canonical_json(statement)
    envelope = sign_envelope(payload, key, payload_type)
    document = json.loads(certificate.bundle)
    return json.dumps({**document, "envelope": envelope.as_document()}).encode()


def test_a_good_bundle_passes_every_step(
    certificate: Certificate, key: SigningKey, plan: Plan
) -> None:
    verified = verify(certificate.bundle, trusting(key.public), plan=plan)
    assert [name for _, name, _ in verified.steps] == list(STEPS)
    assert verified.predicate["verdict"] == "under_noised"


@pytest.mark.soak
def test_the_largest_plan_verifies(make_plan: Any, key: SigningKey) -> None:
    releases = [
        {"name": f"block-{place}", "clip_norm": 0.1, "noise_multiplier": 100.5}
        for place in range(9_999)
    ]
    large = make_plan(releases=releases)
    result = certify(large, second_opinion=False)
    now = datetime.now(UTC).replace(microsecond=0)
    issued = issue(result, key, requester="tests", issued_at=now)
    bundle = json.dumps(issued.as_result(result)["certificate"]["bundle"]).encode()
    assert len(bundle) > 1024 * 1024
    assert verify(bundle, trusting(key.public), plan=large).statement == issued.statement


def test_layout_is_not_signed_but_content_is(certificate: Certificate, key: SigningKey) -> None:
    pretty = json.dumps(json.loads(certificate.bundle), indent=2).encode()
    assert verify(pretty, trusting(key.public)).statement == certificate.statement


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_any_single_byte_changed_is_rejected(
    certificate: Certificate, key: SigningKey, every: int
) -> None:
    steps = set()
    for place in range(0, len(certificate.bundle), every):
        changed = bytearray(certificate.bundle)
        changed[place] ^= 1 << (place % 7)
        steps.add(rejected(bytes(changed), key).step)
    assert {1, 2, 3, 4} <= steps


def test_step_1_form(certificate: Certificate, key: SigningKey) -> None:
    document = json.loads(certificate.bundle)
    envelope = document["envelope"]
    signature = envelope["signatures"][0]
    last = signature["sig"][-3]
    other = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef"[("ABCDEFGHIJKLMNOP".find(last) + 1) % 16]
    for bad in (
        {},
        [],
        {**document, "extra": 1},
        {**document, "bundleType": "application/json"},
        {**document, "envelope": {**envelope, "extra": 1}},
        {**document, "envelope": {**envelope, "signatures": []}},
        {**document, "envelope": {**envelope, "signatures": [signature, signature]}},
        {**document, "envelope": {**envelope, "payload": "!!"}},
        {**document, "envelope": {**envelope, "payload": 7}},
        {
            **document,
            "envelope": {
                **envelope,
                "signatures": [{**signature, "sig": signature["sig"][:-3] + other + "=="}],
            },
        },
    ):
        assert rejected(json.dumps(bad).encode(), key).step in (1, 4)
    for raw in (b"", b"not json", b"\xff", b"[" * 100_000, b'{"envelope": 1, "envelope": 2}'):
        assert rejected(raw, key).step == 1
    assert rejected(b" " * 9_000_000, key).step == 1


def test_step_1_base64_has_one_form(certificate: Certificate, key: SigningKey) -> None:
    """Bits that base64 drops must be zero, or two bundles would carry one signature."""
    document = json.loads(certificate.bundle)
    signature = document["envelope"]["signatures"][0]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    assert signature["sig"].endswith("==")
    twin = alphabet[alphabet.index(signature["sig"][-3]) + 1]
    spelled_otherwise = signature["sig"][:-3] + twin + "=="
    assert base64.b64decode(spelled_otherwise) == base64.b64decode(signature["sig"])
    signature["sig"] = spelled_otherwise
    assert rejected(json.dumps(document).encode(), key).step == 1


def test_step_2_payload_type(certificate: Certificate, key: SigningKey) -> None:
    error = rejected(resigned(certificate, key, payload_type="application/json"), key)
    assert (error.step, error.code) == (2, "bad_payload_type")


def test_step_3_a_key_nobody_trusts(certificate: Certificate, key: SigningKey) -> None:
    stranger = SigningKey.generate()
    assert rejected(certificate.bundle, stranger).code == "unknown_key"
    assert rejected(resigned(certificate, stranger), key).step == 3


def test_step_3_a_development_key_is_trusted_by_nobody(certificate: Certificate) -> None:
    development = SigningKey.generate(development=True)
    for key in (development, development_key()):
        error = rejected(resigned(certificate, key), key)
        assert (error.step, error.code) == (3, "untrusted_key")


def test_step_4_the_right_key_id_on_another_keys_signature(
    certificate: Certificate, key: SigningKey
) -> None:
    document = json.loads(resigned(certificate, SigningKey.generate()))
    document["envelope"]["signatures"][0]["keyid"] = key.key_id
    assert rejected(json.dumps(document).encode(), key).code == "bad_signature"


@pytest.mark.parametrize(
    "changes",
    [
        {"_type": "https://in-toto.io/Statement/v0.1"},
        {"predicateType": "https://slsa.dev/provenance/v1"},
        {"predicate": 7},
        {"critical": ["verdict", "self_destruct"]},
        {"critical": None},
        {"critical": [{}]},
        {"validity": {"not_before": "yesterday", "not_after": "tomorrow"}},
        {"verdict": "perfect"},
        {"verdict": ["certified"]},
        {"verdict": "certified", "guarantee": None},
        {"requester": ["carol"]},
        {"guarantee": {}},
        {"guarantee": {**GUARANTEE, "adjacency": None}},
        {"guarantee": {**GUARANTEE, "delta": "1e-5"}},
        {"guarantee": {**GUARANTEE, "epsilon": {"lower": "1"}}},
        {"guarantee": {**GUARANTEE, "epsilon": {"lower": "1", "upper": 8}}},
        {"guarantee": {**GUARANTEE, "epsilon": {"lower": "1", "upper": "NaN"}}},
        {"guarantee": {**GUARANTEE, "epsilon": {"lower": "8", "upper": "1"}}},
        {"guarantee": {**GUARANTEE, "epsilon": {"lower": "-1", "upper": "1"}}},
        {"guarantee": {**GUARANTEE, "epsilon": {"lower": "1", "upper": "1e400"}}},
        {"guarantee": {**GUARANTEE, "delta": {"lower": "1", "upper": "1"}}},
        {"guarantee": {**GUARANTEE, "mu": "-1"}},
        {"guarantee": {**GUARANTEE, "mu": 1}},
        {"obligations": None},
        {"obligations": [{"code": 7}]},
        {"reasons": None},
        {"reasons": [{}]},
    ],
)
def test_step_5_statement(
    certificate: Certificate, key: SigningKey, changes: dict[str, Any]
) -> None:
    assert rejected(resigned(certificate, key, **changes), key).step == 5


def test_step_6_key_outside_its_window(certificate: Certificate, key: SigningKey) -> None:
    past = datetime(2020, 1, 1, tzinfo=UTC)
    retired = PublicKey(key=key.public.key, not_before=past, not_after=past + timedelta(days=1))
    with pytest.raises(VerificationError) as caught:
        verify(certificate.bundle, trusting(retired))
    assert (caught.value.step, caught.value.code) == (6, "key_outside_window")


def test_step_7_another_plan(
    certificate: Certificate, key: SigningKey, make_plan: Any, plan: Plan
) -> None:
    assert rejected(certificate.bundle, key, plan=make_plan(steps=409)).code == "other_plan"
    swapped = {**certificate.statement["predicate"]["plan"], "steps": 409}
    assert rejected(resigned(certificate, key, plan=swapped), key).code == "bad_subject"
    elsewhere = [{"name": "plan", "digest": {"sha256": "0" * 64}}]
    assert rejected(resigned(certificate, key, subject=elsewhere), key, plan=plan).step == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "certified"},
        {
            "verdict": "certified",
            "guarantee": {**GUARANTEE, "delta": {"lower": "0", "upper": "1e-4"}},
        },
        {"noise_multiplier": {"joint": "0.335", "releases": []}},
        {"noise_multiplier": None},
        {"guarantee": {**GUARANTEE, "adjacency": "add_remove"}},
        {"guarantee": {**GUARANTEE, "unit": "user"}},
    ],
)
def test_step_7_numbers_that_the_plan_cannot_have(
    certificate: Certificate, key: SigningKey, changes: dict[str, Any]
) -> None:
    refused = rejected(resigned(certificate, key, **changes), key)
    assert (refused.step, refused.code) == (7, "bad_statement")


def test_step_7_joint_noise_that_the_solved_noise_does_not_have(
    make_plan: Any, key: SigningKey
) -> None:
    left_out = [{"name": "all", "count": 4, "clip_norm": 1.0}]
    result = certify(make_plan(releases=left_out), second_opinion=False)
    issued = issue(
        result, key, requester="tests", issued_at=datetime.now(UTC).replace(microsecond=0)
    )
    assert verify(issued.bundle, trusting(key.public)).predicate["verdict"] == "certified"
    noise = {**issued.statement["predicate"]["noise_multiplier"], "joint": "13.6"}
    assert rejected(resigned(issued, key, noise_multiplier=noise), key).code == "bad_statement"


def test_step_9_validity(certificate: Certificate, key: SigningKey) -> None:
    now = datetime.now(UTC)
    assert rejected(certificate.bundle, key, now=now - timedelta(days=1)).code == "not_yet_valid"
    assert rejected(certificate.bundle, key, now=now + timedelta(days=366)).code == "expired"
