"""An evidence file made here verifies with the keys alone; an altered byte anywhere is named."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from affidavit import client
from affidavit.evidence import (
    BadReplayRecord,
    Canaries,
    EvidenceError,
    complete_evidence,
    losses_as_bytes,
    verify_evidence,
    write_evidence,
)
from affidavit.evidence.evidence_file import (
    AUDIT,
    MANIFEST,
    REPLAY,
    STORY,
    TIMESTAMP,
    VERIFIER,
    read_evidence,
)
from affidavit.gate import evidence as commands
from affidavit.gate import runs
from affidavit.gate.cli import app
from affidavit.plan import canonical_json, digest_of
from affidavit.service.audit import evidence as collecting
from affidavit.trust import PublicKey, TrustedKeys
from tests.service.runs.conftest import ON_SQLITE, Yard
from tests.support.random_seeds import seeded
from tests.support.run_records import record_of, replay_record
from tests.trust.log.test_timestamps import CONFIGURATION, Authority, party


@dataclass
class Made:
    """An evidence file, and what a verifier trusts."""

    raw: bytes
    trusted: TrustedKeys

    @property
    def files(self) -> dict[str, bytes]:
        return read_evidence(self.raw)

    def with_files(self, **changes: bytes | None) -> bytes:
        """The same with other files, and a manifest that lists them."""
        files = {name: content for name, content in self.files.items() if name != MANIFEST}
        for name, content in changes.items():
            if content is None:
                del files[name]
            else:
                files[name] = content
        return b"".join(write_evidence(files))

    def refused(self, raw: bytes) -> EvidenceError:
        with pytest.raises(EvidenceError) as caught:
            verify_evidence(raw, self.trusted)
        return caught.value


def fetch(yard: Yard, path: str) -> bytes:
    """Ask until the log has the newest entries, which takes a second at most."""
    end = datetime.now(UTC).timestamp() + 60
    while datetime.now(UTC).timestamp() < end:
        answer = yard.ask("GET", path, "audit")
        if answer.status_code == 200:
            return bytes(answer.content)
        assert answer.json()["code"] in ("evidence_incomplete", "not_logged"), answer.text
    raise AssertionError(answer.text)


def trusted_by(yard: Yard) -> TrustedKeys:
    records = yard.ask("GET", "/v1/keys", "audit").json()["keys"]
    keys = (*map(PublicKey.from_record, records), yard.key.public)
    return TrustedKeys(keys, policy=None)


CANARIES = Canaries.of(bytes(32), 20, None)


def made_of(
    yard: Yard, steps: int, *, canaries: bool = False, again: bool = False, **plan: Any
) -> Made:
    """A certificate that is approved, unless it was before, a run of it, and the file of both."""
    policy = {"schema_version": 1, "name": "rules", "version": 1, "datasets": ["toy"]}
    yard.ask("POST", "/v1/policies", "admin", {**policy, "approvals": 1})
    if canaries:
        plan["canaries"] = {"count": CANARIES.count}
    certificate = yard.certify(**plan)
    current = yard.ask("GET", f"/v1/certificates/{certificate}", "audit").json()
    decision = {"envelope": current["certificate"]["envelope_digest"], "comment": "seen <b>"}
    path = f"/v1/certificates/{certificate}/approvals"
    assert again or yard.ask("POST", path, "approve", decision).is_success
    run = yard.request(certificate).json()
    job = yard.claim()
    committed = {"canaries": CANARIES.commitment} if canaries else {}
    record = record_of(yard.predicate(job), steps, **committed)
    yard.say(job, "start", plan_digest=job["plan_digest"], wants=0)
    yard.say(job, "heartbeat", steps=0, wants=steps, head=json.loads(record.lines[0])["digest"])
    yard.say(job, "heartbeat", steps=0, wants=steps)
    assert yard.complete(job, record).json()["state"] == "settled"
    return Made(fetch(yard, f"/v1/runs/{run['id']}/evidence"), trusted_by(yard))


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe", "link", "object"), tag
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


@ON_SQLITE
def test_an_evidence_file_verifies_offline_and_tells_the_run(yard: Yard) -> None:
    made = made_of(yard, 10)
    report = verify_evidence(made.raw, made.trusted)
    assert [step for step, _, _ in report.steps] == list(range(1, 16))
    assert report.unchecked == (8, 13, 15)  # no keyset was published, and nothing added
    files = made.files
    with zipfile.ZipFile(io.BytesIO(made.raw)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == files
    # The links lead to files beside the page, and to every one of them.
    links = _Links()
    links.feed(files[STORY].decode())
    assert set(links.found) == files.keys() - {STORY}
    assert b"seen <b>" not in files[STORY]
    entries = [json.loads(line) for line in files["log/entries.jsonl"].splitlines()]
    assert {entry["kind"] for entry in entries} >= {
        *("certificate", "approval", "run", "reservation", "commitment", "settlement"),
    }
    assert all("salt" in entry for entry in entries if entry["kind"] != "certificate")
    # Made again, it differs only in its time and in what is signed anew.
    again = fetch(yard, f"/v1/runs/{report.about['run']}/evidence")
    same = {name for name, content in read_evidence(again).items() if content == files[name]}
    moving = {"about.json", "status.json", "log/proofs.json", "bundle.json", MANIFEST, STORY}
    assert files.keys() - same <= moving
    # A certificate without a run has one too, and only an auditor gets either.
    path = f"/v1/certificates/{report.about['certificate']}/evidence"
    alone = verify_evidence(fetch(yard, path), made.trusted)
    assert (alone.about["run"], alone.unchecked) == (None, (8, 9, 10, 11, 12, 13, 15))
    for who in ("submit", "approve", "work", "admin"):
        assert yard.ask("GET", path, who).status_code == 403
    name = f"/runs/{report.about['run']}"
    assert f'href="{name}/evidence.zip"' in yard.ask("GET", name, "audit").text
    assert verify_evidence(fetch(yard, f"{name}/evidence.zip"), made.trusted).about["run"]


@ON_SQLITE
def test_what_the_file_says_by_itself_is_not_believed(yard: Yard) -> None:
    """With a manifest that lists the changed file, another step names it."""
    made = made_of(yard, 10)
    files = made.files

    def changed(name: str, change: Callable[[Any], Any]) -> bytes:
        return canonical_json(change(json.loads(files[name])))

    record = files["record.jsonl"].splitlines(keepends=True)
    lines = files["log/entries.jsonl"].splitlines(keepends=True)
    ledger = json.loads(files["ledger.json"])
    ledger["events"][0]["state"] += " "
    forged: dict[str, tuple[bytes | None, int]] = {
        "about.json": (changed("about.json", lambda about: {**about, "at": "later"}), 7),
        "plan.json": (changed("plan.json", lambda plan: {**plan, "steps": 1}), 5),
        "policy.json": (changed("policy.json", lambda rules: {**rules, "approvals": 0}), 5),
        "waivers.json": (b"[1]", 5),
        "issues.json": (b"[]", 6),
        "status.json": (b"{}", 7),
        "keysets.json": (b"[{}]", 8),
        "keys.json": (None, 8),
        "log/entries.jsonl": (b"".join(lines[:-1]), 4),
        "log/proofs.json": (changed("log/proofs.json", lambda p: {**p, "entries": []}), 4),
        "ledger.json": (canonical_json(ledger), 12),
        "record.jsonl": (b"".join(record[:-1]), 11),
        "conformance.json": (changed("conformance.json", lambda c: {**c, "findings": [1]}), 11),
        "provenance.json": (b"{}", 10),
        STORY: (files[STORY].replace(b"conforms", b"does not conform"), 14),
        VERIFIER: (files[VERIFIER].replace(b"Rejected", b"Verified"), 14),
    }
    assert files.keys() - forged.keys() == {MANIFEST, "bundle.json", "audit.json"}
    for name, (content, step) in forged.items():
        error = made.refused(made.with_files(**{name: content}))
        assert error.step == step, (name, str(error))
    # A list of decisions is a list, though an empty text has none either.
    another = {"approvals": {"decisions": ""}, "revocation": None}
    issues = changed("issues.json", lambda issues: [*issues, another])
    assert made.refused(made.with_files(**{"issues.json": issues})).step == 6
    # A worker whose key nobody trusts, and a certificate of another service.
    workers = TrustedKeys(made.trusted.keys[:-1], policy=None)
    assert Made(made.raw, workers).refused(made.raw).code == "bad_provenance"
    nobody = TrustedKeys((), policy=None)
    error = Made(made.raw, nobody).refused(made.raw)
    assert (error.step, error.code) == (3, "unknown_key")


def audited(right: int = CANARIES.guesses // 2) -> dict[str, Any]:
    """Canaries and losses of which so many guesses are right."""
    losses = [0.5 if included else 2.0 for included in CANARIES.included]
    wrong = [n for n, included in enumerate(CANARIES.included) if included]
    for number in wrong[: CANARIES.guesses - right]:
        losses[number] = 3.0
    return {"canaries": json.loads(CANARIES.as_bytes()), "losses": losses}


def replayed(made: Made, **changes: Any) -> bytes:
    """The record of a replay on the certified plan."""
    record = replay_record(digest_of(json.loads(made.files["plan.json"])))
    return json.dumps({**record, **changes}).encode()


@ON_SQLITE
def test_a_replay_and_a_timestamp_are_added_and_verified(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_of(yard, 10)
    (tmp_path / "configuration").write_text(CONFIGURATION)
    root, other = party(None, "root"), party(None, "other")
    authority = Authority(tmp_path, root, party(root))
    roots, others = (one.certificate.public_bytes(Encoding.PEM) for one in (root, other))
    raw = complete_evidence(made.raw, replayed(made), authority.stamp)
    report = verify_evidence(raw, made.trusted, stamp_roots=roots)
    assert report.unchecked == (8,)
    assert verify_evidence(raw, made.trusted).unchecked == (8, 15)
    assert b"neighbouring data sets for 3 steps" in read_evidence(raw)[STORY]
    # So does the command that fetches the file.
    service = SimpleNamespace(evidence=lambda _kind, _id: made.raw)
    monkeypatch.setattr(commands, "connect", lambda _: nullcontext(service))
    monkeypatch.setattr(client, "request_timestamp", lambda content, **_: authority.stamp(content))
    (tmp_path / "replay.json").write_bytes(replayed(made))
    given = ["--replay", str(tmp_path / "replay.json"), "--stamp", "https://tsa.example.com"]
    command = ["evidence", report.about["run"], "--out", str(tmp_path / "e.zip"), *given]
    assert CliRunner().invoke(app, command).exit_code == 0
    fetched = (tmp_path / "e.zip").read_bytes()
    assert verify_evidence(fetched, made.trusted, stamp_roots=roots).unchecked == (8,)
    # The authority saw this manifest and no other, and another authority nothing.
    later = Made(raw, made.trusted)
    changed = later.with_files(**{"audit.json": b"[1]"})
    for content, trusted in ((changed, roots), (raw, others), (raw, b"none")):
        with pytest.raises(EvidenceError) as caught:
            verify_evidence(content, made.trusted, stamp_roots=trusted)
        assert (caught.value.step, caught.value.code) == (15, "bad_timestamp")
    for content in (replayed(made, plan=None), replayed(made, plan="sha256:0"), b"{}"):
        with pytest.raises(BadReplayRecord):
            complete_evidence(made.raw, content, None)
    for content in (b"{}", b"[]", b"{ }", canonical_json(json.loads(replayed(made, plan=None)))):
        assert made.refused(later.with_files(**{REPLAY: content})).step == 13
    odd = canonical_json(json.loads(replayed(made, checks=3)))
    assert made.refused(later.with_files(**{REPLAY: odd})).step == 14


def added_again(
    yard: Yard, path: str, audit: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    """The exit code of the command that adds an audit."""

    def add(_run: str, canaries: Any, losses: Any) -> client.RunTest:
        sent = {"canaries": canaries, "losses": list(losses)}
        answer = yard.ask("POST", f"{path}/audit", "admin", sent)
        return client.RunTest.model_validate(answer.json())

    monkeypatch.setattr(runs, "connect", lambda _: nullcontext(SimpleNamespace(add_audit=add)))
    files = {"canaries": CANARIES.as_bytes(), "losses": losses_as_bytes(audit["losses"])}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    told = [f"--{name}={folder / name}" for name in files]
    command = ["runs", "audit", path.rpartition("/")[2], *told]
    return CliRunner().invoke(app, command).exit_code


@pytest.mark.soak
@ON_SQLITE
def test_the_service_has_tests_and_a_timestamp_of_its_own(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_of(yard, 10, canaries=True)
    path = f"/v1/runs/{json.loads(made.files['about.json'])['run']}"
    record = json.loads(replayed(made))
    assert yard.ask("POST", f"{path}/replay", "admin", {**record, "plan": None}).status_code == 422
    for _ in range(2):
        assert yard.ask("POST", f"{path}/replay", "admin", record).status_code == 200
    another = {**record, "verdict": "refuted"}
    assert yard.ask("POST", f"{path}/replay", "admin", another).json()["code"] == "wrong_state"
    audit = audited()
    other = {**audit["canaries"], "nonce": "7a" * 32}
    for wrong in ({**audit, "canaries": other}, {**audit, "losses": [1.0, 2.0]}):
        answer = yard.ask("POST", f"{path}/audit", "admin", wrong)
        assert (answer.status_code, answer.json()["code"]) == (422, "wrong_audit")
    assert yard.ask("POST", f"{path}/audit", "admin", audit).json()["verdict"] == "not_refuted"
    assert added_again(yard, path, audit, tmp_path, monkeypatch) == 0
    answer = yard.ask("POST", f"{path}/audit", "admin", audited(right=6))
    assert answer.json()["code"] == "wrong_state"
    page = yard.ask("GET", path.removeprefix("/v1"), "audit").text
    assert page.count("not refuted") == 2
    (tmp_path / "configuration").write_text(CONFIGURATION)
    root = party(None, "root")
    authority = Authority(tmp_path, root, party(root))
    collector = yard.client.app.state.services.evidence
    object.__setattr__(collector, "authority", "https://tsa.example.com")
    monkeypatch.setattr(collecting, "request_timestamp", lambda raw, _: authority.stamp(raw))
    raw = fetch(yard, f"{path}/evidence")
    roots = root.certificate.public_bytes(Encoding.PEM)
    report = verify_evidence(raw, made.trusted, stamp_roots=roots)
    assert report.unchecked == (8,)
    with_both = Made(raw, made.trusted)
    assert b"added a replay of the run" in with_both.files[STORY]
    assert b"3 of 6 guesses" in with_both.files[STORY]
    # Neither another record nor none passes for the logged one, nor is a second one added.
    for name in (REPLAY, AUDIT):
        for content in (None, canonical_json(another)):
            assert made.refused(with_both.with_files(**{name: content})).step == 13
    assert made.refused(made.with_files(**{AUDIT: with_both.files[AUDIT]})).step == 13
    with pytest.raises(BadReplayRecord):
        complete_evidence(raw, replayed(made), None)

    def fails(_raw: bytes, _url: str) -> bytes:
        raise client.NoTimestamp("it is closed")

    monkeypatch.setattr(collecting, "request_timestamp", fails)
    answer = yard.ask("GET", f"{path}/evidence", "audit")
    assert (answer.status_code, answer.json()["code"]) == (503, "not_stamped")


@ON_SQLITE
def test_an_altered_byte_anywhere_is_named(yard: Yard) -> None:
    mutate(made_of(yard, 10), random.Random(seeded(300)), 300)


DECLARED = {"audit.json", "keys.json", "issues.json", "about.json", REPLAY, TIMESTAMP}
"""Of which nothing vouches for a part: for dates of issues, or for another release's page."""


