"""Verify an evidence file offline, in numbered steps, with the verifier's own trusted keys.

The certificate is verified as everywhere (``certificate.verification``), at the logged time of the
run, because it may have expired since. The log's checkpoint is checked like a monitor's, and every
entry with its salt is proved to be in its tree. All other files have to agree with what is signed
or logged: nothing is taken from the file's own words. What others signed is out of reach of the
file's author; ``about.json``, ``audit.json``, the dates and states in ``issues.json`` and the
amounts in ``ledger.json`` are the service's declarations.

The status list in the file says what was revoked when it was made. Whether the certificate was
revoked since needs a current list (``VerificationOptions.status``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from affidavit.accountants import AFFIDAVIT_VERSION
from affidavit.assessment import PlanNotClosed
from affidavit.certificate import VerificationOptions, verify
from affidavit.certificate.verification import inclusion_verification as log_steps
from affidavit.certificate.verification.status_list import StatusList, read_status
from affidavit.certificate.verification.verification_result import Verifier
from affidavit.evidence.conformance import check_conformance
from affidavit.evidence.evidence_file import (
    AUDIT,
    EVIDENCE_STEPS,
    MANIFEST,
    REPLAY,
    STORY,
    TIMESTAMP,
    VERIFIER,
    EvidenceError,
    load_part,
    part_of,
    read_evidence,
)
from affidavit.evidence.evidence_story import tell_story
from affidavit.evidence.model.audit_record import is_audit_record
from affidavit.evidence.model.canary_audit import BadCanaries
from affidavit.evidence.provenance import BadProvenance, read_provenance
from affidavit.evidence.replay_record import RECORD_TYPE
from affidavit.evidence.verifier_assembly import verifier_page
from affidavit.plan import (
    MalformedPlan,
    PlanError,
    canonical_json,
    digest_of,
    digest_of_bytes,
    load_json,
)
from affidavit.trust import (
    BadEnvelope,
    KeysetError,
    TrustedKeys,
    VerificationError,
    parse_instant,
    read_envelope,
    read_keyset,
)
from affidavit.trust.dates import is_ahead
from affidavit.trust.dsse import decode_base64
from affidavit.trust.log import (
    BadLogPart,
    BadNote,
    BadTimestamp,
    Checkpoint,
    merkle_tree,
    read_checkpoint,
    read_consistency,
    verify_timestamp,
)

ALTERED = (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError)
OF_RUNS = ("conformance.json", "ledger.json", "provenance.json", "record.jsonl")
ENDS = frozenset({"settled", "failed", "cancelled"})


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceReport:
    """A file that passed every step; ``unchecked`` are the steps that had nothing to check."""

    about: Mapping[str, Any]
    predicate: Mapping[str, Any]
    steps: tuple[tuple[int, str, str], ...]
    unchecked: tuple[int, ...]


def verify_evidence(
    raw: bytes,
    trusted: TrustedKeys,
    options: VerificationOptions | None = None,
    stamp_roots: bytes | None = None,
) -> EvidenceReport:
    """Check an evidence file against ``trusted`` keys; raises ``EvidenceError``.

    ``stamp_roots`` are the certificates (PEM) of the authorities whose timestamp of the file
    counts. Without them it is not checked.
    """
    files = read_evidence(raw)
    check = _Check(
        files=files,
        trusted=trusted,
        options=options or VerificationOptions(),
        stamp_roots=stamp_roots,
    )
    check.note(1, f"{len(raw)} bytes, {len(files)} files")
    check.note(2, "every file has its digest")
    for step in (
        check.certificate,
        check.log,
        check.plan_and_policy,
        check.approvals,
        check.status_list,
        check.keysets,
        check.run,
        check.provenance,
        check.conformance,
        check.ledger,
        check.replay_and_audit,
        check.story,
        check.timestamp,
    ):
        step()
    return EvidenceReport(
        about=check.about,
        predicate=check.predicate,
        steps=tuple(check.steps),
        unchecked=tuple(check.unchecked),
    )


@dataclass(kw_only=True, slots=True)
class _Check:
    files: Mapping[str, bytes]
    trusted: TrustedKeys
    options: VerificationOptions
    stamp_roots: bytes | None
    steps: list[tuple[int, str, str]] = field(default_factory=list)
    unchecked: list[int] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    predicate: dict[str, Any] = field(default_factory=dict)
    bundle: dict[str, Any] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    logged_at: datetime | None = None

    def note(self, step: int, detail: str, *, checked: bool = True) -> None:
        self.steps.append((step, EVIDENCE_STEPS[step - 1], detail))
        if not checked:
            self.unchecked.append(step)

    def _require_none(self, step: int, *names: str) -> None:
        """Raise ``EvidenceError`` for a file that nothing in the log is about."""
        for name in names:
            if name in self.files:
                raise _mismatch(step, name, "no entry in the log that it belongs to")

    def of_run(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the logged entries of ``kind`` about the run, in the order of the log."""
        run = self.about.get("run")
        yield from (
            entry for entry in self.entries if (entry["kind"], entry["subject"]) == (kind, run)
        )

    def certificate(self) -> None:
        bundle = part_of(self.files, "bundle.json", 3)
        self.about = _mapping(load_part(self.files, "about.json", 3), "about.json", 3)
        self.entries = _read_entries(self.files)
        options = self.options
        began = next((e for e in self.of_run("run") if e["body"].get("event") == "running"), None)
        if began is not None and options.used_at is None:
            options = replace(options, used_at=_instant(began["at"]))
        try:
            verified = verify(bundle, self.trusted, options=options)
        except VerificationError as error:
            raise EvidenceError(
                3, error.code, f"the certificate: {error.message}", error.remedy
            ) from None
        self.predicate, self.bundle = verified.predicate, json.loads(bundle)
        if self.about.get("certificate") != self.predicate["certificate_id"]:
            raise _mismatch(3, "about.json", "another certificate than bundle.json")
        used = "" if options.used_at is None else f", used at {options.used_at:%Y-%m-%d %H:%M:%S}Z"
        self.note(3, f"verdict {self.predicate['verdict']}, {len(verified.steps)} steps{used}")

    def log(self) -> None:
        proofs = _mapping(load_part(self.files, "log/proofs.json", 4), "log/proofs.json", 4)
        verifier = Verifier(self.trusted, self.options, self.trusted.now())
        try:
            checkpoint = read_checkpoint(proofs["checkpoint"])
            self.logged_at = checkpoint.signed_at
            attestation = log_steps.find_attestation(proofs["checkpoint"], verifier)
            log_steps.check_signature(proofs["checkpoint"], attestation, verifier, issued_at=None)
            log_steps.check_trust_policy(checkpoint, attestation, verifier, may_be_old=False)
            leaves = part_of(self.files, "log/entries.jsonl", 4).splitlines()
            for leaf, proof in zip(leaves, proofs["entries"], strict=True):
                merkle_tree.verify_inclusion(
                    merkle_tree.leaf_hash(leaf),
                    index=proof["index"],
                    size=checkpoint.size,
                    proof=[decode_base64(text) for text in proof["hashes"]],
                    root=checkpoint.root_hash,
                )
            first = read_checkpoint(self.bundle["log"]["checkpoint"])
            self._link(first, checkpoint, proofs)
            self._require_later(first, checkpoint)
        except VerificationError as error:
            raise EvidenceError(4, error.code, error.message, error.remedy) from None
        except (BadNote, BadLogPart, merkle_tree.ProofError, *ALTERED) as error:
            raise EvidenceError(
                4, "evidence_not_logged", f"log/proofs.json does not prove the entries: {error}."
            ) from None
        self.note(4, f"{len(leaves)} entries in the tree of {checkpoint.size}")

    def _link(self, first: Any, second: Any, proofs: Mapping[str, Any]) -> None:
        """Check that the bundle's checkpoint and that of the file are of one growing log."""
        if first.origin != second.origin:
            raise ValueError("two logs")
        hashes: tuple[bytes, ...] = ()
        if first.size != second.size:
            proof = read_consistency(proofs["consistency"])
            if (proof.first, proof.second) != (first.size, second.size):
                raise ValueError("a consistency proof of other trees")
            hashes = proof.hashes
        merkle_tree.verify_consistency(
            first=first.size,
            second=second.size,
            first_root=first.root_hash,
            second_root=second.root_hash,
            proof=hashes,
        )

    def _require_later(self, first: Checkpoint, last: Checkpoint) -> None:
        """Check that the file's checkpoint is dated after all that it contains.

        Else the holder of a key whose window has ended would vouch for what came after it.
        """
        contained = [_instant(entry["at"]) for entry in self.entries]
        contained.append(parse_instant(self.predicate["validity"]["not_before"]))
        if first.signed_at is not None and first.size < last.size:
            contained.append(first.signed_at)
        if last.signed_at is None or is_ahead(max(contained), last.signed_at):
            raise ValueError("its checkpoint is dated before what it contains")

    def plan_and_policy(self) -> None:
        _require_same(self.files, "plan.json", canonical_json(self.predicate["plan"]), 5)
        try:
            waived, policy = self.predicate["waived"], self.predicate["policy"]
            stated, name = policy["digest"], f"{policy['name']} v{policy['version']}"
        except ALTERED:
            raise _mismatch(5, "bundle.json", "no policy that can be read") from None
        _require_same(self.files, "waivers.json", canonical_json(waived), 5)
        if digest_of(load_part(self.files, "policy.json", 5)) != stated:
            raise _mismatch(5, "policy.json", "another policy than the certificate")
        self.note(5, f"policy {name}")

    def approvals(self) -> None:
        """Every decision in ``issues.json`` is in the log, and every logged one is in it."""
        issues = load_part(self.files, "issues.json", 6)
        about = self.predicate["certificate_id"]
        logged = {
            _decision(entry["actor"], entry["body"])
            for entry in self.entries
            if (entry["kind"], entry["subject"]) == ("approval", about)
        }
        revoked = {
            (entry["actor"], entry["body"]["code"], entry["body"]["reason"])
            for entry in self.entries
            if (entry["kind"], entry["subject"]) == ("revocation", about)
        }
        try:
            stated_items = {
                (item["approver"], item["decision"], item["envelope_digest"], item["comment"])
                for issue in _listed(issues)
                for item in _listed(issue["approvals"]["decisions"])
            }
            stated_revocations = {
                (item["revoked_by"], item["code"], item["reason"])
                for issue in issues
                if (item := issue["revocation"]) is not None
            }
        except ALTERED:
            raise _mismatch(6, "issues.json", "no list of issues") from None
        if stated_items != logged or stated_revocations != revoked:
            raise _mismatch(6, "issues.json", "other decisions than the log")
        self.note(6, f"{len(stated_items)} decisions and {len(revoked)} revocations, as logged")

    def status_list(self) -> None:
        """The service's list, of the time of file and checkpoint, with a logged revocation."""
        try:
            listed, _ = read_status(part_of(self.files, "status.json", 7), self.trusted)
        except VerificationError as error:
            raise EvidenceError(7, error.code, error.message, error.remedy) from None
        envelope = read_envelope(self.bundle["envelope"])
        if envelope.key_id not in listed.keys:
            raise _mismatch(7, "status.json", "a list of another service")
        try:
            late = parse_instant(self.about["at"]) > parse_instant(listed.next_update)
        except ALTERED:
            raise _mismatch(7, "about.json", "no time") from None
        if late:
            raise _mismatch(7, "about.json", "a time after the end of the status list")
        result = next((item for item in listed.listed if item.envelope == envelope.digest), None)
        if self.logged_at is not None and parse_instant(listed.next_update) < self.logged_at:
            raise _mismatch(7, "status.json", "an end before the log's checkpoint")
        if result is None and self._lists_revocation(listed, envelope.digest):
            raise _mismatch(7, "status.json", "no word of a revocation that the log has")
        status = "does not list the issue"
        if result is not None:
            status = f"{result.status} since {result.since}"
        self.note(7, f"list {listed.sequence} of {listed.issued_at}: {status}")

    def _lists_revocation(self, listed: StatusList, envelope: str) -> bool:
        """Whether the list has to have the issue: it is revoked, and was valid at that time."""
        end = parse_instant(self.predicate["validity"]["not_after"])
        return parse_instant(listed.issued_at) <= end and any(
            entry["kind"] == "revocation" and entry["body"].get("envelope") == envelope
            for entry in self.entries
        )

    def keysets(self) -> None:
        """Every keyset follows the one before, by its number."""
        documents = load_part(self.files, "keysets.json", 8)
        load_part(self.files, "keys.json", 8)
        load_part(self.files, "audit.json", 8)
        try:
            numbers = [
                read_keyset(canonical_json(item)).keyset.version for item in _listed(documents)
            ]
        except (KeysetError, BadEnvelope, MalformedPlan, *ALTERED):
            raise _mismatch(8, "keysets.json", "a document that is no keyset") from None
        if numbers != list(range(1, len(numbers) + 1)):
            raise _mismatch(8, "keysets.json", "a gap")
        self.note(8, f"{len(numbers)} keysets", checked=bool(numbers))

    def run(self) -> None:
        if self.about.get("run") is None:
            self._require_none(9, *OF_RUNS)
            for step in (9, 10, 11, 12):
                self.note(step, "no run", checked=False)
            return
        events = list(self.of_run("run"))
        try:
            numbers = [event["body"]["seq"] for event in events]
            first, last = events[0]["body"], events[-1]["body"]
            belongs = first["certificate"] == self.predicate["certificate_id"]
        except ALTERED:
            raise _mismatch(9, "log/entries.jsonl", "no run") from None
        if numbers != list(range(1, len(numbers) + 1)) or last["event"] not in ENDS or not belongs:
            raise _mismatch(9, "log/entries.jsonl", "a run with missing events")
        self.note(9, f"{len(events)} logged events; {last['event']}")

    def _end(self) -> dict[str, Any]:
        end: dict[str, Any] = list(self.of_run("run"))[-1]["body"]
        return end

    def provenance(self) -> None:
        if self.about.get("run") is None:
            return
        stated = self._end().get("provenance")
        if stated is None:
            self._require_none(10, "provenance.json")
            self.note(10, "the run ended without a record", checked=False)
            return
        _require_same(self.files, "provenance.json", canonical_json(stated), 10)
        try:
            signed = read_provenance(stated, self.trusted, later=True)
        except BadProvenance as error:
            raise EvidenceError(
                10,
                "bad_provenance",
                f"provenance.json: {error}",
                "Pass the worker's public key with --keys, or a keyset that has it.",
            ) from None
        about = (self.about["run"], self.about["certificate"], digest_of(self.predicate["plan"]))
        if (signed.run, signed.certificate, signed.plan_digest) != about:
            raise _mismatch(10, "provenance.json", "another run")
        self.note(10, f"signed by {signed.worker}, key {signed.key[:16]}")

    def conformance(self) -> None:
        if self.about.get("run") is None:
            return
        end = self._end()
        if end.get("record") is None:
            self._require_none(11, "record.jsonl", "conformance.json")
            self.note(11, "no record", checked=False)
            return
        try:
            result = check_conformance(part_of(self.files, "record.jsonl", 11), self.predicate)
        except (PlanNotClosed, PlanError):
            raise _mismatch(11, "bundle.json", "a plan that cannot be run") from None
        _require_same(self.files, "conformance.json", canonical_json(result.as_dict()), 11)
        if result.head != end["record"]:
            raise _mismatch(11, "record.jsonl", "another record than the logged one")
        if not result.conformant and end["event"] == "settled":
            raise _mismatch(11, "record.jsonl", "a run that does not conform and was settled")
        verdict = "conforms" if result.conformant else "does not conform"
        self.note(11, f"the record of {result.steps_charged} steps {verdict}")

    def ledger(self) -> None:
        """Every state of the ledger has the digest that the log has of it."""
        if self.about.get("run") is None:
            return
        document = _mapping(load_part(self.files, "ledger.json", 12), "ledger.json", 12)
        first = next(iter(self.of_run("run")))["body"]
        try:
            logged = {
                entry["body"]["seq"]: entry["body"]["state_digest"]
                for entry in self.entries
                if entry["subject"] == first["reservation"]
            }
            stated_items = {
                event["seq"]: digest_of_bytes(event["state"].encode())
                for event in document["events"]
            }
        except ALTERED:
            raise _mismatch(12, "ledger.json", "no events of a ledger") from None
        if stated_items != logged or not stated_items:
            raise _mismatch(12, "ledger.json", "other states than the log")
        self.note(12, f"{len(stated_items)} events with their logged states")

    def replay_and_audit(self) -> None:
        """Both are of the certified plan, and the logged ones; an audit follows from its losses."""
        details = [text for text in (self._replay(), self._audit()) if text]
        self.note(13, "; ".join(details) or "neither replay nor audit", checked=bool(details))

    def _logged(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return the entry about a file that was added to the run, or None if there is none."""
        logged = next(self.of_run(kind), None) if self.about.get("run") is not None else None
        if logged is not None:
            content = part_of(self.files, name, 13)
            if logged["body"].get("digest") != digest_of_bytes(content):
                raise _mismatch(13, name, "another record than the logged one")
        return logged

    def _replay(self) -> str:
        logged = self._logged("replay", REPLAY)
        if REPLAY not in self.files:
            return ""
        record = _mapping(load_part(self.files, REPLAY, 13), REPLAY, 13)
        if record.get("type") != RECORD_TYPE:
            raise _mismatch(13, REPLAY, "no replay record")
        if record.get("plan") != digest_of(self.predicate["plan"]):
            raise _mismatch(13, REPLAY, "another plan than the certificate")
        author = "" if logged is None else f", as {logged['actor']} added"
        return f"replay of the certified plan{author}; what it says is declared"

    def _audit(self) -> str:
        """Compute the audit again: the record commits to its canaries, its losses are declared."""
        logged = self._logged("audit", AUDIT)
        if logged is None and AUDIT not in self.files:
            return ""
        audit = _mapping(load_part(self.files, AUDIT, 13), AUDIT, 13)
        if logged is None:
            raise _mismatch(13, AUDIT, "an audit that was not added to the run")
        if self._end().get("record") is None:
            raise _mismatch(13, AUDIT, "an audit of a run without a record")
        try:
            same = is_audit_record(audit, self.files["record.jsonl"], self.predicate)
        except (BadCanaries, PlanNotClosed, PlanError, *ALTERED) as error:
            raise _mismatch(13, AUDIT, f"no audit of the run: {error}") from None
        if not same:
            raise _mismatch(13, AUDIT, "another result than its canaries and losses")
        author = logged["actor"]
        return f"audit of the record's canaries, as {author} added; its losses are declared"

    def story(self) -> None:
        """The pages say what the other files say; another release may say it otherwise."""
        if self.about.get("release") != AFFIDAVIT_VERSION:
            detail = f"written by release {self.about.get('release')}, not compared"
            self.note(14, detail, checked=False)
            return
        try:
            story = tell_story(self.files)
        except ALTERED:
            raise _mismatch(14, STORY, "parts of which there is nothing to tell") from None
        _require_same(self.files, STORY, story, 14)
        _require_same(self.files, VERIFIER, verifier_page(), 14)
        self.note(14, "tells what the other files say")

    def timestamp(self) -> None:
        """An authority that the verifier names saw the manifest, at a time that has come."""
        reply, roots = self.files.get(TIMESTAMP), self.stamp_roots
        if reply is None or roots is None:
            missing = "timestamp" if reply is None else "trusted authority"
            self.note(15, f"no {missing}", checked=False)
            return
        try:
            at = verify_timestamp(self.files[MANIFEST], reply, roots)
        except BadTimestamp as error:
            raise EvidenceError(15, "bad_timestamp", f"{TIMESTAMP}: {error}.") from None
        except ModuleNotFoundError:
            raise EvidenceError(
                15,
                "timestamps_unchecked",
                "the timestamp needs a package that is not installed.",
                "Run: pip install 'affidavit[timestamps]'",
            ) from None
        if is_ahead(at, self.trusted.now()):
            raise EvidenceError(15, "bad_timestamp", f"{TIMESTAMP} is of a time yet to come.")
        self.note(15, f"existed at {at:%Y-%m-%d %H:%M:%S}Z, as an authority saw")


def _read_entries(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return the entries in ``log/entries.jsonl``, which step 4 proves to be logged."""
    lines = files.get("log/entries.jsonl", b"").splitlines()
    try:
        entries = [load_json(line, len(line)).data for line in lines]
        if all(
            isinstance(entry["body"], dict)
            and all(isinstance(entry[name], str) for name in ("kind", "subject", "actor", "at"))
            for entry in entries
        ):
            return entries
    except (MalformedPlan, *ALTERED):
        pass
    raise _mismatch(3, "log/entries.jsonl", "lines that are no entries")


def _decision(actor: str, body: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return actor, body["decision"], body["envelope"], body["comment"]


def _instant(text: str) -> datetime:
    """Return the time of an entry, which has the one form that the log writes."""
    try:
        at = datetime.fromisoformat(text)
        if at.astimezone(UTC).isoformat(timespec="microseconds") == text:
            return at
    except (ValueError, OverflowError):
        pass
    raise _mismatch(3, "log/entries.jsonl", "a time that cannot be read")


def _listed(document: Any) -> list[Any]:
    """Return a list, which an empty text or object is not."""
    if not isinstance(document, list):
        raise TypeError("not a list")
    return document


def _mapping(document: Any, name: str, step: int) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise _mismatch(step, name, "no object")
    return document


def _require_same(files: Mapping[str, bytes], name: str, content: bytes, step: int) -> None:
    if part_of(files, name, step) != content:
        raise _mismatch(step, name, "something else than what is signed and logged")


def _mismatch(step: int, name: str, what: str) -> EvidenceError:
    return EvidenceError(step, "evidence_mismatch", f"{name} has {what}.")
