"""Two replicas on PostgreSQL whose clocks differ, of which one hangs, while the server is restarted
and set back: nothing happens twice, and nothing is spent that the log does not have."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from affidavit.service.audit.audit import audit
from affidavit.service.core.database import (
    TIMEOUTS,
    open_engine,
    snapshot,
    writer,
)
from affidavit.service.operation.database_admin import upgrade
from affidavit.trust import KeyStore
from tests.service.conftest import EACH_SCOPE, Server, token_texts
from tests.service.ledger_replay import replay
from tests.support import postgresql_server
from tests.support.free_ports import free_port
from tests.support.polling import TIMEOUT_SECONDS, wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        postgresql_server.binaries() is None or shutil.which("cc") is None,
        reason="needs PostgreSQL and a C compiler",
    ),
]

AHEAD = 600
HUNG_SECONDS = 60
CLIENTS = 8
LONGEST = sum(TIMEOUTS[name] for name in ("lock_timeout", "idle_in_transaction_session_timeout"))
BUDGET = {"adjacency": "add_remove", "epsilon": 50, "delta": 1e-3}
SHIM = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *at) {{
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, at);
    if (clock == CLOCK_REALTIME) at->tv_sec += {AHEAD};
    return result;
}}
"""


@dataclass
class Replica(Server):
    """One of several services on one database, perhaps with a clock of its own."""

    more: dict[str, str] = field(default_factory=dict)

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self.more}

    def ready(self) -> tuple[int, str]:
        answer = httpx.get(f"{self.url}/readyz", timeout=TIMEOUT_SECONDS)
        return answer.status_code, answer.text


@dataclass
class Load:
    """Clients that reserve, commit and settle, each request sent with a key of its own."""

    replicas: list[Replica]
    tokens: dict[str, str]
    certificate: str
    statuses: Counter[int] = field(default_factory=Counter)
    reserved: dict[str, set[str]] = field(default_factory=dict)
    slowest: dict[int, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, replica: Replica, path: str, who: str, body: Any, key: str) -> Any:
        head = {"authorization": f"Bearer {self.tokens[who]}", "idempotency-key": key}
        began = time.monotonic()
        try:
            answer = httpx.post(
                f"{replica.url}{path}", headers=head, json=body, timeout=TIMEOUT_SECONDS
            )
        except httpx.HTTPError:
            return None
        with self.lock:
            self.statuses[answer.status_code] += 1
            took = time.monotonic() - began
            self.slowest[replica.port] = max(self.slowest.get(replica.port, 0.0), took)
        return answer

    def one(self, first: int) -> None:
        """A reservation, requested of both replicas under one key, and its settlement."""
        key, body, names = str(uuid.uuid4()), {"certificate": self.certificate}, set()
        order = [self.replicas[first % 2], self.replicas[(first + 1) % 2]]
        for replica in order:
            answer = self.send(replica, "/v1/ledgers/toy/reservations", "submit", body, key)
            if answer is not None and answer.is_success:
                names.add(answer.json()["id"])
        with self.lock:
            self.reserved[key] = names
        for name in names:
            for replica in order:
                for step in ("commit", "settle"):
                    self.send(replica, f"/v1/reservations/{name}/{step}", "work", {}, key + step)

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()

        def run(number: int) -> None:
            while not stop.is_set():
                self.one(number)
                number += 1

        threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def grow(self) -> None:
        """Wait until every client has made some more reservations, or was refused them."""
        least = len(self.reserved) + 4 * CLIENTS
        wait_until(lambda: len(self.reserved) > least)

    def take(self) -> tuple[Counter[int], dict[int, float]]:
        """Statuses and the slowest answer of each replica since the last time."""
        taken = self.statuses, self.slowest
        self.statuses, self.slowest = Counter(), {}
        return taken


def consistent(url: str, load: Load) -> int:
    """Check rows, ledger and log against each other and the answers; the reservations stored."""
    engine = open_engine(url)
    try:
        assert all(len(names) <= 1 for names in load.reserved.values())
        with engine.connect() as connection:
            stored = Counter(connection.execute(text("SELECT id FROM reservations")).scalars())
        answered = {name for names in load.reserved.values() for name in names}
        assert answered <= set(stored)
        assert not replay(engine)

        def all_logged() -> bool:
            with snapshot(engine) as connection:
                return not connection.execute(text("SELECT 1 FROM log_pending LIMIT 1")).first()

        wait_until(all_logged)
        with snapshot(engine) as connection:
            findings = list(audit(connection, []))
        assert not findings, findings
        return len(stored)
    finally:
        engine.dispose()


