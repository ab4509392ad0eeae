"""Conformance of a run's record, checked by the service itself on what the worker sent.

The worker's own verdict does not count. The record is checked against the certificate as
``affidavit conformance`` does (certificate, plan, chain, steps, noise, clip norms, sampler,
keys), and then against what the service knows of the run's attempts, independent of the record:
the findings of ``RunFinding``.

What it cannot show: that the noise was drawn and the data read as the record says. That is
the word of whoever holds the worker's key.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from affidavit.certificate import (
    START,
    BrokenLine,
    Execution,
    PlanNotClosed,
    certified_plan,
    check_conformance,
    decode_line,
    read_envelope,
)
from affidavit.service.runs.repository import StoredRunEvent

MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinding:
    """What does not fit between a record and its run, with a stable ``code``."""

    code: str
    message: str


OTHER_RECORD = RunFinding(
    code="other_record", message="The worker signed another record than it sent."
)
OTHER_HISTORY = RunFinding(
    code="other_history",
    message="The record does not contain what was reported of it while it was written.",
)
GRANTED_NOT_PASSED = RunFinding(
    code="granted_not_passed",
    message="An earlier worker was granted steps that the record does not pass over.",
)
CANARIES_NOT_LOGGED = RunFinding(
    code="canaries_not_logged",
    message="The log did not have the record's first line, which commits to the plan's canaries, "
    "before a step was granted.",
)
OTHER_SEARCH = RunFinding(
    code="other_search", message="The record is not of the search that the service drew."
)
KEY_IN_TWO_STEPS = RunFinding(
    code="key_in_two_steps",
    message="Another record of the run has one of its noise keys, at another step.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceResult:
    """The outcome of checking a record; ``record`` is its last digest.

    ``code`` is ``conformant``, ``not_conformant`` or ``no_record``, ``stopped`` says that it was
    ended early, as somebody asked, and ``steps`` are to be charged.
    """

    code: str
    steps: int
    summary: str
    stopped: bool = False
    record: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SentRecord:
    """The record of ``parts`` that a worker sent, and what else is known of the run.

    ``bundle`` is the certificate's. ``signed_for`` is the head that the worker signed,
    ``reported`` the one that it reported last while it trained, ``before`` the attempts before it
    to which steps were granted, oldest first, and ``others`` their records as far as they were
    sent. ``logged`` are the digests of first lines that the log has of the run. ``search`` is the
    digest of the opening that was drawn for a search.
    """

    bundle: bytes
    parts: Sequence[bytes]
    others: Mapping[int, Sequence[bytes]]
    signed_for: str | None
    reported: str | None
    before: Sequence[StoredRunEvent]
    logged: frozenset[str]
    search: str | None


def check_record(sent: SentRecord) -> ConformanceResult:
    """The record against the certificate and what is known of the run."""
    envelope = read_envelope(json.loads(sent.bundle)["envelope"])
    predicate = json.loads(envelope.payload)["predicate"]
    record = _joined(sent.parts)
    checked = check_conformance(record, predicate)
    more = {*_unlike_the_run(sent, record, predicate), *_of_keys(record, sent.others)}
    if checked.head != sent.signed_for:
        more.add(OTHER_RECORD)
    codes = sorted({item.code for item in checked.findings} | {item.code for item in more})
    steps = max(checked.steps_certified, checked.steps_charged) if more else checked.steps_to_charge
    return ConformanceResult(
        code="conformant" if checked.conformant and not more else "not_conformant",
        stopped="stopped" in codes,
        steps=steps,
        record=checked.head,
        summary=", ".join(codes[:MOST_NAMED]) or "the record conforms.",
    )


def _unlike_the_run(
    sent: SentRecord, record: bytes, predicate: dict[str, Any]
) -> Iterator[RunFinding]:
    """What does not fit in with the search, the log, and the attempts that there were.

    Where a run continues it may start again only if its steps are independent, and its record
    has nothing then of the record before. Either way every step that was granted before is
    passed over, so that the record has a line that says that it went on from there.
    """
    try:
        header = decode_line(record.partition(b"\n")[0] + b"\n", START)
    except BrokenLine:  # a finding already
        header = {}
    if predicate["plan"].get("canaries") is not None and header.get("digest") not in sent.logged:
        yield CANARIES_NOT_LOGGED
    if header.get("search") != sent.search:
        yield OTHER_SEARCH
    resumed = {entry["step"] for entry in _entries(record, b"resumed")}
    if any(attempt.granted not in resumed for attempt in sent.before):
        yield GRANTED_NOT_PASSED
    heads = [sent.reported]
    if not (sent.before and _steps_stand_alone(predicate)):
        heads += [attempt.body.get("head") for attempt in sent.before]
    if any(f'"digest":"{head}"'.encode() not in record for head in heads if head is not None):
        yield OTHER_HISTORY


def _of_keys(record: bytes, others: Mapping[int, Sequence[bytes]]) -> Iterator[RunFinding]:
    """Keys that stand for one step here and for another in a record before."""
    steps = {fence: _steps_of_keys(_joined(parts)) for fence, parts in others.items()}
    mine = _steps_of_keys(record) if steps else {}
    if any(mine.get(key, step) != step for keys in steps.values() for key, step in keys.items()):
        yield KEY_IN_TWO_STEPS


def _steps_of_keys(record: bytes) -> dict[str, int]:
    return {
        key: entry["step"]
        for entry in _entries(record, b"charge")
        if isinstance(key := entry.get("key_commitment"), str)
    }


def _entries(record: bytes, kind: bytes) -> Iterator[dict[str, Any]]:
    """The lines of a kind that can be read at all; conformance has found the others."""
    for line in record.split(b"\n"):
        if b'"type":"%b"' % kind in line:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                yield entry


def _steps_stand_alone(predicate: dict[str, Any]) -> bool:
    try:
        return Execution.of(certified_plan(predicate)).steps_stand_alone
    except (PlanNotClosed, ValueError):
        return False


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(zlib.decompress(part) for part in parts)
