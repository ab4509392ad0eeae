"""The page of an evidence file: what was certified, who decided, what ran, and what it cost.

It is derived from the other files alone, so that a verifier derives it again and compares. Links
lead only to files beside it. It has no script and loads nothing.

The questions are those of NIST SP 800-226 (March 2025) and of Annexes IV and XI of Regulation (EU)
2024/1689 that concern privacy in training. An answer is evidence where a file proves it or
verification compares it with something signed; otherwise it is a declaration, or not in the file.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from affidavit.accountants import AFFIDAVIT_VERSION, decimal_up
from affidavit.assessment import chart_recognition, explain_guarantee, signed_bounds
from affidavit.assessment.charts import draw
from affidavit.evidence.evidence_file import (
    AUDIT,
    REPLAY,
    STORY,
    TIMESTAMP,
    EvidenceError,
    manifest_of_files,
    read_evidence,
    write_evidence,
)
from affidavit.evidence.log_sentences import sentence_of
from affidavit.evidence.replay_record import MAX_RECORD_BYTES, BadReplayRecord, read_replay_record
from affidavit.plan import canonical_json, digest_of, load_json, printable
from affidavit.trust import read_envelope

_FILES = {
    "about.json": "Certificate, run, time and release of this file. Declared.",
    "audit.json": "What the service's own audit complained about at that time. Declared.",
    "bundle.json": "The certificate: a DSSE envelope with an in-toto statement, signed with "
    "Ed25519, and its place in the log.",
    "canary-audit.json": "What an audit of the run's canaries showed, with the canaries and their "
    "losses. The record commits to the canaries; the losses are declared.",
    "conformance.json": "What comparing the record with the certificate found.",
    "issues.json": "All issues of the certificate, with approvals and revocation; the log has the "
    "same decisions.",
    "keys.json": "The service's public keys. Trust them only if you have them from another source.",
    "keysets.json": "Every published keyset, oldest first, signed by the root keys.",
    "ledger.json": "The data set's ledger after each event of this run's reservation; the log has "
    "the sha256 of each state.",
    "log/entries.jsonl": "The log's entries about certificate and run, one a line, each exactly "
    "the bytes of a leaf with its salt.",
    "log/proofs.json": "The log's signed checkpoint, the index and the Merkle proof of each entry "
    "(RFC 9162), and the proof that the log only grew since the certificate.",
    "manifest.json": "The sha256 of every other file.",
    "plan.json": "The plan as it was certified.",
    "policy.json": "The policy under which it was issued; the certificate has its digest.",
    "provenance.json": "The worker's signed statement about the run (SLSA provenance in DSSE).",
    "replay.json": "What replays of the training script on neighbouring data sets showed. Declared "
    "by who ran them.",
    "record.jsonl": "The run record: one JSON object a line, chained by digests.",
    "status.json": "The signed list of revoked certificates when this file was made.",
    "verify.html": "A page that verifies such files without the network. Use a copy that did not "
    "come with the file.",
    "waivers.json": "What the policy forbids and a waiver allows; signed in the certificate.",
}
_EVIDENCE, _DECLARED, _OPEN = "evidence", "declaration", "not in this file"
_IF_THERE = {"run": _EVIDENCE, "test": _DECLARED}
"""How questions are answered whose file is not in all evidence files."""
_QUESTIONS = (
    ("NIST SP 800-226", "What are ε and δ, and is ε an upper bound?", _EVIDENCE, "bundle.json"),
    ("NIST SP 800-226", "What does one unit of privacy hold?", _DECLARED, "plan.json"),
    ("NIST SP 800-226", "Which data sets count as neighbours?", _EVIDENCE, "bundle.json"),
    ("NIST SP 800-226", "Which mechanism adds which noise?", _EVIDENCE, "plan.json"),
    ("NIST SP 800-226", "Was every step run as certified?", "run", "conformance.json"),
    ("NIST SP 800-226", "Did an audit refute the guarantee?", "test", "canary-audit.json"),
    ("NIST SP 800-226", "Did a replay find a fault of the code?", "test", "replay.json"),
    ("NIST SP 800-226", "Is what other runs spent counted?", "run", "ledger.json"),
    ("NIST SP 800-226", "Who sees the raw data?", _DECLARED, ""),
    ("NIST SP 800-226", "Do time, memory or logs reveal something?", _OPEN, ""),
    ("NIST SP 800-226", "Who may read the data and the weights?", _OPEN, ""),
    ("Annex IV (2)(b)", "What are the key design choices, with rationale?", _DECLARED, "plan.json"),
    ("Annex IV (2)(d)", "Which training data, and where is it from?", _DECLARED, "plan.json"),
    ("Annex IV (2)(g)", "Which tests and logs, dated and signed?", "run", "provenance.json"),
    ("Annex IV (3)", "Which risks remain?", _OPEN, ""),
    (
        "Annex XI, section 1 (2)(b)",
        "Which training methodology and techniques?",
        _EVIDENCE,
        "plan.json",
    ),
    (
        "Annex XI, section 1 (2)(c)",
        "Which data was used, of what type and source?",
        _DECLARED,
        "plan.json",
    ),
)
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}table{border-collapse:collapse;width:100%}th,td{text-align:left;"
    "vertical-align:top;padding:.35rem .6rem .35rem 0;border-bottom:1px solid #8886}"
    "code{overflow-wrap:anywhere}pre{white-space:pre-wrap}.at{white-space:nowrap}@media(max-width:40rem)"
    "{tr,td,th{display:block}td,th{border:0;padding:.1rem 0}tr{padding:.5rem 0}}"
)


def tell_story(files: Mapping[str, bytes]) -> bytes:
    """Return the page of ``files``; raises errors like ``KeyError`` if they are malformed."""
    about = json.loads(files["about.json"])
    statement = _statement(json.loads(files["bundle.json"]))
    predicate = statement["predicate"]
    entries = [json.loads(line) for line in files["log/entries.jsonl"].splitlines()]
    parts = [
        *_head(about, predicate),
        *_guarantee(predicate),
        *_run(files, about, entries),
        *_replay(files),
        *_audit(files, predicate),
        *_happened(entries, predicate["plan"].get("name")),
        *_questions(files),
        *_contents(files),
    ]
    return "\n".join(parts).encode() + b"\n"


def complete_evidence(
    raw: bytes, replay: bytes | None, stamp: Callable[[bytes], bytes] | None
) -> bytes:
    """Return an evidence file with a replay record, and with a timestamp by ``stamp``.

    Raises ``BadReplayRecord``, and ``EvidenceError`` for a file that cannot be completed.
    """
    files = read_evidence(raw)
    if replay is not None:
        record = read_replay_record(replay)
        if REPLAY in files:
            raise BadReplayRecord(
                "bad_replay_record",
                "the file has a replay already, which was added to the run",
                "Leave --replay out",
            )
        if record.plan != digest_of(json.loads(files["plan.json"])):
            raise BadReplayRecord(
                "bad_replay_record",
                "this replay is of another plan than the certificate, or of none",
                "Run affidavit replay --plan with the plan.json of the evidence file",
            )
        release = json.loads(files["about.json"])["release"]
        if release != AFFIDAVIT_VERSION:
            what = f"{STORY} is told by release {release}, and this is {AFFIDAVIT_VERSION}."
            raise EvidenceError(14, "evidence_mismatch", what, "Use the release of the service.")
        files[REPLAY] = canonical_json(load_json(replay, MAX_RECORD_BYTES).data)
        files[STORY] = tell_story(files)
    if stamp is not None:
        files[TIMESTAMP] = stamp(manifest_of_files(files))
    return b"".join(write_evidence(files))


def _text(value: str) -> str:
    """Return a text that is neither markup nor reorders or hides other text."""
    return html.escape(printable(value))


def _shown(at: str) -> str:
    return _text(at[:19].replace("T", " "))


def _statement(bundle: Mapping[str, Any]) -> dict[str, Any]:
    statement: dict[str, Any] = json.loads(read_envelope(bundle["envelope"]).payload)
    return statement


def _head(about: Mapping[str, Any], predicate: Mapping[str, Any]) -> Iterator[str]:
    plan = predicate["plan"]
    name = plan.get("name") or "a plan without a name"
    dataset = plan["dataset"].get("name") or "a data set without a name"
    subject = "run" if about["run"] else "certificate"
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width">'
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield f"<title>Evidence: {_text(name)}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>Evidence of a {subject}: {_text(name)}</h1>"
    yield f"<p>On {_text(dataset)}, written {_shown(about['at'])} UTC by Affidavit "
    yield f"{_text(about['release'])}. This page follows from the files beside it. It proves "
    yield "nothing by itself: verify the whole file offline with keys from a source that you trust:"
    yield "</p><pre><code>affidavit verify-evidence FILE --keyset keyset.json --root roots.json"
    yield "</code></pre>"


def _guarantee(predicate: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>What was certified</h2>"
    guarantee = predicate["guarantee"]
    verdict = _text(predicate["verdict"].replace("_", " "))
    if guarantee is None:
        yield f"<p>The verdict is <strong>{verdict}</strong>; no ε is guaranteed.</p>"
    else:
        epsilon = decimal_up(float(guarantee["epsilon"]["upper"]), 6)
        delta = decimal_up(float(guarantee["delta"]["upper"]), 6)
        adjacency = guarantee["adjacency"].replace("_", " ")
        chance = guarantee.get("confidence")
        level = "" if chance is None else f" with confidence {_text(str(chance))}"
        yield f"<p>The verdict is <strong>{verdict}</strong>: ε is at most {epsilon} at δ = {delta}"
        yield f"{level} ({_text(adjacency)}, for one {_text(guarantee['unit'])}).</p>"
        for text in explain_guarantee(guarantee):
            yield f"<p>{_text(text)}</p>"
        if (bounds := signed_bounds(guarantee)) is not None:
            yield draw(chart_recognition(*bounds), width=320, height=260)
    approvals = predicate["approvals"]
    if isinstance(approvals, dict) and approvals["given"]:
        names = ", ".join(_text(item["name"]) for item in approvals["given"])
        yield f"<p>Approved by {names}, as signed in the certificate.</p>"
    for rule in predicate["waived"]:
        yield f"<p>Waived: {_text(rule['message'])} {_text(rule['waiver']['reason'])}</p>"


def _run(
    files: Mapping[str, bytes], about: Mapping[str, Any], entries: list[dict[str, Any]]
) -> Iterator[str]:
    if about["run"] is None:
        return
    yield "<h2>What ran</h2>"
    events = [
        entry for entry in entries if (entry["kind"], entry["subject"]) == ("run", about["run"])
    ]
    first, end = events[0]["body"], events[-1]["body"]
    yield f"<p>Run <code>{_text(about['run'])}</code> on the data "
    yield f"<code>{_text(str(first['request']['data']))}</code> with the model "
    charged = end.get("steps_charged")
    steps = "" if charged is None else f", and {_text(str(charged))} steps were charged"
    ended = "was cancelled" if end["event"] == "cancelled" else str(end["event"])
    yield f"<code>{_text(str(first['request']['model']))}</code>. It {_text(ended)}{steps}.</p>"
    if "conformance.json" in files:
        checked = json.loads(files["conformance.json"])
        result = "conforms" if checked["conformant"] else "does <strong>not</strong> conform"
        yield f"<p>Its record {result} to the certificate.</p>"
        for finding in checked["findings"]:
            yield f"<p>Line {finding['line']}: {_text(finding['message'])}</p>"
    ledger = json.loads(files["ledger.json"])
    yield "<h2>What it cost</h2>"
    scope = f"{ledger['dataset']}, per {ledger['unit']}, {ledger['adjacency'].replace('_', ' ')}"
    yield f"<p>Of the budget of {_text(scope)}, as the service's filter reads it. Costs do not "
    yield "add up: the filter composes all runs and converts to ε once.</p>"
    yield "<table><tr><th>Event</th><th>ε in use before</th><th>ε in use after</th></tr>"
    for event in ledger["events"]:
        before, after = event["epsilon_before"], event["epsilon_after"]
        cells = (event["kind"], before or "not bounded", after or "not bounded")
        yield "<tr>" + "".join(f"<td>{_text(str(cell))}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _replay(files: Mapping[str, bytes]) -> Iterator[str]:
    if REPLAY not in files:
        return
    record = json.loads(files[REPLAY])
    verdict, steps, neighbours = record["verdict"], record["steps"], record["neighbours"]
    yield "<h2>What a replay showed</h2><p>Who added it declares that the training script ran on "
    yield f"{_text(str(neighbours))} neighbouring data sets for {_text(str(steps))} steps: "
    yield f"<strong>{_text(verdict.replace('_', ' '))}</strong>. A replay proves nothing; it can "
    yield "only refute.</p><table><tr><th>Check</th><th>Result</th></tr>"
    for name, result in sorted(record["checks"].items()):
        cells = (_text(str(item).replace("_", " ")) for item in (name, result))
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _audit(files: Mapping[str, bytes], predicate: Mapping[str, Any]) -> Iterator[str]:
    if AUDIT not in files:
        return
    audit, guarantee = json.loads(files[AUDIT]), predicate["guarantee"]
    counts, bound = audit["canaries"], _text(str(audit["epsilon_at_least"]))
    yield "<h2>What an audit of canaries showed</h2><p>A coin decided whether each of "
    yield f"{_text(str(counts['count']))} artificial records took part in the training, and the "
    yield "run record committed to the coins. From the losses that who added them declares, "
    yield f"{_text(str(audit['right']))} of {_text(str(counts['guesses']))} guesses of coins are "
    yield f"right. With confidence {_text(str(audit['confidence']))}, ε is at least {bound}; "
    yield f"certified is at most {decimal_up(float(guarantee['epsilon']['upper']), 6)}: "
    yield f"<strong>{_text(audit['verdict'].replace('_', ' '))}</strong>. An audit proves no "
    yield "guarantee; it can only refute one.</p>"


def _happened(entries: list[dict[str, Any]], plan: str | None) -> Iterator[str]:
    yield "<h2>What happened</h2><p>By the log, which only grows. Times are in UTC.</p><table>"
    for entry in entries:
        at = _shown(entry["at"])
        yield f'<tr><td class="at">{at}</td><td>{_text(sentence_of(entry, plan))}</td></tr>'
    yield "</table>"


def _questions(files: Mapping[str, bytes]) -> Iterator[str]:
    yield "<h2>Questions of an auditor</h2><p>Of NIST SP 800-226 and Regulation (EU) 2024/1689, as "
    yield "far as they concern privacy in training. A declaration is what the plan says; nothing "
    yield "checks it.</p><table><tr><th>From</th><th>Question</th><th>Answered by</th></tr>"
    for source, question, kind, name in _QUESTIONS:
        answer = kind if name in files or kind not in _IF_THERE else _OPEN
        answer = _IF_THERE.get(answer, answer)
        link = f': <a href="{name}">{name}</a>' if name in files else ""
        yield f"<tr><td>{source}</td><td>{_text(question)}</td><td>{answer}{link}</td></tr>"
    yield "</table>"


def _contents(files: Mapping[str, bytes]) -> Iterator[str]:
    yield "<h2>The files</h2><p>JSON is canonical (RFC 8785). A leaf of the log is the sha256 of a "
    yield "zero byte and the entry; digests of plans and policies are the sha256 of their file. "
    yield f"{TIMESTAMP}, if it is there, is the reply of a time-stamping authority for "
    yield "manifest.json (RFC 3161), in DER.</p>"
    yield "<table>"
    for name, text in _FILES.items():
        if name in files or name == "manifest.json":
            yield f'<tr><td><a href="{name}">{name}</a></td><td>{_text(text)}</td></tr>'
    yield "</table></body></html>"
