"""What a public log says of entries that one may not read: their number, and nothing else."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, text

from affidavit.service.core.database import writer
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.log import entries
from affidavit.service.log.entries import append
from affidavit.service.log.stored_tree import verify_range
from affidavit.service.operation import database_admin
from affidavit.service.settings import Settings
from affidavit.trust import KeyStore
from affidavit.trust.log import (
    LogEntry,
    merkle_tree,
)
from tests.service.log.conftest import Log

SECOND = datetime(2026, 3, 1, 9, 30, tzinfo=UTC)
NAMES = ("ann", "bob", "cho", "dan")
TEAMS = ("imaging", "genomics")
NEW_SALT = "UPDATE log_entries SET salt = :salt WHERE kind = 'grant'"


def guesses() -> Iterator[LogEntry]:
    """Every administrator, team and data set, at each tenth of a second of one second."""
    for by, team, dataset, tenth in product(NAMES, TEAMS, ("scans", "reads"), range(10)):
        yield LogEntry(
            kind="grant",
            subject=dataset,
            actor=f"person:{by}",
            at=SECOND + timedelta(seconds=tenth / 10),
            body={"team": team, "may": "reserve", "reason": ""},
        )


@dataclass
class PublicLog:
    """A service's log, and somebody without a token who guesses."""

    log: Log
    client: TestClient
    submitter: dict[str, str]
    auditor: dict[str, str]

    def grant(self, guess: LogEntry) -> None:
        with writer(self.log.engine).begin() as connection:
            append(connection, "grant", guess.subject, guess.body, actor=guess.actor, at=guess.at)

    def tile(self, path: str, headers: dict[str, str] | None = None) -> Any:
        return self.client.get(f"/v1/tlog/tile/{path}", headers=headers or {})

    def hashes(self) -> list[bytes]:
        """The hashes of all leaves, as anybody reads them."""
        size = self.log.reader.latest().checkpoint.size
        answer = self.tile(f"0/000.p/{size}")
        assert answer.status_code == 200
        return merkle_tree.decode_hashes(answer.content)


@pytest.fixture
def public(
    database_url: str, tmp_path: Path, client_of: Callable[..., TestClient]
) -> Iterator[PublicLog]:
    KeyStore(tmp_path / "keys").new("test")
    settings = Settings(database_url=database_url, key_directory=tmp_path / "keys", workers=1)
    with client_of(settings, address="192.0.2.1") as client:
        engine: Engine = client.app.state.services.engine  # type: ignore[attr-defined]
        now, headers = datetime.now(UTC), []
        for scope in ("submit", "audit"):
            token = TokenRepository(engine).new(scope, [scope], 1, by="test", at=now)[1]
            headers.append({"Authorization": f"Bearer {token.text}"})
        yield PublicLog(Log(database_url, engine), client, *headers)


def confirmed(public: PublicLog, spell: Callable[[LogEntry], bytes]) -> list[LogEntry]:
    """The guesses, spelled in some way, whose hash is in the public tiles."""
    seen = set(public.hashes())
    return [guess for guess in guesses() if merkle_tree.leaf_hash(spell(guess)) in seen]


def with_salt(guess: LogEntry, salt: str) -> bytes:
    return json.dumps(
        {**json.loads(guess.content), "salt": salt}, sort_keys=True, separators=(",", ":")
    ).encode()


SPELLINGS: dict[str, Callable[[LogEntry], bytes]] = {
    "as it is": lambda guess: guess.content,
    "with the salt of nobody": lambda guess: with_salt(guess, b64encode(bytes(16)).decode()),
    "with an empty salt": lambda guess: with_salt(guess, ""),
}


@pytest.mark.in_both
def test_guesses_of_names_and_a_second_confirm_nothing(public: PublicLog) -> None:
    chosen = list(guesses())[37]
    public.grant(chosen)
    public.log.sequence()
    for name, spell in SPELLINGS.items():
        assert confirmed(public, spell) == [], name
    # Whoever may read the entry sees the salt, and what was hashed.
    size = len(public.hashes())
    contents = merkle_tree.decode_entries(
        public.tile(f"entries/000.p/{size}", public.auditor).content
    )
    assert [merkle_tree.leaf_hash(content) for content in contents] == public.hashes()
    salt = json.loads(contents[-1])["salt"]
    assert confirmed(public, lambda guess: with_salt(guess, salt)) == [chosen]


