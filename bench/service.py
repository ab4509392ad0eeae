"""Load the service, and compare it with its database and framework, as ratios in one run.

- cached: ``POST /v1/certificates`` of known plans, beside a plain FastAPI and SQLAlchemy read of
  one row by its primary key (``baseline_read.py``);
- new: distinct plans of full batches, beside committing the rows of one certificate (itself, its
  log entry and the request) with the same driver, settings and number of clients, without reads,
  keys or triggers;
- ``/livez``, requested a hundred times a second, while two workers account heavy plans and
  sixteen connections send new ones.

wrk (``apt-get install wrk``) sends, from 16 connections and one thread; the service writes
its log and its transparency log as always, and requires a token.

    python -m bench.service [SECONDS] [TURNS]
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any

from sqlalchemy import Engine, create_engine, text

from affidavit.service.core.database import open_engine, writer
from tests.support import postgresql_server
from tests.support.free_ports import free_port

HERE = Path(__file__).parent
CONNECTIONS = 16
KNOWN = 64
"""Plans that the cached requests ask for in turn."""
PLAN: dict[str, Any] = {
    "version": 1,
    "name": "load",
    "dataset": {"name": "toy", "size": 1000},
    "adjacency": "add_remove",
    "sampling": {"scheme": "full_batch"},
    "steps": 10,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": "NOISE"}],
    "target": {"epsilon": 8, "delta": 1e-5},
}
BODY = json.dumps(PLAN).replace('"NOISE"', "NOISE")
HEAVY = {
    **PLAN,
    "dataset": {"name": "toy", "size": 1_000_000},
    "sampling": {"scheme": "poisson", "lot_size": 100},
    "target": {"epsilon": 8, "delta": 1e-7},
}
"""With a million steps about two seconds of accounting."""
WRITTEN = {
    "certificates": "1 = 1",
    "certificate_facets": "1 = 1",
    "log_entries": "kind = 'certificate'",
    "requests": "1 = 1",
}
"""The tables that a new certificate writes to, and which of their rows are such."""

noises = itertools.count(2_000_000_000, 1_000_000)
"""Where each round of new plans begins, in millionths; so much noise is soon accounted."""


class Service:
    """A running service, and the baseline reader of its database."""

    def __init__(self, url: str, home: Path, rest: ExitStack) -> None:
        self.url = url
        environment = {
            **os.environ,
            "AFFIDAVIT_HOME": str(home),
            "DATABASE_URL": url,
            "AFFIDAVIT_RATE_LIMIT": "10000000",
            "OMP_NUM_THREADS": "1",
        }
        for command in ("migrate", "keys new"):
            _affidavit(command, environment)
        told = _affidavit("tokens new --name load --scope submit", environment)
        self.token = next(word for word in told.split() if word.startswith("affidavit_"))
        self.port, self.bare = free_port(), free_port()
        serve = [sys.executable, "-m", "affidavit", "serve", "--port", str(self.port)]
        rest.enter_context(_running(serve, self.port, environment, home / "log"))
        bare = [sys.executable, str(HERE / "baseline_read.py"), url, str(self.bare)]
        rest.enter_context(_running(bare, self.bare, environment, home / "bare"))

    def post(self, first: int, kinds: int, seconds: int) -> dict[str, float]:
        """Return wrk's report of posting ``kinds`` plans in turn."""
        script = [HERE / "service.lua", f"http://127.0.0.1:{self.port}"]
        provided = [self.token, BODY, str(first), str(kinds)]
        return _wrk(seconds, "-s", *script, "--", *provided)

    def read(self, certificate: str, seconds: int) -> dict[str, float]:
        """Return wrk's report of reading one row through the baseline."""
        script = [HERE / "report.lua", f"http://127.0.0.1:{self.bare}/{certificate}"]
        return _wrk(seconds, "-s", *script)

    def certify(self, plan: dict[str, Any], connection: HTTPConnection | None = None) -> Any:
        """Return the answer to one plan, which must be certified or refused."""
        connection = connection or HTTPConnection("127.0.0.1", self.port)
        head = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        connection.request("POST", "/v1/certificates", json.dumps(plan), head)
        answer = connection.getresponse()
        result = json.loads(answer.read())
        if answer.status not in (200, 201):
            raise SystemExit(f"answered {answer.status}: {result}")
        return result


