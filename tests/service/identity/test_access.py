"""Deny by default, and the whole table of who may use which route, asked of the real app."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, WebSocket
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from affidavit.service.core.fair_queue import CALLER
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.settings import Settings
from affidavit.service.web import app as application
from affidavit.service.web.access import (
    Reader,
    UndeclaredAccess,
    guarded_routes,
    needs,
    open_to_all,
)
from affidavit.service.web.app import create_app
from affidavit.service.web.routes import ROUTERS
from affidavit.service.web.routing import read_body

TABLE = Path(__file__).with_name("who_may.txt")
ROWS = [line.split() for line in TABLE.read_text().splitlines() if line and line[0] != "#"]
NOBODY = {None: "unauthenticated", "expired": "expired_token", "revoked": "revoked_token"}


def is_page(path: str) -> bool:
    """Whether people read what is there; a table as a file is for programs too."""
    return not path.startswith(("/v1/", "/metrics")) and not path.endswith(".csv")


def test_every_route_has_its_row_and_every_row_its_route(settings: Settings) -> None:
    app = create_app(settings)
    try:
        routes = {(method, path) for path, method, _ in guarded_routes(app)}
    finally:
        app.state.services.close()
    rows = [(method, path) for method, path, *_ in ROWS]
    assert len(rows) == len(set(rows))
    assert routes == set(rows), f"add a row to {TABLE.name} for each new route"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_route_lets_in_who_may_and_nobody_else(network: Any, row: list[str]) -> None:
    """Parameters and bodies are garbage, so that being let in changes nothing."""
    method, path, *who = row
    where = re.sub(r"{\w+}", "!", path)
    statuses = {}
    for token in (*NOBODY, *(scope.value for scope in Scope)):
        answer = network.ask(method, where, token, content=b"\xff not a body")
        statuses[token] = answer.status_code
        if who != ["everybody"] and token is None and is_page(path):
            assert answer.headers["location"].startswith("/sign-in")
        elif who != ["everybody"] and token in NOBODY:
            assert answer.json()["code"] == NOBODY[token]
            assert answer.headers["www-authenticate"].startswith('Bearer realm="affidavit"')
        elif answer.status_code == 403:
            assert answer.json()["code"] == "missing_scope"
            assert all(scope in answer.json()["detail"] for scope in who)
            assert f'scope="{" ".join(who)}"' in answer.headers["www-authenticate"]
    if who == ["everybody"]:
        assert not {401, 403} & set(statuses.values())
        return
    stranger = 303 if is_page(path) else 401
    assert [statuses[token] for token in NOBODY] == [stranger, 401, 401]
    for scope in Scope:
        allowed = statuses[scope.value] not in (401, 403)
        assert allowed == (scope.value in who), (scope, statuses)
    assert max(statuses.values()) < 500


def test_nothing_of_a_request_is_read_before_its_sender_is_known(network: Any) -> None:
    """Neither its body, which may be long in coming, nor its content type."""
    for method, path, *who in ROWS:
        if who != ["everybody"]:
            where = re.sub(r"{\w+}", "!", path)
            answer = network.ask(method, f"{where}?limit=x&unknown=1", None, content=b"{")
            assert answer.status_code == (303 if is_page(path) else 401), (method, path)


def _plain() -> PlainTextResponse:
    return PlainTextResponse("secret")


def _late(
    body: Annotated[bytes, Depends(read_body)], actor: Annotated[Actor, needs(Scope.ADMIN)]
) -> None:
    """A body is read for anybody here."""


async def _socket(websocket: WebSocket) -> None:
    await websocket.accept()


FORGOTTEN: dict[str, Callable[[FastAPI | APIRouter], Any]] = {
    "says nothing": lambda app: app.add_api_route("/v1/new", _plain),
    "is not FastAPI's": lambda app: app.routes.append(Route("/v1/new", _plain)),
    "is a mount": lambda app: app.routes.append(Mount("/static", app=PlainTextResponse("x"))),
    "is a socket": lambda app: app.add_api_websocket_route("/v1/new", _socket),
    "is hidden": lambda app: app.add_api_route("/v1/new", _plain, include_in_schema=False),
    "says it too late": lambda app: app.add_api_route("/v1/new", _late),
    "says both": lambda app: app.add_api_route(
        "/v1/new", _plain, dependencies=[open_to_all(), needs(Scope.ADMIN)]
    ),
}


@pytest.mark.parametrize("add", FORGOTTEN.values(), ids=FORGOTTEN.keys())
def test_an_application_with_a_route_that_says_nothing_is_not_made(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, add: Any
) -> None:
    router = APIRouter()
    add(router)
    monkeypatch.setattr(application, "ROUTERS", (*ROUTERS, router))
    with pytest.raises(UndeclaredAccess, match=r"needs\(\.\.\.\) or open_to_all"):
        create_app(settings)


def test_a_route_that_was_added_later_keeps_the_application_from_starting(
    settings: Settings, client_of: Any
) -> None:
    client = client_of(settings)
    client.app.add_api_route("/v1/new", _plain)
    with pytest.raises(UndeclaredAccess, match="/v1/new"), client:
        pass
    client.app.state.services.close()


def test_a_route_that_says_so_is_let_in(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, client_of: Any
) -> None:
    router = APIRouter()

    @router.get("/v1/new")
    def new(actor: Reader) -> dict[str, str]:
        return {"name": actor.name}

    monkeypatch.setattr(application, "ROUTERS", (*ROUTERS, router))
    with client_of(settings) as client:
        assert client.get("/v1/new").json() == {"name": "anonymous@loopback"}


def test_a_person_has_one_share_of_the_work_with_however_many_tokens(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, client_of: Any, token_for: Any
) -> None:
    router = APIRouter()

    @router.get("/v1/new")
    def new(_: Reader) -> str:
        return CALLER.get()

    monkeypatch.setattr(application, "ROUTERS", (*ROUTERS, router))
    people = (("one", "ada"), ("two", "ada"), ("two", None), ("two", None), ("other", None))
    tokens = [token_for(settings, "submit", name=name, person=of) for name, of in people]
    with client_of(settings) as client:
        shares = [client.get("/v1/new", headers=token).json() for token in tokens]
    assert shares == ["person:ada", "person:ada", "token:two", "token:two", "token:other"]


def test_a_guard_names_a_scope() -> None:
    with pytest.raises(ValueError, match="open_to_all"):
        needs()


def test_the_document_states_scopes_and_refusals(network: Any) -> None:
    document = network.client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for method, path, *who in ROWS:
        if is_page(path) or path not in document["paths"]:
            continue
        operation = document["paths"][path][method.lower()]
        documented = {"401", "403", "429", "503"} & set(operation["responses"])
        if who == ["everybody"]:
            assert "security" not in operation
            assert ("429" in documented) == (path != "/livez")
        else:
            assert operation["security"] == [{"bearer": [scope]} for scope in who]
            assert documented == {"401", "403", "429", "503"}
            assert "WWW-Authenticate" in operation["responses"]["401"]["headers"]
            assert "Retry-After" in operation["responses"]["429"]["headers"]
