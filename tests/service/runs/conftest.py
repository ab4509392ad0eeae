"""A service in process with a budget, and workers that only say what they did."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from affidavit.evidence import check_conformance, sign_provenance
from affidavit.service.audit.audit import audit_rows
from affidavit.service.core.database import open_engine, snapshot
from affidavit.service.identity.actor import CommandContext
from affidavit.service.runs.queue import RunQueue
from affidavit.service.settings import Settings
from affidavit.service.tables.runs import run_events
from affidavit.trust import (
    KeyStore,
    SigningKey,
    read_envelope,
)
from tests.service.conftest import EACH_SCOPE, token_texts
from tests.service.conftest import ON_SQLITE as ON_SQLITE
from tests.support.run_records import Record, record_of


@dataclass
class Yard:
    """A running service, a token for each scope, and a worker's key that it trusts."""

    client: Any
    tokens: dict[str, str]
    engine: Engine
    key: SigningKey
    document: Callable[..., dict[str, Any]]

    def ask(self, method: str, path: str, who: str, body: Any = None, **headers: str) -> Any:
        sent = {"authorization": f"Bearer {self.tokens[who]}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.request(method, path, headers=sent, json=body)

    def certify(self, **more: Any) -> str:
        plan = {**self.document(), **more}
        result = self.ask("POST", "/v1/certificates", "submit", plan).json()
        return str(result["certificate"]["id"])

    def request(self, certificate: str, **more: Any) -> Any:
        body = {"certificate": certificate, "data": "digits", "model": "mlp:8", "output": "o"}
        return self.ask("POST", "/v1/runs", "submit", {**body, **more})

    def claim(self, **more: Any) -> Any:
        answer = self.ask("POST", "/v1/queues/default/claims", "work", {"worker": "w", **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def say(self, job: Any, what: str, **body: Any) -> Any:
        path = f"/v1/runs/{job['run']}/{what}"
        return self.ask(
            "POST", path, "work", {"fence": job["fence"], "secret": job["secret"], **body}
        )

    def start(self, job: Any) -> Any:
        return self.say(job, "start", plan_digest=job["plan_digest"])

    def predicate(self, job: Any) -> dict[str, Any]:
        bundle = self.ask("GET", f"/v1/runs/{job['run']}/bundle", "work").json()
        result: dict[str, Any] = json.loads(read_envelope(bundle["envelope"]).payload)["predicate"]
        return result

    def complete(
        self,
        job: Any,
        record: Record | int,
        *,
        key: SigningKey | None = None,
        send: bool = True,
        signed: Record | None = None,
    ) -> Any:
        """Report a record, or that of a run of so many steps."""
        if isinstance(record, int):
            record = record_of(self.predicate(job), record)
        if send:
            lines = record.content
            half = len(lines) // 2
            for part, content in enumerate((lines[:half], lines[half:]), start=1):
                answer = self.say(job, "record", part=part, lines=content)
                if not answer.is_success:
                    return answer
        envelope = sign_provenance(
            key or self.key,
            check_conformance((signed or record).content.encode(), record.predicate),
            **{name: job[name] for name in ("run", "fence", "data", "model")},
            worker="w",
            weights="2" * 64,
            header={},
            began=datetime.now(UTC),
        )
        return self.say(job, "complete", provenance=envelope)

    def charged(self, run: Any) -> tuple[str, int | None]:
        result = self.ask("GET", f"/v1/reservations/{run['reservation']}", "audit").json()
        return result["state"], result["steps"]["run"]

    def run(self, run: Any) -> Any:
        return self.ask("GET", f"/v1/runs/{run['id']}", "audit").json()

    def later(self, seconds: int) -> int:
        """The reaper, so many seconds from now."""
        at = datetime.now(UTC) + timedelta(seconds=seconds)
        return RunQueue(self.engine).expire_leases(CommandContext(actor="test", at=at))

    def altered(self) -> list[str]:
        """The rows that the log contradicts."""
        with snapshot(self.engine) as connection:
            return [finding.where for finding in audit_rows(connection)]

    def events(self, run: Any) -> list[dict[str, Any]]:
        """What the database has of a run's events."""
        with self.engine.connect() as connection:
            columns = (run_events.c.kind, run_events.c.fence, run_events.c.body)
            query = select(*columns).where(run_events.c.run_id == run["id"])
            result = connection.execute(query.order_by(run_events.c.seq)).all()
        return [
            {"kind": item.kind, "fence": item.fence, **json.loads(item.body)} for item in result
        ]


@pytest.fixture
def yard(
    database_url: str, tmp_path: Path, client_of: Any, document: Callable[..., dict[str, Any]]
) -> Iterator[Yard]:
    KeyStore(tmp_path / "keys").new("test")
    key = SigningKey.generate("worker")
    KeyStore(tmp_path / "worker-keys").save(key.public)
    settings = Settings(
        database_url=database_url, key_directory=tmp_path / "keys", workers=1, loopback=True
    )
    engine = open_engine(database_url)
    tokens = token_texts(engine, EACH_SCOPE)
    with client_of(settings) as client:
        result = Yard(client, tokens, engine, key, document)
        budget = {"adjacency": "add_remove", "epsilon": 500, "delta": 1e-3}
        assert result.ask("POST", "/v1/ledgers/toy/budget", "admin", budget).is_success
        yield result
    engine.dispose()
