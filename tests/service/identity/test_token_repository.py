"""Tokens in the database: what is kept, what is written with it, and what cannot be changed."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, delete, func, insert, inspect, select, text, update
from sqlalchemy.exc import DatabaseError

from affidavit.service.core.database import writer
from affidavit.service.identity import tokens as tokens_module
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import (
    TokenError,
    TokenRepository,
    TokenText,
    generate_token,
    hash_for_log,
    token_entry,
)
from affidavit.service.log.entries import append
from affidavit.service.tables.identity import (
    token_revocations,
    token_uses,
    tokens,
)
from affidavit.service.tables.log import log_entries

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def store(engine: Engine) -> TokenRepository:
    return TokenRepository(engine)


def new(store: TokenRepository, name: str = "ci", days: int = 90, *scopes: Scope) -> Any:
    return store.new(name, scopes or (Scope.SUBMIT,), days, by="operator:me", at=NOW)


def find(store: TokenRepository, token: TokenText) -> Any:
    return store.find_all([token])[token]


def entries(engine: Engine) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        query = select(log_entries.c.content).order_by(log_entries.c.id)
        return [json.loads(content) for content in connection.execute(query).scalars()]


def test_a_token_is_found_again_by_its_text_alone(store: TokenRepository) -> None:
    created, shown = new(store, "alice@example.org", 30, Scope.SUBMIT, Scope.AUDIT)
    result = find(store, shown)
    assert result == created
    assert result.actor.name == "token:alice@example.org"
    assert result.actor.scopes == {Scope.SUBMIT, Scope.AUDIT}
    assert (result.created_at, result.expires_at) == (NOW, NOW + timedelta(days=30))
    assert find(store, generate_token()) is None
    other = generate_token()
    assert find(store, type(shown)(shown.id, other.text)) is None  # right id, wrong secret


def test_a_row_that_is_not_in_the_log_is_no_token(store: TokenRepository, engine: Engine) -> None:
    """Nor one that has more than its entry says."""
    new(store)
    planted = generate_token()
    with engine.connect() as connection:
        row = dict(connection.execute(select(tokens)).mappings().one())
    row |= {"id": planted.id, "digest": planted.digest, "person": "ada", "scopes": "admin"}
    body = token_entry(SimpleNamespace(**row)).body
    with writer(engine).begin() as connection:
        connection.execute(insert(tokens).values(row))
    for other in (None, {**body, "scopes": ["submit"]}, {**body, "person": "bob"}, body):
        assert find(store, planted) is None
        assert store.find_by_id(planted.id) is None
        if other is not None:
            with writer(engine).begin() as connection:
                append(connection, "token", planted.id, other, actor="operator:me", at=NOW)
    assert find(store, planted) is not None


def test_the_secret_is_in_no_row_of_any_table(store: TokenRepository, engine: Engine) -> None:
    created, shown = new(store)
    store.revoke(created.id, "done", by="operator:me", at=NOW)
    store.write_use(created.id, NOW)
    with engine.connect() as connection:
        names = inspect(connection).get_table_names()
        assert {"tokens", "token_uses", "log_entries"} <= set(names)
        rows = [
            str(row)
            for name in names
            for row in connection.execute(text(f'SELECT * FROM "{name}"'))
        ]
    everything = "\n".join(rows)
    assert created.id in everything
    assert shown.text not in everything
    assert shown.text[23:] not in everything


def test_making_and_revoking_stand_in_the_log_without_secret_or_hash(
    store: TokenRepository, engine: Engine
) -> None:
    built, shown = new(store, "ci", 90, Scope.SUBMIT)
    store.revoke(built.id, "left the team", by="operator:you", at=NOW + timedelta(days=1))
    created, revoked = entries(engine)
    assert (created["kind"], created["subject"], created["actor"]) == (
        "token", built.id, "operator:me",
    )  # fmt: skip
    assert created["body"] == {
        "action": "created",
        "name": "ci",
        "scopes": ["submit"],
        "expires_at": (NOW + timedelta(days=90)).isoformat(timespec="microseconds"),
        "digest": hash_for_log(shown.digest),
    }
    assert (revoked["subject"], revoked["actor"]) == (built.id, "operator:you")
    assert revoked["body"] == {"action": "revoked", "name": "ci", "reason": "left the team"}
    assert shown.digest not in json.dumps([created, revoked])


def test_without_its_log_entry_no_token_is_made_or_revoked(
    store: TokenRepository, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, _ = new(store)

    def fail(*_given: Any, **_named: Any) -> int:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(tokens_module, "append", fail)
    monkeypatch.setattr(tokens_module, "insert_logged", fail)
    with pytest.raises(RuntimeError):
        new(store, "other")
    with pytest.raises(RuntimeError):
        store.revoke(created.id, "", by="me", at=NOW)
    assert [(item.name, item.revoked_at) for item in store.list_all()] == [("ci", None)]
    assert len(entries(engine)) == 1


def test_a_revocation_counts_in_every_process_at_once_and_happens_once(
    store: TokenRepository, engine: Engine
) -> None:
    created, shown = new(store)
    elsewhere = TokenRepository(engine)
    assert find(elsewhere, shown) == created
    first = store.revoke(created.id, "lost", by="me", at=NOW)
    assert find(elsewhere, shown) == first
    assert first.revoked_at == NOW
    assert store.revoke(created.id, "again", by="you", at=NOW + timedelta(days=1)) == first
    assert len(entries(engine)) == 2


def test_eight_threads_that_revoke_together_write_one_revocation(
    store: TokenRepository, engine: Engine
) -> None:
    created, _ = new(store)
    ready = threading.Barrier(8)
    result: list[Any] = []

    def work() -> None:
        ready.wait()
        result.append(store.revoke(created.id, "lost", by="me", at=datetime.now(UTC)).revoked_at)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for item in threads:
        item.join()
    assert len(result) == 8
    assert len(set(result)) == 1
    assert len(entries(engine)) == 2


def test_what_was_said_of_a_token_cannot_be_changed(store: TokenRepository, engine: Engine) -> None:
    """Its scopes not widened, its life not lengthened, its revocation not taken back."""
    created, _ = new(store)
    store.revoke(created.id, "", by="me", at=NOW)
    forbidden = [
        update(tokens).values(scopes="admin"),
        update(tokens).values(expires_at=NOW + timedelta(days=9999)),
        delete(tokens),
        update(token_revocations).values(revoked_at=NOW + timedelta(days=9999)),
        delete(token_revocations),
    ]
    if engine.dialect.name == "postgresql":
        forbidden += [text("TRUNCATE token_revocations"), text("TRUNCATE tokens CASCADE")]
    else:
        forbidden += [text("INSERT OR REPLACE INTO tokens SELECT * FROM tokens")]
    for statement in forbidden:
        with (
            pytest.raises(DatabaseError, match="append-only"),
            writer(engine).begin() as connection,
        ):
            connection.execute(statement)
    assert [item.revoked_at for item in store.list_all()] == [NOW]


def test_a_token_that_never_expires_is_refused_by_the_database_too(engine: Engine) -> None:
    created = generate_token()
    row = {
        "id": created.id, "name": "x", "scopes": "admin", "digest": created.digest,
        "created_at": NOW, "created_by": "me", "expires_at": NOW,
    }  # fmt: skip
    with (
        pytest.raises(DatabaseError, match="tokens_expire_later"),
        writer(engine).begin() as connection,
    ):
        connection.execute(insert(tokens).values(**row))


IMPOSSIBLE: list[tuple[str, int, list[Scope], str]] = [
    ("", 1, [Scope.SUBMIT], "name"),
    ("a b", 1, [Scope.SUBMIT], "name"),
    ("a\nSet-Cookie: x", 1, [Scope.SUBMIT], "name"),
    ("é", 1, [Scope.SUBMIT], "name"),
    ("-x", 1, [Scope.SUBMIT], "name"),
    ("a" * 65, 1, [Scope.SUBMIT], "name"),
    ("a", 0, [Scope.SUBMIT], "days"),
    ("a", -1, [Scope.SUBMIT], "days"),
    ("a", 367, [Scope.SUBMIT], "days"),
    ("a", 1, [], "--scope"),
]


def test_a_token_that_cannot_be_as_asked_is_refused(store: TokenRepository) -> None:
    for name, days, scopes, stated in IMPOSSIBLE:
        with pytest.raises(TokenError, match=stated):
            store.new(name, scopes, days, by="me", at=NOW)
    assert store.list_all() == []


def test_a_reason_is_one_short_line(store: TokenRepository) -> None:
    created, _ = new(store)
    for reason in ("a\nb", "a" * 256, "\x1b[31m"):
        with pytest.raises(TokenError, match="line"):
            store.revoke(created.id, reason, by="me", at=NOW)
    with pytest.raises(TokenError, match="not found"):
        store.revoke("000000000000", "", by="me", at=NOW)


def test_uses_are_written_once_a_minute_and_not_once_a_request(
    store: TokenRepository, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, _ = new(store)
    moment = [0.0]
    monkeypatch.setattr(tokens_module.time, "monotonic", lambda: moment[0])
    due = []
    for second in range(180):
        moment[0] = float(second)
        due.append(store.use_is_due(created.id))
    assert [second for second, item in enumerate(due) if item] == [0, 60, 120]
    store.write_use(created.id, NOW)
    (result,) = store.list_all()
    assert result.last_used_at == NOW
    with engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(token_uses)).scalar_one() == 1


def test_a_use_that_cannot_be_written_down_stops_nobody(
    store: TokenRepository, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    created, shown = new(store)
    with writer(engine).begin() as connection:
        connection.execute(text("DROP TABLE token_uses"))
    store.write_use(created.id, NOW)
    assert created.id in caplog.text
    assert shown.text not in caplog.text


def test_whether_a_token_exists_is_asked_until_one_does(
    store: TokenRepository, engine: Engine
) -> None:
    elsewhere = TokenRepository(engine)
    assert not elsewhere.has_any()
    created, _ = new(store)
    assert elsewhere.has_any()
    store.revoke(created.id, "", by="me", at=NOW)
    assert TokenRepository(engine).has_any()  # a revoked one ends the time without tokens too
