"""A service on a network with a token of each kind, which accounts in its own process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from affidavit.service.core.database import open_engine
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.settings import Settings
from affidavit.trust import KeyStore

ROLES = ("nobody", "expired", *(scope.value for scope in Scope))


@dataclass
class Asked:
    """A running service, and the headers of each role."""

    client: Any
    headers: dict[str, dict[str, str]]
    known: dict[str, str] = field(default_factory=dict)
    """Values of path parameters that lead to something."""

    def ask(self, role: str, path: str, document: Any) -> Any:
        """The answer to a document, which must be that something was made."""
        answer = self.client.post(path, json=document, headers=self.headers[role])
        assert answer.status_code == 201, answer.text
        return answer.json()

    def furnish(self, plan: Any) -> None:
        """A certificate, a policy, a budget and a reservation."""
        created = self.ask("submit", "/v1/certificates", plan)["certificate"]["id"]
        policy = {"schema_version": 1, "name": "toys", "version": 1, "datasets": ["toy"]}
        self.ask("admin", "/v1/policies", policy)
        budget = {"adjacency": "add_remove", "epsilon": 8, "delta": 1e-4}
        self.ask("admin", "/v1/ledgers/toy/budget", budget)
        reserved = self.ask("submit", "/v1/ledgers/toy/reservations", {"certificate": created})
        self.known = {
            "certificate_id": created,
            "issue": "1",
            "name": "toys",
            "version": "1",
            "dataset": "toy",
            "reservation_id": reserved["id"],
        }


@pytest.fixture(scope="module")
def api(
    migrated_sqlite: Path,
    tmp_path_factory: pytest.TempPathFactory,
    client_of: Callable[..., Any],
    document: Callable[..., dict[str, Any]],
) -> Iterator[Asked]:
    """The service on SQLite, for a whole module."""
    home = tmp_path_factory.mktemp("asked")
    shutil.copy(migrated_sqlite, home / "affidavit.db")
    KeyStore(home / "keys").new("test")
    settings = Settings(
        database_url=f"sqlite:///{home / 'affidavit.db'}",
        key_directory=home / "keys",
        workers=1,
        rate_limit=1_000_000,
    )
    engine = open_engine(settings.database_url)
    store, now = TokenRepository(engine), datetime.now(UTC)
    headers: dict[str, dict[str, str]] = {"nobody": {}}
    for role in ROLES[1:]:
        scopes = list(Scope) if role == "expired" else [Scope(role)]
        made_at = now - timedelta(days=2) if role == "expired" else now
        token = store.new(role, scopes, 1, by="test", at=made_at)[1].text
        headers[role] = {"authorization": f"Bearer {token}"}
    engine.dispose()
    with client_of(settings, address="192.0.2.1") as client:
        result = Asked(client, headers)
        result.furnish(document())
        yield result