def test_equal_entries_and_the_hashes_above_them_confirm_nothing(public: PublicLog) -> None:
    """The same grant twice: neither their leaves nor the node above show that they are equal."""
    chosen = list(guesses())[5]
    public.log.grow(4 - public.log.sequence().checkpoint.size)
    for _ in range(2):
        public.grant(chosen)
    public.log.sequence()
    leaves = public.hashes()
    assert len(leaves) == len(set(leaves))
    pair = merkle_tree.leaf_hash(chosen.content)
    proof = public.log.reader.inclusion(0, None, 6).hashes
    assert merkle_tree.node_hash(leaves[-2], leaves[-1]) in proof
    assert merkle_tree.node_hash(pair, pair) not in proof


def test_a_proof_by_hash_confirms_no_guess(public: PublicLog) -> None:
    """A client with a token asks for the proof of the hash that an entry would have."""
    chosen = next(guesses())
    public.grant(chosen)
    public.log.sequence()
    guess = chosen.leaf_hash.hex()
    for headers in (public.submitter, public.auditor):
        path = f"/v1/log/proof/inclusion?hash={guess}"
        answer = public.client.get(path, headers=headers)
        assert answer.status_code == 404


@pytest.mark.in_both
def test_leaves_from_before_the_salts_are_for_auditors(
    public: PublicLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = public.log
    chosen = list(guesses())[11]
    with monkeypatch.context() as patch:
        patch.setattr(entries, "new_salt", lambda _: None)  # as an earlier release
        public.grant(chosen)
    before = log.sequence().checkpoint.size
    after = log.grow(3).checkpoint.size
    assert chosen.leaf_hash in [entry.leaf_hash for entry in log.reader.entries(0, after)]
    for path in (f"0/000.p/{after}", f"0/000.p/{before}", "0/000.p/1"):
        assert public.tile(path).status_code == 401
        assert public.tile(path, public.submitter).status_code == 403
        shown = public.tile(path, public.auditor)
        assert (shown.status_code, shown.headers["cache-control"][:7]) == (200, "private")
    for level in ("0.0", "00", "+0", "-0", "0_0", "%20" + "0", "0.000", "0%0a", "%D9%A0"):
        assert public.tile(f"{level}/000.p/{after}").status_code == 422, level
    ask = public.client.get
    for query in (f"index={before - 1}", f"hash={chosen.leaf_hash.hex()}"):
        path = f"/v1/log/proof/inclusion?{query}"
        assert ask(path, headers=public.submitter).status_code == 404
        assert ask(path, headers=public.auditor).status_code == 200
    path = "/v1/log/proof/consistency?first="
    assert ask(f"{path}{before}", headers=public.submitter).status_code == 404
    assert ask(f"{path}{before}", headers=public.auditor).status_code == 200
    assert ask(f"{path}{before + 1}", headers=public.submitter).status_code == 200
    assert ask(f"/v1/log/proof/inclusion?index={after - 1}", headers=public.submitter).is_success
    assert not [found for found in log.codes() if found.startswith(("leaf", "node", "check"))]
    with log.engine.connect() as connection:
        assert verify_range(connection, 0, after - 1).proved
    # Another salt is another entry.
    with log.as_owner() as connection:
        connection.execute(text(NEW_SALT), {"salt": bytes(16)})
    assert "leaf_changed" in log.codes()


@pytest.mark.in_both
def test_a_database_of_the_earlier_revision_keeps_its_leaves(log: Log) -> None:
    kept = log.grow(5)
    with log.as_owner() as connection:
        connection.execute(text("ALTER TABLE log_entries DROP COLUMN salt"))
        connection.execute(text("DROP TABLE run_tests"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0026'"))
    database_admin.upgrade(log.url)
    assert database_admin.revision_of(log.engine) == database_admin.head()
    assert log.value("SELECT COUNT(*) FROM log_entries WHERE salt IS NULL") == kept.checkpoint.size
    log.grow(2)
    assert log.value("SELECT COUNT(*) FROM log_entries WHERE salt IS NOT NULL") == 2
