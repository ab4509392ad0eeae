"""Sessions: whose they are, how long, by which cookie, and what another site cannot do with one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from affidavit.service.core.database import open_engine, writer
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.settings import Settings
from affidavit.service.tables.identity import sessions
from affidavit.service.web.sessions import MAX_IDLE_TIME, MAX_LIFETIME
from affidavit.trust import KeyStore

HTML = {"accept": "text/html"}
PUBLIC = "https://dp.example.com"
MOMENT = timedelta(seconds=1)
Client = Any


class Door:
    """A browser at a service of its own, and a way to make tokens and to let time pass."""

    def __init__(self, client: Client, settings: Settings) -> None:
        self.client, self.settings = client, settings
        self.engine = open_engine(settings.database_url)
        self.tokens = TokenRepository(self.engine)

    def token(self, *scopes: str, days: int = 30) -> tuple[str, str]:
        requested = [Scope(item) for item in scopes or ("audit",)]
        created, result = self.tokens.new("eve", requested, days, by="test", at=datetime.now(UTC))
        return created.id, result.text

    def csrf(self, path: str = "/sign-in") -> str:
        page = self.client.get(path, headers=HTML)
        return str(re.findall(r'name="csrf" value="([^"]+)"', page.text)[-1])

    def sign_in(self, token: str, to: str = "/keys", **headers: str) -> Any:
        sent = {"csrf": self.csrf(), "token": token, "next": to}
        return self.client.post("/sign-in", data=sent, headers={**HTML, **headers})

    def is_in(self) -> bool:
        return bool(self.client.get("/keys", headers=HTML).status_code == 200)

    def update(self, **values: Any) -> None:
        """Write values into the session's row."""
        with writer(self.engine).begin() as connection:
            connection.execute(update(sessions).values(**values))


@pytest.fixture
def door(settings: Settings, client_of: Callable[..., Any]) -> Iterator[Door]:
    with client_of(settings) as client:
        client.follow_redirects = False
        result = Door(client, settings)
        yield result
        result.engine.dispose()


def _cookie(answer: Any, name: str = "affidavit_session") -> tuple[str, set[str]]:
    """The value of a cookie that was set, and its attributes in small letters."""
    for item in answer.headers.get_list("set-cookie"):
        head, *attributes = item.split("; ")
        key, _, value = head.partition("=")
        if key.removeprefix("__Host-") == name:
            return value, {attribute.lower() for attribute in attributes}
    raise AssertionError(answer.headers)


def test_signing_in_changes_the_session_cookie(door: Door) -> None:
    """Fixation: what an attacker planted is not taken up; each sign-in has its own cookie."""
    _, token = door.token()
    planted = "A" * 43
    door.client.cookies.set("affidavit_session", planted)
    first, attributes = _cookie(door.sign_in(token))
    assert first != planted
    assert {"httponly", "samesite=lax", "path=/"} <= attributes
    door.client.cookies.clear()
    door.client.cookies.set("affidavit_session", planted)
    assert not door.is_in()
    door.client.cookies.clear()
    door.client.cookies.set("affidavit_session", first)
    second, _ = _cookie(door.sign_in(token))
    assert second != first
    door.client.cookies.clear()
    door.client.cookies.set("affidavit_session", first)
    assert not door.is_in(), "signing in again ends the session that was there"
    door.client.cookies.clear()
    door.client.cookies.set("affidavit_session", second)
    assert door.is_in()


def test_a_session_outlives_a_page_that_is_not_there(door: Door) -> None:
    _, token = door.token()
    for signed_in in (False, True):
        page = door.client.get("/nosuch", headers=HTML)
        assert page.status_code == 404
        assert ("Sign out" in page.text, 'href="/keys"' in page.text) == (signed_in, signed_in)
        door.sign_in(token)


def test_the_database_stores_only_cookie_hashes(door: Door) -> None:
    _, token = door.token()
    cookie, _ = _cookie(door.sign_in(token))
    with door.engine.connect() as connection:
        (row,) = connection.execute(select(sessions)).mappings()
    assert cookie not in str(dict(row))
    assert token not in str(dict(row))


