"""kill -9 of the serving process at named points: what was answered stays, nothing is twice.

The same process starts again each time on the same database and is asked the same again,
as a client does that got no answer. After each death the audit replays the log against
all tables, and holds it to the checkpoint that was seen last.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from affidavit.service.audit.audit import audit
from affidavit.service.core.database import open_engine, snapshot
from affidavit.service.settings import Settings
from affidavit.trust import KeyStore
from affidavit.trust.log import Checkpoint, read_checkpoint
from tests.support.forked_processes import Forked, fork
from tests.support.polling import TIMEOUT_SECONDS, wait_until
from tests.support.random_seeds import examples, seeded

CERTIFICATE, ENTRY = "INSERT INTO certificates", "INSERT INTO log_entries"
POINTS = (
    *(("certify", f"{moment} {CERTIFICATE}") for moment in ("before", "after")),
    *(("certify", f"{moment} {CERTIFICATE}") for moment in ("uncommitted", "committed")),
    ("certify", f"before {ENTRY}"),
    *(("approve", f"{moment} INSERT INTO approvals") for moment in ("before", "after")),
    *(("approve", f"{moment} {CERTIFICATE}") for moment in ("before", "uncommitted", "committed")),
    *(("settle", f"{moment} INSERT INTO ledger_events") for moment in ("before", "after")),
    *(("settle", f"{moment} {ENTRY}") for moment in ("after", "uncommitted", "committed")),
    ("sequence", "before INSERT INTO log_leaves"),
    ("sequence", "after DELETE FROM log_pending"),
    *(
        ("sequence", f"{moment} INSERT INTO log_checkpoints")
        for moment in ("before", "uncommitted", "committed")
    ),
)
TOGETHER = tuple(
    f"{moment} MANY {statement}"
    for moment, statement in (
        ("after", CERTIFICATE),
        ("before", "INSERT INTO requests"),
        ("uncommitted", CERTIFICATE),
        ("committed", CERTIFICATE),
    )
)
"""Points of a transaction that keeps several certificates."""
CROWD = 8
RECORD = "sha256:" + "0" * 64
NEVER = "before NOTHING"


@dataclass
class Mortal:
    """A service that dies, the people who ask it, and who looks at what is left."""

    home: Path
    url: str
    headers: dict[str, dict[str, str]]
    engine: Engine
    environment: dict[str, str]
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=TIMEOUT_SECONDS))
    process: Forked | None = None
    seen: list[Checkpoint] = field(default_factory=list)

    def start(self, point: str) -> None:
        """Start it; it will die at ``point`` once armed."""
        (self.home / "armed").unlink(missing_ok=True)
        said = self.home / "said"
        with said.open("wb") as said_to:
            module = "tests.service.whole.self_killing_service"
            self.process = fork(module, [point], self.environment, said_to.fileno())
        wait_until(lambda: address(said) is not None, often=0.01, said=said.read_text)
        self.client.base_url = httpx.URL(address(said) or "")

    def arm(self) -> None:
        self.send(signal.SIGUSR1)
        wait_until((self.home / "armed").exists, often=0.005)

    def send(self, sent: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(sent)

    def died(self) -> int:
        """How it ended, once it has."""
        assert self.process is not None
        return self.process.wait(TIMEOUT_SECONDS)

    def ask(self, who: str, path: str, body: Any, **headers: str) -> Any:
        sent = {**self.headers[who], **headers}
        return self.client.post(path, json=body, headers=sent)

    def get(self, path: str) -> Any:
        return self.client.get(path, headers=self.headers["pat"])

    def look(self) -> None:
        """Nothing is torn: tables and log agree, and the log continues what was seen of it."""
        with snapshot(self.engine) as connection:
            assert list(audit(connection, self.seen[-1:])) == []

    def remember(self) -> None:
        """The newest checkpoint, once everything has its place in the log."""
        wait_until(lambda: not self.count("log_pending"))
        self.seen.append(read_checkpoint(self.get("/v1/log/checkpoint").text))

    def count(self, table: str, where: str = "1 = 1") -> int:
        with self.engine.connect() as connection:
            query = text(f"SELECT COUNT(*) FROM {table} WHERE {where}")
            result: int = connection.execute(query).scalar_one()
            return result


def address(said: Path) -> str | None:
    """Where a service listens that wrote so to ``said``."""
    match = re.search(r"listening on (http://127\.0\.0\.1:\d+)", said.read_text())
    return match and match[1]


@pytest.fixture
def mortal(database_url: str, tmp_path: Path, tokens_for: Any) -> Iterator[Mortal]:
    KeyStore(tmp_path / "keys").new("test")
    settings = Settings(database_url=database_url, key_directory=tmp_path / "keys")
    people = {"sam": ["submit"], "pat": ["approve"], "wim": ["work"], "ada": ["admin"]}
    headers = tokens_for(settings, people)
    created = {"AFFIDAVIT_HOME": str(tmp_path), "DATABASE_URL": database_url}
    environment = {**os.environ, **created, "AFFIDAVIT_RATE_LIMIT": "1000000"}
    engine = open_engine(database_url)
    result = Mortal(tmp_path, database_url, headers, engine, environment)
    yield result
    if result.process is not None:
        result.process.kill()
        result.process.wait(TIMEOUT_SECONDS)
    result.client.close()
    engine.dispose()


class Work:
    """One thing to be done, asked until it is answered, and what has then happened once."""

    def __init__(self, mortal: Mortal, kind: str, plan: dict[str, Any]) -> None:
        self.mortal, self.kind, self.plan = mortal, kind, plan
        self.answered: Any = None
        self.made: dict[str, Any] = {}
        self.reservation = ""

    def prepare(self) -> None:
        """What must be there before the work itself."""
        if self.kind in ("certify", "sequence"):
            return
        answer = self.mortal.ask("sam", "/v1/certificates", self.plan)
        assert answer.status_code == 201, answer.text
        self.made = answer.json()["certificate"]
        if self.kind == "settle":
            body = {"certificate": self.made["id"]}
            answer = self.mortal.ask("sam", "/v1/ledgers/toy/reservations", body)
            assert answer.status_code == 201, answer.text
            self.reservation = answer.json()["id"]
            where = f"/v1/reservations/{self.reservation}/commit"
            assert self.mortal.ask("wim", where, {}).status_code == 200

    def ask(self) -> Any:
        if self.kind == "approve":
            body = {"envelope": self.made["envelope_digest"]}
            where = f"/v1/certificates/{self.made['id']}/approvals"
            return self.mortal.ask("pat", where, body)
        if self.kind == "settle":
            where = f"/v1/reservations/{self.reservation}/settle"
            body = {"record": RECORD}
            key = {"idempotency-key": self.reservation}
            return self.mortal.ask("wim", where, body, **key)
        return self.mortal.ask("sam", "/v1/certificates", self.plan)

    def try_it(self) -> None:
        """Ask once; there may be no answer."""
        with suppress(httpx.TransportError):
            answer = self.ask()
            assert answer.status_code in (200, 201), answer.text
            self.answered = answer.json()

    def finish(self) -> None:
        """Ask again, and see that it happened once and as it was answered."""
        answer = self.ask()
        mortal = self.mortal
        if self.kind == "approve":
            # Decided before the death, it cannot be decided again, and says so.
            assert answer.status_code in (201, 409), answer.text
            identity = self.made["id"]
            now = mortal.get(f"/v1/certificates/{identity}").json()["certificate"]
            assert (now["issue"], now["status"]) == (2, "active")
            assert mortal.count("approvals", f"certificate_id = '{identity}'") == 1
            assert mortal.count("certificates", f"id = '{identity}'") == 2
            assert mortal.count("log_entries", f"subject = '{identity}'") == 3
        elif self.kind == "settle":
            assert answer.status_code == 200, answer.text
            result = answer.json()
            assert (result["state"], result["steps"]["run"]) == ("settled", self.plan["steps"])
            events = f"reservation_id = '{self.reservation}' AND kind = 'settle'"
            assert mortal.count("ledger_events", events) == 1
        else:
            assert answer.status_code in (200, 201), answer.text
            identity = answer.json()["certificate"]["id"]
            assert mortal.count("certificates", f"id = '{identity}'") == 1
            assert mortal.count("log_entries", f"subject = '{identity}'") == 1
            if self.answered is not None:
                assert answer.json() == self.answered


def works(mortal: Mortal, kinds: list[str], plan: Any) -> list[Work]:
    """Work of each kind, on plans of their own, prepared by a service that lives."""
    mortal.start(NEVER)
    policy = {"schema_version": 1, "name": "two", "version": 1, "datasets": ["careful"]}
    answer = mortal.ask("ada", "/v1/policies", {**policy, "approvals": 1})
    assert answer.status_code == 201, answer.text
    budget = {"adjacency": "add_remove", "epsilon": 100, "delta": 1e-2}
    answer = mortal.ask("ada", "/v1/ledgers/toy/budget", budget)
    assert answer.status_code == 201, answer.text
    created = []
    for number, kind in enumerate(kinds, 5):
        dataset = {"name": "careful" if kind == "approve" else "toy", "size": 1000}
        created.append(Work(mortal, kind, plan(steps=number, dataset=dataset)))
        created[-1].prepare()
    mortal.remember()
    mortal.send(signal.SIGKILL)
    assert mortal.died() == -signal.SIGKILL
    mortal.look()
    return created


@pytest.mark.soak
def test_killed_at_twenty_points_nothing_answered_is_lost_and_nothing_happens_twice(
    mortal: Mortal, plan: Any
) -> None:
    assert len(POINTS) == 20
    unanswered = None
    created = works(mortal, [item for item, _ in POINTS], plan)
    for work, (_, point) in zip(created, POINTS, strict=True):
        mortal.start(point)
        if unanswered is not None:
            unanswered.finish()
        if work.kind == "sequence":
            mortal.remember()  # nothing waits but what this work enters
        mortal.arm()
        work.try_it()
        assert mortal.died() == -signal.SIGKILL, point
        # The log may be quicker than the answer.
        assert work.answered is None or work.kind == "sequence", point
        mortal.look()
        unanswered = work
    mortal.start(NEVER)
    assert unanswered is not None
    unanswered.finish()
    assert any(work.answered for work in created)
    mortal.remember()
    mortal.look()


def test_killed_while_several_are_kept_together_each_is_kept_once_or_can_be_asked_again(
    mortal: Mortal, plan: Any
) -> None:
    number = itertools.count(100)
    before: list[Work] = []
    points = random.Random(seeded(4)).sample(TOGETHER, examples(len(TOGETHER)))
    for point in (*points, NEVER):
        mortal.start(point)
        for work in before:
            work.finish()
        mortal.remember()
        if point == NEVER:
            break
        before = [Work(mortal, "certify", plan(steps=next(number))) for _ in range(CROWD)]
        mortal.arm()
        with ThreadPoolExecutor(CROWD) as callers:
            list(callers.map(Work.try_it, before))
        assert mortal.died() == -signal.SIGKILL, point
        # The one that was held up, and nobody whose certificate was on its way.
        assert sum(work.answered is not None for work in before) <= CROWD // 2, point
        mortal.look()
    mortal.look()


@pytest.mark.ordinary("postgresql")
def test_killed_at_random_statements_the_same_holds(mortal: Mortal, plan: Any) -> None:
    draw = random.Random(seeded(20261121))
    kinds = ["certify", "approve", "settle"]
    left = works(mortal, kinds, plan)
    while left:
        mortal.start(f"statement {draw.randrange(1, 60)}")
        mortal.arm()
        for work in left[:3]:
            work.try_it()
        with suppress(ProcessLookupError):
            mortal.send(signal.SIGKILL)
        assert mortal.died() == -signal.SIGKILL
        mortal.look()
        mortal.start(NEVER)
        for work in left[:3]:
            work.finish()
        mortal.remember()
        mortal.send(signal.SIGKILL)
        assert mortal.died() == -signal.SIGKILL
        left = left[3:]