def refusing_step(made: Made, raw: bytes) -> int:
    """The step that refuses, or 0."""
    try:
        verify_evidence(raw, made.trusted)
    except EvidenceError as error:
        return error.step
    return 0


def relist(made: Made, chance: random.Random, count: int) -> None:
    """Alter a file and list its new digest: only what a file declares can be altered."""
    files = {name: content for name, content in made.files.items() if name != MANIFEST}
    for _ in range(count):
        name = chance.choice(sorted(files))
        content = bytearray(files[name])
        for _ in range(chance.choice((1, 1, 1, 20))):
            if content:
                content[chance.randrange(len(content))] = chance.choice(b'"{}[]0,:anul \x00\xff')
        if chance.random() < 0.1:
            content = content[: chance.randrange(len(content) + 1)]
        raw = made.with_files(**{name: bytes(content)})
        if raw == made.raw:
            continue
        assert refusing_step(made, raw) > 2 or name in DECLARED, name


@ON_SQLITE
def test_an_altered_file_that_the_manifest_lists_is_refused_later(yard: Yard) -> None:
    relist(made_of(yard, 10), random.Random(seeded(40)), 40)


@ON_SQLITE
@pytest.mark.soak
def test_20000_listed_files_are_refused_later(yard: Yard) -> None:
    relist(made_of(yard, 10), random.Random(seeded(20_001)), 20_000)


