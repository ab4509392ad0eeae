"""A certificate's leaf follows from its bundle alone and depends on every byte of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from affidavit.assessment import certify
from affidavit.certificate.issuance import Certificate, issue
from affidavit.plan import plan_from
from affidavit.trust import SigningKey, read_envelope
from affidavit.trust.log import LogEntry, certificate_entry


@dataclass(frozen=True)
class Superseded:
    issue: int
    envelope_digest: str


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return SigningKey.generate("test")


@pytest.fixture
def certificate(document: Any, key: SigningKey) -> Certificate:
    return certified(document, key)


def certified(document: Any, key: SigningKey, **changes: Any) -> Certificate:

    assessment = certify(plan_from(document(**changes)), second_opinion=False)
    at = datetime(2026, 11, 21, 12, tzinfo=UTC)
    return issue(assessment, key, requester="token:ci", issued_at=at)


def leaf_of(bundle: bytes) -> LogEntry:
    envelope = read_envelope(json.loads(bundle)["envelope"])
    return certificate_entry(envelope, json.loads(envelope.payload))


def test_by_hand(certificate: Certificate) -> None:
    """What docs/reference/log.md tells an auditor to do, with nothing but json and sha256."""
    bundle = json.loads(certificate.bundle)
    envelope = json.dumps(bundle["envelope"], sort_keys=True, separators=(",", ":")).encode()
    predicate = certificate.statement["predicate"]
    content = {
        "actor": "token:ci",
        "at": "2026-11-21T12:00:00.000000+00:00",
        "body": {
            "envelope": "sha256:" + hashlib.sha256(envelope).hexdigest(),
            "key_id": bundle["envelope"]["signatures"][0]["keyid"],
            "plan_digest": "sha256:" + certificate.statement["subject"][0]["digest"]["sha256"],
            "policy": predicate["policy"],
            "verdict": "certified",
        },
        "kind": "certificate",
        "subject": certificate.id,
    }
    raw = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    entry = leaf_of(certificate.bundle)
    assert entry.content == raw
    assert entry.leaf_hash == hashlib.sha256(b"\x00" + raw).digest()


def test_layout_does_not_matter_and_the_signature_does(
    certificate: Certificate, document: Any
) -> None:
    pretty = json.dumps(json.loads(certificate.bundle), indent=3).encode()
    assert leaf_of(pretty) == leaf_of(certificate.bundle)
    again = certified(document, SigningKey.generate("other"))
    assert leaf_of(again.bundle).leaf_hash != leaf_of(certificate.bundle).leaf_hash


def test_a_refusal_is_logged_as_one(document: Any, key: SigningKey) -> None:
    refused = certified(document, key, target={"epsilon": 0.1, "delta": 1e-5})
    assert leaf_of(refused.bundle).kind == "refusal"
    assert leaf_of(refused.bundle).body["verdict"] == "under_noised"


def test_what_an_issue_supersedes_stands_in_its_entry(document: Any, key: SigningKey) -> None:
    assessment = certify(plan_from(document()), second_opinion=False)
    at = datetime(2026, 11, 21, 12, tzinfo=UTC)
    former = Superseded(issue=2, envelope_digest="sha256:" + 64 * "e")
    created = issue(assessment, key, requester="token:ci", issued_at=at, previous=former)
    assert leaf_of(created.bundle).body["supersedes"] == former.envelope_digest
    first = issue(assessment, key, requester="token:ci", issued_at=at)
    assert "supersedes" not in leaf_of(first.bundle).body


def test_times_are_written_in_utc() -> None:
    at = datetime(2026, 11, 21, 14, 0, 0, 5, tzinfo=timezone(timedelta(hours=2)))
    entry = LogEntry(kind="run", subject="s", actor="a", at=at, body={"z": 1, "a": 2})
    assert entry.content == (
        b'{"actor":"a","at":"2026-11-21T12:00:00.000005+00:00","body":{"a":2,"z":1},'
        b'"kind":"run","subject":"s"}'
    )
