"""Conformance of a run's record, checked by the service itself on what the worker sent.

The worker's own verdict does not count. The record is checked against the certificate as
``affidavit conformance`` does, and then against what the service knows of the run's attempts,
independent of the record.

What it cannot show: that the noise was drawn and the data read as the record says. That is
the word of whoever holds the worker's key.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from affidavit.certificate import (
    START,
    BrokenLine,
    Conformance,
    ConformanceFinding,
    Execution,
    PlanNotClosed,
    certified_plan,
    check_conformance,
    decode_line,
    statement_in,
)
from affidavit.service.runs.repository import StoredRun


@dataclass(frozen=True, kw_only=True, slots=True)
class SentRecord:
    """The record of ``parts`` that the worker of ``run`` sent, and what else is known of it.

    ``bundle`` is the certificate's, ``others`` are the records of earlier attempts as far as they
    were sent, ``signed_for`` is the head that the worker signed, and ``logged`` are the digests of
    first lines that the log has of the run.
    """

    run: StoredRun
    bundle: bytes
    parts: Sequence[bytes]
    others: Mapping[int, Sequence[bytes]]
    signed_for: str | None
    logged: frozenset[str]


def check_record(sent: SentRecord) -> Conformance:
    """The record against the certificate and what is known of the run."""
    predicate = statement_in(sent.bundle)["predicate"]
    record = _joined(sent.parts)
    checked = check_conformance(record, predicate)
    more = tuple(_contradictions(sent, record, checked.head, predicate))
    if not more:
        return checked
    steps = max(checked.steps_certified, checked.steps_charged)
    return replace(checked, findings=checked.findings + more, steps_to_charge=steps)


def _contradictions(
    sent: SentRecord, record: bytes, head: str | None, predicate: dict[str, Any]
) -> Iterator[ConformanceFinding]:
    """What does not fit the signature, the search, the log, and the earlier attempts.

    A run that continues may start again only if its steps are independent, and its record
    has nothing then of the record before. Either way the record has a line for every step that
    was granted before, which says that the run continued from there.
    """
    try:
        header = decode_line(record.partition(b"\n")[0] + b"\n", START)
    except BrokenLine:  # a finding already
        header = {}
    if head != sent.signed_for:
        yield ConformanceFinding(
            code="other_record",
            line=0,
            message="The worker signed another record than it sent.",
        )
    if predicate["plan"].get("canaries") is not None and header.get("digest") not in sent.logged:
        yield ConformanceFinding(
            code="canaries_not_logged",
            line=1,
            message="The log did not have the record's first line, which commits to the plan's "
            "canaries, before a step was granted.",
        )
    opening = sent.run.search
    if header.get("search") != (None if opening is None else opening.digest):
        yield ConformanceFinding(
            code="other_search",
            line=1,
            message="The record is not of the search that the service drew.",
        )
    before = [attempt for attempt in sent.run.attempts if attempt.granted]
    resumed = {entry["step"] for entry in _entries(record, b"resumed")}
    if any(attempt.granted not in resumed for attempt in before):
        yield ConformanceFinding(
            code="granted_not_passed",
            line=0,
            message="An earlier worker was granted steps that the record does not pass over.",
        )
    heads = [sent.run.head]
    if not (before and _steps_stand_alone(predicate)):
        heads += [attempt.body.get("head") for attempt in before]
    if any(f'"digest":"{head}"'.encode() not in record for head in heads if head is not None):
        yield ConformanceFinding(
            code="other_history",
            line=0,
            message="The record does not contain what was reported of it while it was written.",
        )
    keys = dict(_steps_of_keys(record)) if sent.others else {}
    earlier = (_steps_of_keys(_joined(parts)) for parts in sent.others.values())
    if any(keys.get(key, step) != step for record in earlier for key, step in record):
        yield ConformanceFinding(
            code="key_in_two_steps",
            line=0,
            message="Another record of the run has one of its noise keys, at another step.",
        )


def _steps_of_keys(record: bytes) -> Iterator[tuple[str, int]]:
    for entry in _entries(record, b"charge"):
        if isinstance(key := entry.get("key_commitment"), str):
            yield key, entry["step"]


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