@pytest.mark.parametrize(
    ("age", "idle"), [(MAX_LIFETIME, timedelta()), (MAX_IDLE_TIME, MAX_IDLE_TIME)]
)
def test_an_expired_session_returns_to_sign_in(
    door: Door, monkeypatch: pytest.MonkeyPatch, age: timedelta, idle: timedelta
) -> None:
    _, token = door.token()
    door.sign_in(token)
    assert door.is_in()
    later = datetime.now(UTC) + age + MOMENT
    door.update(seen_at=later - idle - MOMENT)
    monkeypatch.setattr(door.client.app.state.services.clock, "now", lambda: later)
    gone = door.client.get("/audit?kind=run", headers=HTML)
    assert gone.status_code == 303
    assert gone.headers["location"] == "/sign-in?next=%2Faudit%3Fkind%3Drun&ended=yes"
    page = door.client.get(gone.headers["location"], headers=HTML)
    assert "Your session has ended." in page.text
    part = door.client.get("/runs", headers={**HTML, "hx-request": "true"})
    assert (part.status_code, part.headers["hx-redirect"][:8]) == (204, "/sign-in")
    program = door.client.get("/audit.csv")
    assert program.status_code == 401


def test_no_row_of_the_database_signs_anybody_in(door: Door) -> None:
    """Neither a session that was inserted nor one that was given another actor, scope or end."""
    text = door.token()[1]
    cookie, _ = _cookie(door.sign_in(text))
    _, _, signature = cookie.partition(".")
    with door.engine.connect() as connection:
        row = dict(connection.execute(select(sessions)).mappings().one())
    digest = hashlib.sha256(b"planted").hexdigest()
    with writer(door.engine).begin() as connection:
        connection.execute(insert(sessions).values({**row, "digest": digest}))
    for planted in ("planted", f"planted.{signature}", "planted.x", cookie.replace(".", "")):
        door.client.cookies.clear()
        door.client.cookies.set("affidavit_session", planted)
        assert not door.is_in()
        bearer = {"authorization": f"Bearer {text}"}  # which lets its holder reach the form
        assert door.client.post("/team", data={"team": ""}, headers=bearer).status_code == 403
    door.client.cookies.clear()
    door.client.cookies.set("affidavit_session", cookie)
    roles = [{"team": None, "scopes": ["admin"]}]
    other, _ = door.token("admin")
    for changed in (
        {"token_id": None},
        {"token_id": other},
        {"actor": "ada"},
        {"roles": roles},
        {"team": "red"},
        {"expires_at": row["expires_at"] + MOMENT},
    ):
        assert door.is_in()
        own = sessions.c.digest == row["digest"]
        with writer(door.engine).begin() as connection:
            connection.execute(update(sessions).where(own).values(changed))
        assert not door.is_in(), changed
        with writer(door.engine).begin() as connection:
            connection.execute(update(sessions).where(own).values(row))


def test_every_session_ends_when_the_key_that_signed_it_does(door: Door) -> None:
    """The way to sign everybody out, where the provider's key was stolen."""
    keys = KeyStore(door.settings.key_directory)
    keys.new("first")
    door.sign_in(door.token()[1])
    keys.new("second")
    assert door.is_in()
    keys.rotate(timedelta(seconds=-1))
    assert not door.is_in()


def test_a_session_ends_with_its_token_and_has_its_scopes(door: Door) -> None:
    created, token = door.token("admin")
    door.sign_in(token)
    assert door.client.get("/tokens", headers=HTML).status_code == 200
    assert door.client.get("/audit", headers=HTML).status_code == 403
    door.tokens.revoke(created, "left", by="test", at=datetime.now(UTC))
    assert door.client.get("/tokens", headers=HTML).status_code == 303


def test_signing_out_ends_the_session_in_the_database(door: Door) -> None:
    _, token = door.token()
    cookie, _ = _cookie(door.sign_in(token))
    csrf = door.csrf("/keys")
    assert door.client.post("/sign-out", data={}, headers=HTML).status_code == 403
    assert door.is_in()
    out = door.client.post("/sign-out", data={"csrf": csrf}, headers=HTML)
    assert out.headers["location"] == "/sign-in?done=signed_out"
    door.client.cookies.set("affidavit_session", cookie)
    assert not door.is_in()