@pytest.fixture
def ahead(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose clock is ten minutes ahead."""
    (tmp_path / "ahead.c").write_text(SHIM)
    built = tmp_path / "ahead.so"
    source = str(tmp_path / "ahead.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(built), source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(built)}


def test_nothing_is_double_and_nothing_is_spent_that_the_log_does_not_have(
    tmp_path: Path, ahead: dict[str, str], plan: Callable[..., dict[str, Any]]
) -> None:
    programs = postgresql_server.binaries()
    assert programs is not None
    with postgresql_server.cluster(programs, free_port(), durable=True) as server:
        url = f"{server.url}/postgres"
        upgrade(url)
        KeyStore(tmp_path / "keys").new("test")
        engine = open_engine(url)
        tokens = token_texts(engine, EACH_SCOPE)
        engine.dispose()
        common = {"DATABASE_URL": url, "AFFIDAVIT_LOG_ORIGIN": "two.example/log"}
        replicas = [
            Replica(tmp_path, more={**common, "AFFIDAVIT_CHECKPOINT_EXPORT": str(tmp_path / name)})
            for name in ("a.note", "b.note")
        ]
        right, other = replicas
        other.more.update(ahead)
        try:
            _soak(server, url, replicas, tokens, plan)
        finally:
            for replica in (right, other):
                replica.stop(signal.SIGKILL)


def _soak(
    server: postgresql_server.Cluster,
    url: str,
    replicas: list[Replica],
    tokens: dict[str, str],
    plan: Callable[..., dict[str, Any]],
) -> None:
    right, other = replicas
    right.start()
    other.start()
    head = {"authorization": f"Bearer {tokens['admin']}"}
    budget = httpx.post(f"{right.url}/v1/ledgers/toy/budget", headers=head, json=BUDGET)
    assert budget.status_code == 201, budget.text
    head = {"authorization": f"Bearer {tokens['submit']}"}
    tiny = plan(steps=1, releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 2000}])
    made = httpx.post(
        f"{right.url}/v1/certificates", headers=head, json=tiny, timeout=TIMEOUT_SECONDS
    )
    load = Load(replicas, tokens, made.json()["certificate"]["id"])

    # Clocks ten minutes apart: the one that is off says so, and writes nothing.
    status, said = other.ready()
    assert (status, "clock_skewed" in said) == (503, True), said
    with load.running():
        load.grow()
    statuses, _ = load.take()
    assert set(statuses) == {200, 201, 503}, statuses
    first = consistent(url, load)
    assert first > 0

    # The other with the right time. One that hangs for a minute holds nobody up beyond timeouts.
    other.stop()
    other.more.pop("LD_PRELOAD")
    other.start()
    for hung, well in ((right, other), (other, right)):
        assert hung.process is not None
        with load.running():
            load.grow()
            hung.process.send_signal(signal.SIGSTOP)
            time.sleep(HUNG_SECONDS)  # longer than the database waits for it
            hung.process.send_signal(signal.SIGCONT)
            load.grow()
        statuses, slowest = load.take()
        assert not {code for code in statuses if code >= 500} - {503}, statuses
        assert slowest[well.port] < LONGEST, slowest
        consistent(url, load)

    # PostgreSQL restarted under load, as after a crash and in order.
    old = server.directory / "old"
    for sent in (signal.SIGQUIT, signal.SIGINT):
        with load.running():
            load.grow()
            server.stop(sent)
            if sent is signal.SIGINT:
                subprocess.run(["cp", "-a", server.directory / "data", old], check=True)
            server.start()
            load.grow()
        statuses, slowest = load.take()
        assert not {code for code in statuses if code >= 500} - {503}, statuses
        assert max(slowest.values()) < LONGEST, slowest
        stored = consistent(url, load)

    # An old copy of the database under the running replicas: they know better, and spend nothing.
    server.stop(signal.SIGINT)
    shutil.rmtree(server.directory / "data")
    old.rename(server.directory / "data")
    server.start()
    engine = open_engine(url)
    with writer(engine).begin() as connection:
        count = text("SELECT count(*) FROM ledger_events")
        events = connection.execute(count).scalar_one()
        assert connection.execute(text("SELECT count(*) FROM reservations")).scalar_one() < stored
    with load.running():
        load.grow()
    statuses, _ = load.take()
    assert not {code for code in statuses if code < 500}, statuses
    for replica in replicas:  # and once more when they start again
        assert "log_damaged" in replica.ready()[1]
        replica.stop()
        replica.start()
        assert "log_damaged" in replica.ready()[1]
        assert (
            load.send(
                replica,
                "/v1/ledgers/toy/reservations",
                "submit",
                {"certificate": load.certificate},
                "x",
            ).status_code
            == 503
        )
    with engine.connect() as connection:
        assert connection.execute(count).scalar_one() == events
    engine.dispose()
