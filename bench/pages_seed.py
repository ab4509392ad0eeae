"""Fill a database with years of certificates and a log, by COPY within a minute.

A few plans are really certified. Every other row repeats the signed bytes of one of them under
another id, name and time, so use this data for measurements only. The log is real: every leaf is
hashed, and its root is signed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, text

from affidavit.service.certificates.store import PlanRequest, StoredCertificate, facets_of
from affidavit.service.tables.certificates import certificates
from affidavit.service.web.dependencies import Services
from affidavit.trust.log import (
    merkle_tree,
    sign_checkpoint,
)

MECHANISMS = ("dp_sgd", "dp_adam", "dp_adambc", "dp_adam_floor")
DATASETS = 200
TEAMS = 40
KINDS = ("refusal", "run", "record", "token")
"""Of entries that nothing in the database is held against."""
DAYS = 720
PLAN: dict[str, Any] = {
    "version": 1,
    "adjacency": "add_remove",
    "sampling": {"scheme": "full_batch"},
    "steps": 30,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 40}],
}
ALIKE = tuple(column.name for column in certificates.columns)


def certify_some(services: Services) -> list[StoredCertificate]:
    """Certify one plan of each mechanism and verdict."""
    return asyncio.run(_certified(services))


async def _certified(services: Services) -> list[StoredCertificate]:
    created = []
    for mechanism in MECHANISMS:
        for epsilon in (4, 0.1):
            plan = PLAN | {
                "name": "seed",
                "dataset": {"name": "data-0", "size": 100_000},
                "optimizer": {"name": mechanism},
                "target": {"epsilon": epsilon, "delta": 1e-6},
            }
            requested = PlanRequest(
                requester="team-0",
                received_at=datetime.now(UTC),
                content_type="application/json",
                body=json.dumps(plan).encode(),
            )
            created.append((await services.submit_plan(requested, "json")).certificate)
    return created


def seed_certificates(engine: Engine, seeds: Sequence[StoredCertificate], number: int) -> None:
    """Insert ``number`` certificates, a third of them not certified."""
    now = datetime.now(UTC)
    rows = [_certificate(seeds, index, number, now) for index in range(number)]
    copy(engine, "certificates", ALIKE, ([row[name] for name in ALIKE] for row in rows))
    facets = {seed.id: facets_of(seed) for seed in seeds}
    copy(
        engine,
        "certificate_facets",
        ("certificate_id", "untrusted", "issue", "mechanism", "requester", "created_at"),
        (
            (
                row["id"],
                False,
                1,
                facets[row["seed"]]["mechanism"],
                f"team-{index % TEAMS}",
                row["created_at"],
            )
            for index, row in enumerate(rows)
        ),
    )
    copy(
        engine,
        "requests",
        (
            "certificate_id",
            "untrusted",
            "issue",
            "requester",
            "received_at",
            "content_type",
            "body",
        ),
        (
            (row["id"], False, 1, f"team-{index % TEAMS}", row["created_at"], "text", b"x")
            for index, row in enumerate(rows)
        ),
    )
    _revocations(engine, rows)


def _revocations(engine: Engine, rows: Sequence[dict[str, Any]]) -> None:
    """Revoke one in a hundred certificates a day after its issue."""
    names = ("certificate_id", "untrusted", "issue", "envelope_digest")
    of_row = ("id", *names[1:])
    copy(
        engine,
        "revocations",
        (*names, "code", "reason", "revoked_by", "at"),
        ((*(row[name] for name in of_row), *_withdrawn(row)) for row in rows[7::100]),
    )


def _withdrawn(row: dict[str, Any]) -> tuple[str, str, str, datetime]:
    return "plan_error", "seeded", "team-0", row["created_at"] + timedelta(days=1)


def _certificate(
    seeds: Sequence[StoredCertificate], index: int, number: int, now: datetime
) -> dict[str, Any]:
    seed = seeds[index % len(seeds)]
    created = now - timedelta(days=DAYS * (number - index) / number)
    waits = index % 50 == 0 and seed.verdict == "certified"
    same = {name: getattr(seed, name) for name in ALIKE}
    return same | {
        "seed": seed.id,
        "id": f"sha256:{hashlib.sha256(b'c%d' % index).hexdigest()}",
        "plan_digest": f"sha256:{hashlib.sha256(b'p%d' % index).hexdigest()}",
        "name": f"plan-{index * 7919 % number}",
        "dataset": f"data-{index % DATASETS}",
        "epsilon_upper": None if seed.epsilon_upper is None else 0.1 + index % 120 / 10,
        "created_at": created,
        "not_after": created + timedelta(days=365),
        "approvals_required": int(waits),
        "approvals_given": 0,
    }


def seed_log(engine: Engine, services: Services, number: int) -> None:
    """Insert a log of ``number`` entries with its tree and one signed checkpoint."""
    now = datetime.now(UTC)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE log_pending DISABLE TRIGGER USER"))
        connection.execute(text("DELETE FROM log_pending"))
        first = connection.execute(
            text("SELECT COALESCE(max(id), 0) FROM log_entries")
        ).scalar_one()
    contents = (_content(index, number, now) for index in range(number))
    copy(engine, "log_entries", ("kind", "subject", "at", "content"), contents)
    tree, leaves, nodes = merkle_tree.Frontier(0, ()), [], []
    with engine.connect().execution_options(yield_per=10_000) as connection:
        query = text("SELECT id, content FROM log_entries ORDER BY id")
        for index, (entry_id, content) in enumerate(connection.execute(query)):
            value = merkle_tree.leaf_hash(content.encode())
            leaves.append((index, entry_id, value))
            nodes += [(p.level, p.position, result) for p, result in tree.append(value)[1:]]
    assert len(leaves) == number + first
    copy(engine, "log_leaves", ("leaf_index", "entry_id", "leaf_hash"), leaves)
    copy(engine, "log_nodes", ("level", "position", "hash"), nodes)
    key = services.keyring.current()
    note = sign_checkpoint(
        key, origin="bench.invalid/log", size=tree.size, root_hash=tree.root(), at=now
    )
    row = (tree.size, key.key_id, now, note)
    copy(engine, "log_checkpoints", ("tree_size", "key_id", "signed_at", "note"), [row])


def _content(index: int, number: int, now: datetime) -> tuple[str, str, datetime, str]:
    kind = KINDS[index % len(KINDS)]
    subject = f"sha256:{hashlib.sha256(b'c%d' % (index // len(KINDS))).hexdigest()}"
    at = now - timedelta(days=DAYS * (number - index) / number)
    stated = {
        "actor": f"team-{index % TEAMS}",
        "at": at.isoformat(timespec="microseconds"),
        "body": {"event": "seed", "seq": index},
        "kind": kind,
        "subject": subject,
    }
    return kind, subject, at, json.dumps(stated, separators=(",", ":"), sort_keys=True)


def copy(engine: Engine, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Insert ``rows`` into ``table`` by COPY."""
    connection = engine.raw_connection()
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL statement_timeout = 0")  # the service's is for requests
            statement = f"COPY {table} ({', '.join(columns)}) FROM STDIN"
            with cursor.copy(statement) as target:  # type: ignore[attr-defined]  # psycopg's
                for row in rows:
                    target.write_row(tuple(row))
        connection.commit()
    finally:
        connection.close()