@pytest.mark.parametrize(
    "to",
    [
        "//evil.example",
        "https://evil.example/",
        "/\\evil.example",
        "\\\\evil.example",
        "javascript:alert(1)",
        "/\r\nx: y",
        "/\tevil",
        " //evil.example",
        "///evil.example",
        "/sign-in",
        "keys",
        "",
        "/\u202e",
        "/" + "a" * 10_000,
    ],
    ids=range(14),
)
def test_sign_in_redirects_only_within_this_service(door: Door, to: str) -> None:
    _, token = door.token()
    page = door.client.get("/sign-in", params={"next": to}, headers=HTML)
    assert "evil.example" not in page.text
    answer = door.sign_in(token, to)
    assert answer.status_code == 303
    assert answer.headers["location"] in ("/", to if to.startswith("/a") else "/")
    assert "x" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_a_form_from_another_site_is_refused_even_with_a_token(
    door: Door, headers: dict[str, str]
) -> None:
    _, token = door.token("admin")
    refused = door.sign_in(token, **headers)
    assert refused.status_code == 403
    assert "form_not_ours" in refused.text
    assert "set-cookie" not in refused.headers or "affidavit_session" not in str(refused.headers)
    door.sign_in(token)
    budget = {"dataset": "planted", "unit": "example", "adjacency": "add_remove"}
    sent = {**budget, "epsilon": "1", "delta": "1e-5", "csrf": door.csrf("/datasets")}
    assert door.client.post("/datasets", data=sent, headers={**HTML, **headers}).status_code == 403
    assert "/datasets/planted" not in door.client.get("/datasets", headers=HTML).text


def test_a_form_token_is_valid_for_one_session_only(door: Door) -> None:
    _, token = door.token("admin")
    door.sign_in(token)
    first = door.csrf("/datasets")
    door.client.cookies.clear()
    door.sign_in(token)
    assert door.csrf("/datasets") != first
    sent = {"csrf": first, "name": "x", "scope": "submit", "days": "1"}
    assert door.client.post("/tokens", data=sent, headers=HTML).status_code == 403


def test_cookies_are_secure_over_https(settings: Settings, client_of: Callable[..., Any]) -> None:
    """Behind a proxy that ends TLS, where requests look like http, the public URL says it."""
    with client_of(replace(settings, public_url=PUBLIC)) as client:
        client.base_url = PUBLIC
        client.follow_redirects = False
        door = Door(client, settings)
        _, token = door.token()
        _, form = _cookie(client.get("/sign-in", headers=HTML), "affidavit_form")
        assert {"secure", "httponly", "samesite=lax", "path=/"} <= form
        answer = door.sign_in(token, origin=PUBLIC)
        _, attributes = _cookie(answer)
        assert {"secure", "httponly", "samesite=lax", "path=/"} <= attributes
        assert not any(attribute.startswith("domain") for attribute in attributes)
        assert "__Host-affidavit_session=" in str(answer.headers)
        # A cookie without the prefix, which a neighbouring host could set, counts for nothing.
        value, _ = _cookie(answer)
        client.cookies.clear()
        client.cookies.set("affidavit_session", value)
        assert not door.is_in()
        door.engine.dispose()


def test_wrong_tokens_are_rate_limited(settings: Settings, client_of: Callable[..., Any]) -> None:
    with client_of(replace(settings, rate_limit=4)) as client:
        door = Door(client, settings)
        door.token()
        csrf = door.csrf()
        sent = {"csrf": csrf, "token": "affidavit_" + "0" * 12 + "_" + "a" * 49, "next": "/"}
        pages = [client.post("/sign-in", data=sent, headers=HTML) for _ in range(12)]
        assert pages[0].status_code == 422
        assert pages[-1].status_code == 429
        assert int(pages[-1].headers["retry-after"]) >= 1
        assert "<h1>" in pages[-1].text
        assert sent["token"] not in "".join(page.text for page in pages)
        door.engine.dispose()
