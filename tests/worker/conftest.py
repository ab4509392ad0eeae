"""A service as a process with a certified plan of a few steps, and workers beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from affidavit.service.core.database import open_engine
from affidavit.trust import KeyStore
from tests.service.conftest import EACH_SCOPE, Server, token_texts
from tests.support.forked_processes import Process, fork
from tests.support.polling import TIMEOUT_SECONDS

PLAN = {
    "version": 1,
    "name": "tiny",
    "dataset": {"name": "digits-train", "size": 1438},
    "adjacency": "add_remove",
    "sampling": {"scheme": "poisson", "lot_size": 64},
    "releases": [{"name": "all", "count": 1, "clip_norm": 1, "noise_multiplier": 2.0}],
    "optimizer": {"name": "dp_sgd", "learning_rate": 0.1},
    "target": {"epsilon": 60, "delta": 1e-5},
}
PROGRAM = "affidavit.worker"
"""What a worker is in production: a program that imports what it needs, as its trainers do."""


@dataclass
class Shop:
    """A running service, a budget, and workers that are started and ended at will."""

    home: Path
    database: str
    server: Server
    tokens: dict[str, str]
    client: httpx.Client
    workers: list[Process] = field(default_factory=list)

    def ask(self, method: str, path: str, who: str = "submit", body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {self.tokens[who]}"}
        url = self.server.url + path
        answer = self.client.request(method, url, headers=headers, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def certify(self, steps: int) -> str:
        result = self.ask("POST", "/v1/certificates", body={**PLAN, "steps": steps})
        assert result["verdict"] == "certified", result["reasons"]
        return str(result["certificate"]["id"])

    def request(self, certificate: str, **more: Any) -> str:
        body = {
            "certificate": certificate,
            "data": "digits:part=train",
            "model": "mlp:8,seed=1,blocks=all",
            "output": "tiny",
        }
        return str(self.ask("POST", "/v1/runs", body={**body, **more})["id"])

    def run(self, run_id: str) -> Any:
        return self.ask("GET", f"/v1/runs/{run_id}")

    def charged(self, run_id: str) -> Any:
        result = self.ask("GET", f"/v1/reservations/{self.run(run_id)['reservation']}")
        return result["state"], result["steps"]["run"]

    def wait(self, run_id: str, *states: str, seconds: float = TIMEOUT_SECONDS) -> Any:
        end = time.monotonic() + seconds
        while (result := self.run(run_id))["state"] not in states:
            assert time.monotonic() < end, (result, self.logs())
            time.sleep(0.1)
        return result

    def begun(self, run_id: str, lines: int = 3) -> Path:
        """The record of a run that charged a step."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while True:
            result = list((self.home / "runs").glob(f"**/{run_id}-*/run/record.jsonl"))
            if result and result[0].read_bytes().count(b"\n") >= lines:
                return result[0]
            assert time.monotonic() < end, (self.run(run_id), self.logs())
            time.sleep(0.02)

    def worker(
        self, *options: str, name: str = "w1", module: str = "tests.worker.forked_worker"
    ) -> Process:
        """A worker process with its own key, which the service trusts."""
        home = self.home_of(name)
        arguments = [
            *("--server", self.server.url, "--outputs", str(self.home / "runs")),
            *("--keys", str(self.trusted), "--name", name, "--wait", "0.1", *options),
        ]
        token = {
            "AFFIDAVIT_HOME": str(home),
            "AFFIDAVIT_TOKEN": self.tokens["work"],
            "HELD_WHILE": str(self.held),
        }
        if module == PROGRAM:
            return self.begin([sys.executable, "-m", module, *arguments], home, **token)
        with (home / "log").open("ab") as log:
            process = fork(module, arguments, {**os.environ, **token}, log.fileno())
        self.workers.append(process)
        return process

    @property
    def held(self) -> Path:
        """The file that forked trainers wait for not to be there."""
        return self.home / "held"

    @property
    def trusted(self) -> Path:
        """The public record of the service's key."""
        (result,) = (self.home / "keys").glob("*.json")
        return result

    def home_of(self, name: str) -> Path:
        """A worker's home, with a key that the service trusts."""
        home = self.home / name
        if not home.exists():
            key = KeyStore(home / "keys").new(name)
            KeyStore(self.home / "worker-keys").save(key.public)
        return home

    def begin(self, command: list[str], home: Path, **more: str) -> subprocess.Popen[bytes]:
        """A process that is a worker or becomes one, which is ended with the shop."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
        with (home / "log").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.workers.append(process)
        return process

    def logs(self) -> str:
        result = [*self.home.glob("w*/log"), *self.home.glob("runs/**/trainer.log")]
        return "\n".join(path.read_text() for path in result)


@pytest.fixture
def shop(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    KeyStore(tmp_path / "keys").new("test")
    engine = open_engine(database_url)
    tokens = token_texts(engine, EACH_SCOPE)
    engine.dispose()
    # A server leaves DATABASE_URL out of its environment, because most tests are about SQLite.
    plain, url = Server._environment, {"DATABASE_URL": database_url}
    monkeypatch.setattr(Server, "_environment", lambda server: {**plain(server), **url})
    server = Server(tmp_path, forked=True)
    server.start()
    # A client for each question would read all authorities' certificates for each. It forgets a
    # connection before the service does, so that none is used just as the service closes it.
    limits = httpx.Limits(keepalive_expiry=2)
    with httpx.Client(timeout=TIMEOUT_SECONDS, limits=limits) as client:
        result = Shop(tmp_path, database_url, server, tokens, client)
        budget = {"adjacency": "add_remove", "epsilon": 1000, "delta": 1e-3}
        result.ask("POST", "/v1/ledgers/digits-train/budget", "admin", budget)
        yield result
    for process in result.workers:
        process.kill()
        process.wait(TIMEOUT_SECONDS)
    server.stop(signal.SIGKILL)