@ON_SQLITE
@pytest.mark.soak
def test_20000_altered_files_are_refused(yard: Yard) -> None:
    mutate(made_of(yard, 10), random.Random(seeded(20_000)), 20_000)


def mutate(made: Made, chance: random.Random, count: int) -> None:
    """Alter, remove, add and move bytes: the file with the altered byte is named."""
    names = sorted(made.files)
    starts = [made.raw.index(name.encode() + made.files[name]) for name in names]
    starts = [start + len(name) for start, name in zip(starts, names, strict=True)]
    for number in range(count):
        raw = bytearray(made.raw)
        # Every file as often as any other, however long; and everything between them.
        inside = number % 3 and chance.randrange(len(names))
        if inside is not False and number % 3:
            size = len(made.files[names[inside]])
            at = starts[inside] + chance.randrange(max(1, size))
        else:
            at = chance.randrange(len(raw))
        match chance.randrange(4):
            case 0:
                raw[at] ^= 1 << chance.randrange(8)
            case 1:
                raw[at] = (raw[at] + chance.randrange(1, 256)) % 256
            case 2:
                del raw[at]
            case _:
                raw.insert(at, chance.randrange(256))
        if bytes(raw) == made.raw:
            continue
        error = made.refused(bytes(raw))
        assert error.step in (1, 2), (at, str(error))
        named = any(name in error.message for name in names)
        assert named or "the zip" in error.message, str(error)