def _affidavit(command: str, environment: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-m", "affidavit", *command.split()],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@contextmanager
def _running(
    command: list[str], port: int, environment: dict[str, str], log: Path
) -> Iterator[None]:
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            _await(port, process, log)
            yield
        finally:
            process.terminate()
            process.wait(30)


def _await(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        try:
            HTTPConnection("127.0.0.1", port).connect()
        except OSError:
            time.sleep(0.1)
        else:
            return
        if process.poll() is not None:
            break
    raise SystemExit(f"it did not start: {log.read_text()[-2000:]}")


def _wrk(seconds: int, *given: Any) -> dict[str, float]:
    command = [
        "wrk",
        "-t1",
        f"-c{CONNECTIONS}",
        f"-d{seconds}s",
        "--timeout",
        "60s",
        *map(str, given),
    ]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result = json.loads(told.rpartition("JSON ")[2])
    if result["failed"]:
        raise SystemExit(f"{result['failed']} requests failed:\n{told}")
    return {**result, "rate": result["requests"] / result["seconds"]}


def commit_rate(url: str, seconds: float = 2.0) -> float:
    """Return commits per second of the rows that storing a certificate writes.

    They go to tables without keys, indexes and triggers. SQLite has one writer at a time, and is
    fastest with one client; PostgreSQL gets as many clients as the service's requests have.
    """
    engine = open_engine(url)
    rows = _rows_of_one(engine)
    engine.dispose()
    if url.startswith("sqlite"):
        return _commits_of_one(url, rows, seconds)
    with ThreadPoolExecutor(CONNECTIONS) as clients:
        rates = clients.map(lambda _: _commits_of_many(url, rows, seconds), range(CONNECTIONS))
        return sum(rates)


def _rows_of_one(engine: Engine) -> dict[str, tuple[Any, ...]]:
    """Return one row of each table in ``WRITTEN``, and a table to put it in."""
    with writer(engine).begin() as connection:
        for table in WRITTEN:
            empty = f"SELECT * FROM {table} WHERE 1 = 0"
            connection.execute(text(f"CREATE TABLE IF NOT EXISTS committed_{table} AS {empty}"))
    connection = engine.raw_connection()
    try:
        cursor, result = connection.cursor(), {}
        for table, which in WRITTEN.items():
            cursor.execute(f"SELECT * FROM {table} WHERE {which} LIMIT 1")
            result[table] = tuple(cursor.fetchone())
        return result
    finally:
        connection.close()


def _commits_of_one(url: str, rows: dict[str, tuple[Any, ...]], seconds: float) -> float:
    engine = open_engine(url)  # with the settings that the service gives the file
    connection = engine.raw_connection()
    inserts = [
        (f"INSERT INTO committed_{table} VALUES ({', '.join('?' * len(row))})", row)
        for table, row in rows.items()
    ]
    try:
        cursor = connection.cursor()
        done, begun = 0, time.perf_counter()
        while time.perf_counter() < begun + seconds:
            cursor.execute("BEGIN IMMEDIATE")
            for statement, row in inserts:
                cursor.execute(statement, row)
            connection.commit()
            done += 1
        return done / (time.perf_counter() - begun)
    finally:
        connection.close()
        engine.dispose()


def _commits_of_many(url: str, rows: dict[str, tuple[Any, ...]], seconds: float) -> float:
    import psycopg

    inserts = [
        f"INSERT INTO committed_{table} VALUES ({', '.join(['%s'] * len(row))})"
        for table, row in rows.items()
    ]
    # One statement, and so one round trip and one transaction.
    parts = [f"part{n} AS ({item})" for n, item in enumerate(inserts[1:])]
    statement = f"WITH {', '.join(parts)} {inserts[0]}"
    first, *others = rows.values()
    provided = [value for row in (*others, first) for value in row]
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        done, begun = 0, time.perf_counter()
        while time.perf_counter() < begun + seconds:
            connection.execute(statement, provided)
            done += 1
        return done / (time.perf_counter() - begun)


def livez(service: Service, seconds: float) -> list[float]:
    """Return the response times of ``/livez`` in milliseconds, at a hundred requests a second."""
    connection = HTTPConnection("127.0.0.1", service.port)
    result = []
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        connection.request("GET", "/livez")
        connection.getresponse().read()
        result.append((time.perf_counter() - begun) * 1e3)
        time.sleep(max(0.0, 0.01 - (time.perf_counter() - begun)))
    return result


@contextmanager
def heavy_plans(service: Service) -> Iterator[None]:
    """Keep both workers busy with two callers' plans of about a second each."""
    stop, numbers = Event(), itertools.count()

    def run() -> None:
        connection = HTTPConnection("127.0.0.1", service.port)
        while not stop.is_set():
            scale = 0.8 + next(numbers) * 1e-4
            release = {"name": "all", "clip_norm": 1, "noise_multiplier": scale}
            service.certify({**HEAVY, "steps": 1_000_000, "releases": [release]}, connection)

    callers = [Thread(target=run) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        yield
    finally:
        stop.set()
        for item in callers:
            item.join()


def livez_under_load(service: Service, seconds: int) -> dict[str, float]:
    """Return the response times of ``/livez`` while everything else is busy."""
    requested: list[float] = []
    with heavy_plans(service):
        asking = Thread(target=lambda: requested.extend(livez(service, seconds)))
        asking.start()
        posted = service.post(next(noises), 10**6, seconds)
        asking.join()
    result = statistics.quantiles(requested, n=100)
    return {"p50": result[49], "p99": result[98], "most": max(requested), "rate": posted["rate"]}


def measure(kind: str, service: Service, seconds: int, turns: int) -> None:
    """Measure one database, and return a row for each figure."""
    known = next(noises)
    for item in range(KNOWN):
        release = {"name": "all", "clip_norm": 1, "noise_multiplier": (known + item) / 1e6}
        certificate = service.certify({**PLAN, "releases": [release]})["certificate"]["id"]
    cached, new = [], []
    for turn in range(turns + 1):
        bare, hits = service.read(certificate, seconds), service.post(known, KNOWN, seconds)
        commits, fresh = commit_rate(service.url), service.post(next(noises), 10**6, seconds)
        if turn:  # the first turn warms both up
            cached.append((hits, bare["rate"]))
            new.append((fresh, commits))
    for name, result in (("cached", cached), ("new", new)):
        ratios = sorted(ours["rate"] / theirs for ours, theirs in result)
        ours, theirs = result[len(result) // 2]
        p99 = statistics.median(entry["p99"] for entry, _ in result)
        say(
            f"| {kind} | {name} | {ours['rate']:.0f} | {theirs:.0f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {p99:.1f} |"
        )
    idle = statistics.quantiles(livez(service, seconds), n=100)
    busy = livez_under_load(service, 2 * seconds)
    say(
        f"| {kind} | /livez | p50 {busy['p50']:.1f} ms, p99 {busy['p99']:.1f} ms, most "
        f"{busy['most']:.1f} ms | idle p99 {idle[98]:.1f} ms | | "
        f"at {busy['rate']:.0f} new a second |"
    )


def say(line: str) -> None:
    """Print and flush a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def databases(home: Path) -> Iterator[dict[str, str]]:
    """Yield the URL of an empty database of each kind, as durable as in production."""
    result = {"SQLite": f"sqlite:///{home / 'affidavit.db'}"}
    programs = postgresql_server.binaries()
    if programs is None:
        say("PostgreSQL was not measured: there are no binaries")
        yield result
        return
    port = free_port()
    with postgresql_server.running(programs, port, durable=True):
        server = f"postgresql+psycopg://affidavit@127.0.0.1:{port}"
        engine = create_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text("CREATE DATABASE load"))
        engine.dispose()
        yield {**result, "PostgreSQL": f"{server}/load"}


def main() -> None:
    """Measure and print a table."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not here; run apt-get install wrk")
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    say("| database | requests | a second | beside | ratio | p99, ms |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory, databases(Path(directory)) as result:
        for kind, url in result.items():
            home = Path(directory) / kind
            home.mkdir()
            with ExitStack() as rest:
                measure(kind, Service(url, home, rest), seconds, turns)


if __name__ == "__main__":
    main()
