"""A new endpoint is one file and one line; its body is read strictly, after authorization."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from affidavit.service.settings import Settings
from affidavit.service.web import app as application
from affidavit.service.web import routes
from affidavit.service.web.access import UndeclaredAccess
from affidavit.service.web.app import create_app

JSON = {"content-type": "application/json"}

MODULE = '''
"""A throw-away endpoint: the one file."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field

from affidavit.service.web.access import needs
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.core.wire_models import RequestModel, ResponseModel
from affidavit.service.web.routing import JsonRoute

router = APIRouter(route_class=JsonRoute)


class GreetingRequest(RequestModel):
    """Whom to greet, and how often."""

    noun = "a greeting"
    name: str
    times: Annotated[int, Field(ge=1, strict=True)] = 1


class Greeting(ResponseModel):
    """The text."""

    text: str


@router.post("/v1/greetings/{number}", status_code=202)
def greet(
    actor: Annotated[Actor, needs(Scope.SUBMIT)],
    number: Annotated[int, Path(ge=1)],
    request: GreetingRequest,
) -> Greeting:
    """Greet somebody."""
    return Greeting(text=f"{request.name} " * request.times + f"from {actor.name}")


@router.post("/v1/greetings")
def greet_anybody(
    _: Annotated[Actor, needs(Scope.SUBMIT)],
    request: GreetingRequest = GreetingRequest(name="you"),
) -> Greeting:
    """Greet somebody, or you."""
    return Greeting(text=request.name)
'''


@pytest.fixture(name="module")
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new module of routes."""
    (tmp_path / "greetings.py").write_text(MODULE)
    monkeypatch.setattr(routes, "__path__", [*routes.__path__, str(tmp_path)])
    return "greetings"


@pytest.fixture
def greeter(
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    settings: Settings,
    client_of: Callable[..., TestClient],
) -> Iterator[TestClient]:
    monkeypatch.setattr(application, "ROUTERS", routes.routers(*routes.MODULES, module))
    with client_of(settings) as client:
        yield client


def greet(client: TestClient, body: Any, path: str = "/1", **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(f"/v1/greetings{path}", content=content, headers=JSON | headers)


def test_a_new_endpoint_is_served_and_documented(greeter: TestClient) -> None:
    answer = greet(greeter, {"name": "Ada"})
    assert (answer.status_code, answer.json()) == (202, {"text": "Ada from anonymous@loopback"})
    document = greeter.get("/openapi.json").json()
    operation = document["paths"]["/v1/greetings/{number}"]["post"]
    assert operation["security"] == [{"bearer": ["submit"]}]
    assert {"400", "401", "403", "408", "413", "415", "422", "429", "500", "503"} <= set(
        operation["responses"]
    )
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/GreetingRequest"}
    assert document["components"]["schemas"]["GreetingRequest"]["additionalProperties"] is False


@pytest.mark.usefixtures("module")
def test_a_new_endpoint_must_declare_its_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    text = MODULE.replace("    _: Annotated[Actor, needs(Scope.SUBMIT)],\n", "")
    (tmp_path / "unguarded.py").write_text(text)
    monkeypatch.setattr(application, "ROUTERS", routes.routers("unguarded"))
    with pytest.raises(UndeclaredAccess, match="/v1/greetings"):
        create_app(settings)


@pytest.mark.usefixtures("module")
def test_a_body_that_is_no_request_model_is_a_mistake_in_the_code(tmp_path: Path) -> None:
    lax = MODULE.replace("(RequestModel)", "(ResponseModel)").replace(
        '    noun = "a greeting"\n', ""
    )
    (tmp_path / "lax.py").write_text(lax)
    with pytest.raises(TypeError, match="RequestModel"):
        routes.routers("lax")


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        (b"", "empty", ""),
        (b"{", "syntax", ""),
        (b'{"name": "a", "name": "b"}', "duplicate_key", "/name"),
        (b'{"name": "a", "times": NaN}', "not_finite", "/times"),
        (b'{"name": "\\ud800"}', "bad_text", "/name"),
        (b"[" * 60_000, "too_deep", ""),
        (b"null", "wrong_type", ""),
        (b"[]", "wrong_type", ""),
        ({}, "missing_field", "/name"),
        ({"name": "a", "time": 1}, "unknown_field", "/time"),
        ({"name": "a", "times": "1"}, "wrong_type", "/times"),
        ({"name": "a", "times": 0}, "invalid_value", "/times"),
    ],
)
@pytest.mark.parametrize("path", ["/1", ""])
def test_a_body_is_read_as_strictly_as_a_plan(
    greeter: TestClient, body: Any, code: str, pointer: str, path: str
) -> None:
    answer = greet(greeter, body, path)
    if body == b"" and not path:
        assert answer.json() == {"text": "you"}
        return
    assert answer.status_code == 400
    assert answer.json()["code"] == "malformed_request"
    reason = answer.json()["reasons"][0]
    assert (reason["code"], reason["pointer"]) == (code, pointer)


def test_other_mistakes_of_a_request_keep_their_statuses(greeter: TestClient) -> None:
    path = greet(greeter, {"times": 0}, "/x")
    assert (path.status_code, path.json()["code"]) == (422, "invalid_parameter")
    assert [reason["pointer"] for reason in path.json()["reasons"]] == ["/path/number"]
    assert greet(greeter, {"name": "a"}, **{"content-type": "text/plain"}).status_code == 415
    large = greet(greeter, b'{"name": "' + b"a" * 70_000 + b'"}')
    assert (large.status_code, large.json()["reasons"][0]["code"]) == (413, "too_large")


def test_nothing_is_read_before_authorization_and_a_request_counts_once(
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    settings: Settings,
    client_of: Callable[..., TestClient],
    token_for: Callable[..., dict[str, str]],
) -> None:
    monkeypatch.setattr(application, "ROUTERS", routes.routers(*routes.MODULES, module))
    submitter = token_for(settings, "submit")
    auditor = token_for(settings, "audit", name="auditor")
    with client_of(settings) as client:
        assert greet(client, b"{").status_code == 401
        assert greet(client, b"{", **auditor).status_code == 403
        limits = client.app.state.services.rate_limiter  # type: ignore[attr-defined]
        taken: list[str] = []
        take = limits.take
        monkeypatch.setattr(
            type(limits), "take", lambda _, caller: taken.append(caller) or take(caller)
        )
        assert greet(client, {"name": "a"}, **submitter).status_code == 202
        assert len(taken) == 1
