"""Compare the tables with the log: every row has its entry, every entry its row.

A row that was changed shows on both sides: the log does not say what it says now, and
says what no row says any more. Rows that carry signed bytes are held to these too, since
what is shown and searched are the columns beside them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from math import isfinite
from typing import Any

from sqlalchemy import Connection, select

from affidavit.certificate import BadEnvelope, read_envelope
from affidavit.plan import MalformedPlan, digest_of
from affidavit.service.log.findings import Finding
from affidavit.service.log.replay import Progress
from affidavit.service.log.sources import SOURCES, Source
from affidavit.service.log.tables import log_entries
from affidavit.service.tables import certificates

CHUNK = 1000
ROUNDING = 1e-9
"""How much smaller than its signed decimal a number may be."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, BadEnvelope, MalformedPlan)
"""What reading a row that was tampered with may end in."""


def compare(connection: Connection, progress: Progress) -> Iterator[Finding]:
    """What the rows and the entries do not both say."""
    entries = _Entries(connection, progress)
    for source in SOURCES:
        yield from _rows(connection, source, entries)
    yield from entries.left()
    yield from _columns(connection)


class _Entries:
    """What the entries say, by the source that has to say it too; each counts once."""

    def __init__(self, connection: Connection, progress: Progress) -> None:
        self._said: dict[str, Counter[bytes]] = {source.table.name: Counter() for source in SOURCES}
        self._first: dict[bytes, int] = {}
        after = 0
        while rows := connection.execute(
            select(log_entries.c.id, log_entries.c.content)
            .where(log_entries.c.id > after)
            .order_by(log_entries.c.id)
            .limit(CHUNK)
        ).all():
            for identity, content in rows:
                self._read(identity, content)
            after = rows[-1].id
            progress(len(rows))

    def _read(self, identity: int, content: str) -> None:
        try:
            said = json.loads(content)
            for source in SOURCES:
                found = source.of_entry(said)
                if found is not None:
                    key = sha256(found).digest()
                    self._said[source.table.name][key] += 1
                    self._first.setdefault(key, identity)
        except UNREADABLE:
            return  # replay says that this entry is not what was hashed

    def take(self, source: Source, said: bytes) -> bool:
        """Whether an entry says that; the next row needs another one."""
        counted = self._said[source.table.name]
        key = sha256(said).digest()
        if counted[key] == 0:
            return False
        counted[key] -= 1
        return True

    def left(self) -> Iterator[Finding]:
        """The entries that no row was found for."""
        for table, counted in self._said.items():
            for key, count in counted.items():
                if count > 0:
                    yield Finding(
                        "entry_without_row",
                        f"log_entries {self._first[key]}",
                        f"no row of {table} says what it says.",
                    )


def _rows(connection: Connection, source: Source, entries: _Entries) -> Iterator[Finding]:
    for row in connection.execute(source.query.execution_options(yield_per=CHUNK)):
        where = source.where(row)
        try:
            said = source.of_row(row)
        except UNREADABLE as error:
            yield Finding("row_changed", where, f"it cannot be read: {error}.")
            continue
        if not entries.take(source, said):
            yield Finding("row_without_entry", where, "the log does not say what it says.")


def _columns(connection: Connection) -> Iterator[Finding]:
    """Columns of certificates, and answers, that do not say what the signed bytes say."""
    query = select(certificates).order_by(*certificates.primary_key)
    for row in connection.execute(query.execution_options(yield_per=CHUNK)):
        where = f"certificates {row.id} issue {row.issue}"
        try:
            wrong = _wrong(row)
        except UNREADABLE as error:
            yield Finding("row_changed", where, f"it cannot be read: {error}.")
            continue
        if wrong:
            yield Finding("row_changed", where, f"its signed bytes say otherwise: {wrong}.")


def _wrong(row: Any) -> list[str]:
    bundle = json.loads(bytes(row.bundle))
    envelope = read_envelope(bundle["envelope"])
    predicate = json.loads(envelope.payload)["predicate"]
    signed = {
        "id": predicate["certificate_id"],
        "untrusted": predicate["untrusted"],
        "issue": predicate.get("issue", 1),
        "verdict": predicate["verdict"],
        "envelope_digest": envelope.digest,
        "key_id": envelope.key_id,
        "plan_digest": digest_of(predicate["plan"]),
    }
    wrong = [name for name, value in signed.items() if getattr(row, name) != value]
    result = json.loads(row.result)
    if result["certificate"]["bundle"] != bundle or result["verdict"] != predicate["verdict"]:
        wrong.append("result")
    guarantee = predicate["guarantee"]
    if guarantee is None:
        # δ is then what the plan asks about, and no ε is claimed.
        return wrong + ["epsilon"] * (row.epsilon_upper is not None or bool(result["epsilon"]))
    for name, column in (("epsilon", row.epsilon_upper), ("delta", row.delta)):
        upper = guarantee[name]["upper"]
        if not _rounds_to(column, upper):
            wrong.append(name)
        if not _rounds_to((result[name] or {}).get("upper"), upper):
            wrong.append("result")
    return wrong


def _rounds_to(found: float | None, signed: str | None) -> bool:
    """Whether the signed decimal, which is rounded up, can be ``found``'s."""
    if found is None or signed is None or not isfinite(float(signed)):
        return found is None or not isfinite(found)
    return float(signed) * (1 - ROUNDING) <= found <= float(signed)
