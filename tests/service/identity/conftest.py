"""A service that listens on a network, with one token of each kind, for a whole module."""

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


@dataclass
class Network:
    """A running service that is not on loopback, and tokens for it."""

    client: Any
    settings: Settings
    tokens: dict[str, str] = field(default_factory=dict)

    def ask(self, method: str, path: str, token: str | None, **sent: Any) -> Any:
        """One request with the token of that kind, a scope's or an invalid one's."""
        headers = {} if token is None else {"authorization": f"Bearer {self.tokens[token]}"}
        return self.client.request(method, path, headers=headers, follow_redirects=False, **sent)


@pytest.fixture(scope="module")
def network_settings(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings of a service on a network that nobody has a token for yet."""
    home = tmp_path_factory.mktemp("network")
    shutil.copy(migrated_sqlite, home / "affidavit.db")
    KeyStore(home / "keys").new("test")
    return Settings(
        database_url=f"sqlite:///{home / 'affidavit.db'}",
        key_directory=home / "keys",
        workers=1,
        rate_limit=1_000_000,
    )


@pytest.fixture(scope="module")
def network(network_settings: Settings, client_of: Callable[..., Any]) -> Iterator[Network]:
    """Tokens of every scope alone, and of none that counts."""
    settings = network_settings
    engine = open_engine(settings.database_url)
    store, now = TokenRepository(engine), datetime.now(UTC)
    tokens = {}
    for scope in Scope:
        tokens[scope.value] = store.new(scope.value, [scope], 1, by="test", at=now)[1].text
    long_ago = now - timedelta(days=2)
    tokens["expired"] = store.new("expired", list(Scope), 1, by="test", at=long_ago)[1].text
    created, text = store.new("revoked", list(Scope), 1, by="test", at=now)
    store.revoke(created.id, "test", by="test", at=now)
    tokens["revoked"] = text.text
    engine.dispose()
    with client_of(settings, address="192.0.2.1") as client:
        yield Network(client, settings, tokens)
