"""Time every page with 100,000 certificates and 1,000,000 log entries on PostgreSQL.

Each page is requested ``TIMES`` times in this process, with a token of every scope. The median
excludes the first request. Every SELECT of a page is explained afterwards with its values: a
sequential scan of a table of more than ``SMALL`` rows, or a step that touches more than
``MAX_ROWS`` rows, is a fault. Faults, and pages slower than ``LIMIT_MS``, are listed below the
table.

    python -m bench.pages [CERTIFICATES] [LOG_ENTRIES]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from unittest.mock import patch

from sqlalchemy import Engine, text

from affidavit.service.core.database import cursor_at, open_engine
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.operation.database_admin import upgrade
from affidavit.service.settings import Settings
from affidavit.service.web.app import create_app
from affidavit.service.web.dependencies import Services
from affidavit.trust import KeyStore
from bench.pages_seed import certify_some, seed_certificates, seed_log
from bench.query_plans import Statement, explain, large_tables, noted
from bench.service import databases, say

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

CERTIFICATES, LOG_ENTRIES = 100_000, 1_000_000
TIMES = 16
LIMIT_MS = 200.0
SLOWEST = 8
"""Pages that the table has."""
SMALL = 10_000
MAX_ROWS = 50_000


def pages(engine: Engine) -> dict[str, str]:
    """Return the path of each page by its name."""
    newest = "SELECT id, created_at, untrusted FROM certificates ORDER BY created_at DESC"
    with engine.connect() as connection:
        one = connection.execute(text(f"{newest} OFFSET 7 LIMIT 1")).one().id
        whole = connection.execute(text("SELECT count(*) FROM certificates")).scalar_one()
        deep = connection.execute(text(f"{newest} OFFSET {whole // 2} LIMIT 1")).one()
        waits = connection.execute(
            text("SELECT id FROM certificates WHERE approvals_required > 0 LIMIT 1")
        ).scalar_one()
        leaf = connection.execute(text("SELECT max(leaf_index) FROM log_leaves")).scalar_one()
    there = cursor_at(deep.created_at, deep.id, deep.untrusted)
    return {
        "overview": "/",
        "certificates": "/certificates",
        "log, CSV": "/audit.csv",
        "certificates, half way back": f"/certificates?cursor={there}",
        "by verdict": "/certificates?verdict=under_noised",
        "by mechanism": "/certificates?mechanism=dp_adambc",
        "by a mechanism that none has": "/certificates?mechanism=dp_dice",
        "by team": "/certificates?requester=team-7",
        "by data set": "/certificates?dataset=data-7",
        "by beginning": "/certificates?q=plan-77",
        "by a common beginning": "/certificates?q=plan",
        "by nothing that is there": "/certificates?q=nowhere",
        "by id": f"/certificates?q={one[7:19]}",
        "by ε": "/certificates?epsilon=to_1",
        "by validity": "/certificates?ends=soon",
        "revoked": "/certificates?standing=revoked",
        "rejected": "/certificates?standing=rejected",
        "signed by a revoked key": "/certificates?standing=key_revoked",
        "ended": "/certificates?standing=expired",
        "active": "/certificates?standing=active",
        "waiting": "/certificates?standing=awaiting_approval",
        "narrow": "/certificates?verdict=certified&mechanism=dp_sgd&dataset=data-8&epsilon=to_8",
        "one certificate": f"/certificates/{one}",
        "compare": "/compare",
        "data sets": "/datasets",
        "runs": "/runs",
        "approvals": "/approvals",
        "one approval": f"/approvals/{waits}",
        "policies": "/policies",
        "waivers": "/waivers",
        "audit": "/audit",
        "audit, half way back": f"/audit?start={leaf // 2}&end={leaf // 2 + 100}",
        "audit entry": f"/audit/{leaf // 2}",
        "tokens": "/tokens",
        "keys": "/keys",
        "new plan": "/plans/new",
    }


def faults(engine: Engine, asked: list[Statement], large: frozenset[str]) -> list[str]:
    """Describe where a statement scans a large table, or touches too many rows."""
    result = []
    for read in explain(engine, asked):
        through = sorted(read.scanned & large)
        if through or read.touched > MAX_ROWS:
            what = f"reads through {', '.join(through)}" if through else f"{read.touched} rows"
            result.append(f"{what}: {read.sql[:200]}")
    return result


def measure(client: TestClient, headers: dict[str, str], path: str) -> tuple[float, int]:
    """Return the median in milliseconds, and the status."""
    took = []
    for _ in range(TIMES):
        began = time.perf_counter()
        status = client.get(path, headers=headers).status_code
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took[1:]), status


def prepare(url: str, home: Path, certificates: int, entries: int) -> Settings:
    """Return a migrated and filled database, and settings to serve it."""
    upgrade(url)
    KeyStore(home / "keys").new("bench")
    settings = Settings(database_url=url, key_directory=home / "keys", workers=1)
    services = Services(settings)
    try:
        seeds = certify_some(services)
        began = time.perf_counter()
        seed_certificates(services.engine, seeds, certificates)
        seed_log(services.engine, services, entries)
        with services.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as c:
            c.execute(text("VACUUM ANALYZE"))
        sys.stderr.write(f"filled in {time.perf_counter() - began:.0f} s\n")
    finally:
        services.close()
    return settings


def main() -> int:
    """Fill the database, measure and print a table; return 1 without PostgreSQL."""
    numbers = [int(item) for item in sys.argv[1:3]] or [CERTIFICATES, LOG_ENTRIES]
    with tempfile.TemporaryDirectory() as name, databases(Path(name)) as urls:
        if "PostgreSQL" not in urls:
            return 1
        settings = prepare(urls["PostgreSQL"], Path(name), *numbers)
        engine = open_engine(settings.database_url)
        try:
            report(engine, settings, *numbers)
        finally:
            engine.dispose()
    return 0


def report(engine: Engine, settings: Settings, certificates: int, entries: int) -> None:
    """Measure each page, and print the slowest, slow ones and faults."""
    _, token = TokenRepository(engine).new(
        "bench", list(Scope), 1, by="bench", at=datetime.now(UTC)
    )
    headers = {"authorization": f"Bearer {token.text}", "accept": "text/html"}
    large = large_tables(engine, SMALL)
    app = create_app(settings)
    wrong: list[str] = []
    measured: list[tuple[float, str]] = []
    client_of = partial(TestClient, base_url="http://127.0.0.1", raise_server_exceptions=False)
    # The seeded rows are not genuine, which real ones are found to be once in each process.
    unsigned = patch("affidavit.service.certificates.store.require_genuine")
    with unsigned, client_of(app) as client:
        for title, path in pages(engine).items():
            median, status = measure(client, headers, path)
            with noted(app.state.services.engine) as requested:
                client.get(path, headers=headers)
            wrong += [f"{title}: {fault}" for fault in faults(engine, requested, large)]
            if median > LIMIT_MS or status != 200:
                wrong.append(f"{title}: {status} in {median:.0f} ms")
            row = f"| {title} | {status} | {median:.1f} | {len(requested)} |"
            measured.append((median, row))
    typical = statistics.median(median for median, _ in measured)
    say(
        f"{len(measured)} pages with {certificates:,} certificates and {entries:,} log entries on "
        f"PostgreSQL, {typical:.1f} ms in the median. The slowest:\n"
    )
    say("| page | answer | median, ms | reading statements |\n|---|---|---|---|")
    for _, row in sorted(measured, reverse=True)[:SLOWEST]:
        say(row)
    say(f"\nOver {LIMIT_MS:.0f} ms, or reading through a large table: {len(wrong) or 'none'}.")
    for item in wrong:
        say(f"- `{item}`")


if __name__ == "__main__":
    sys.exit(main())
