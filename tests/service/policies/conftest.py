"""A service on a network with people in it, on either database."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from affidavit.service.core.database import open_engine, writer
from affidavit.service.settings import Settings
from affidavit.service.tables.log import log_entries
from affidavit.trust import KeyStore, format_instant
from tests.service.conftest import ONCE

PEOPLE = {
    "ada": ["admin"],
    "sam": ["submit"],
    "sue": ["submit"],
    "pat": ["submit", "approve"],
    "amy": ["approve"],
    "ann": ["audit"],
}


@dataclass
class House:
    """A running service, tokens of the people above, and a connection of our own."""

    client: Any
    settings: Settings
    engine: Engine
    tokens: dict[str, dict[str, str]]

    def ask(self, who: str, method: str, path: str, document: Any = None, **sent: Any) -> Any:
        """One request of a person; a document is sent as JSON."""
        headers = dict(self.tokens[who])
        if document is not None:
            sent["content"] = (
                document if isinstance(document, bytes) else json.dumps(document).encode()
            )
            headers["content-type"] = "application/json"
        return self.client.request(method, path, headers=headers | sent.pop("headers", {}), **sent)

    def submit(self, who: str, plan: dict[str, Any]) -> Any:
        """The answer to a plan; it is one of 200 and 201."""
        answer = self.ask(who, "POST", "/v1/certificates", plan)
        assert answer.status_code in (200, 201), answer.text
        return answer

    def activate(self, **changes: Any) -> dict[str, Any]:
        """A policy for the data set ``toy`` with some fields set, active from now on."""
        answer = self.ask("ada", "POST", "/v1/policies", policy(**changes))
        assert answer.status_code == 201, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def waive(self, who: str = "amy", **changes: Any) -> Any:
        """The answer to asking for a waiver of the cap for ``toy``."""
        return self.ask(who, "POST", "/v1/waivers", waiver_request(**changes))

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """The log's entries of one kind, in order."""
        query = select(log_entries.c.content).where(log_entries.c.kind == kind)
        with self.engine.connect() as connection:
            rows = connection.execute(query.order_by(log_entries.c.id)).scalars()
            return [json.loads(row) for row in rows]

    def tamper(self, table: str, statement: str, **values: Any) -> None:
        """Change a protected row, as somebody who owns the database can."""
        with writer(self.engine).begin() as connection:  # the log is written to meanwhile
            if self.engine.dialect.name == "sqlite":
                names = connection.execute(
                    text("SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = :t"),
                    {"t": table},
                ).scalars()
                for name in list(names):
                    connection.execute(text(f"DROP TRIGGER {name}"))
            else:
                connection.execute(text(f"ALTER TABLE {table} DISABLE TRIGGER ALL"))
            assert connection.execute(text(statement), values).rowcount

    def restarted(self) -> None:
        """As after a restart: nothing is remembered of the rules."""
        store = self.client.app.state.services.policies
        store._last = type(store._last)()


def policy(**changes: Any) -> dict[str, Any]:
    """A policy's document: for the data set ``toy``, with some fields set."""
    least = {"schema_version": 1, "name": "toys", "version": 1, "datasets": ["toy"]}
    return {**least, **changes}


def waiver_request(**changes: Any) -> dict[str, Any]:
    """What asks for a waiver of the cap for ``toy``, with fields changed or left out."""
    provided = {
        "rule": "policy_epsilon_cap",
        "policy": "toys",
        "dataset": "toy",
        "owner": "olga",
        "reason": "a pilot, agreed with the privacy officer",
        "expires_at": in_days(30),
        **changes,
    }
    return {key: value for key, value in provided.items() if value is not ...}


def in_days(days: float) -> str:
    """That time from now, as documents write it."""
    return format_instant(datetime.now(UTC) + timedelta(days=days))


@pytest.fixture(name="policy")
def _policy() -> Callable[..., dict[str, Any]]:
    return policy


@pytest.fixture(name="waiver_request")
def _wanted() -> Callable[..., dict[str, Any]]:
    return waiver_request


@pytest.fixture(name="in_days")
def _in_days() -> Callable[[float], str]:
    return in_days


@pytest.fixture
def house(
    database_url: str,
    tmp_path: Path,
    client_of: Callable[..., Any],
    tokens_for: Any,
) -> Iterator[House]:
    """A service with an empty database of either kind."""
    KeyStore(tmp_path / "keys").new("test")
    settings = Settings(
        database_url=database_url,
        key_directory=tmp_path / "keys",
        workers=1,
        rate_limit=1_000_000,
        comparison_seconds=ONCE,
    )
    engine = open_engine(database_url)
    with client_of(settings, address="192.0.2.1") as client:
        yield House(client, settings, engine, tokens_for(settings, PEOPLE))
    engine.dispose()
