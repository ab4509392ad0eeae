"""``affidavit ledger`` against a server that answers as the service does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from affidavit.gate.cli import app
from affidavit.gate.exit_codes import Exit

DIGEST = "sha256:" + "0" * 64
SCOPE = {"dataset": "toy", "unit": "example", "adjacency": "add_remove"}
CHARGE = {"epsilon": 0.5613, "delta": 1e-5, "mu": 0.16}
RESERVATION = {
    **SCOPE,
    "id": "7d5c0000-0000-0000-0000-000000000000",
    "certificate": DIGEST,
    "issue": 1,
    "plan_digest": DIGEST,
    "record": None,
    "admitted_by": "filter",
    "reserved": CHARGE,
    "reserved_by": "sam",
    "reserved_at": "2026-01-01T00:00:00Z",
    "changed_at": "2026-01-01T00:00:00Z",
    "state": "reserved",
    "name": "quick",
    "steps": {"certified": 10, "run": None},
    "charged": CHARGE,
}
LEDGER = {
    **SCOPE,
    "runs": 1,
    "entries_total": 1,
    "budget": {"version": 1, "epsilon": 2.0, "delta": 0.0001},
    "exhausted": False,
    "spent": {
        "filter": {"epsilon": 0.62, "delta": 1e-4, "decides": True, "meaning": "m"},
        "composed": {"engine": "pld", "epsilon": {"lower": 0.5, "upper": 0.51}, "delta": 1e-4},
        "sum": {"epsilon": 0.57, "delta": 1e-5, "decides": False, "meaning": "m"},
    },
    "remaining": {"epsilon": 1.38},
    "entries": [RESERVATION],
    "forecast": {
        "certificate": DIGEST,
        "runs": 3,
        "at_least": False,
        "message": "3 more runs of this size fit.",
        "cost": CHARGE,
    },
}
OVER = {"code": "over_budget", "detail": "with this run toy would pass its budget."}


class Service(BaseHTTPRequestHandler):
    """Answers what ``ANSWER`` says and keeps what it was asked."""

    ANSWER: ClassVar[tuple[int, Any]] = (200, {})
    ASKED: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.ASKED.append(
            {
                "method": self.command,
                "path": self.path,
                "token": self.headers.get("authorization"),
                "key": self.headers.get("idempotency-key"),
                "body": json.loads(body) if body else None,
            }
        )
        status, document = self.ANSWER
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


@contextmanager
def answering(status: int, document: Any) -> Iterator[str]:
    Service.ANSWER, Service.ASKED[:] = (status, document), []
    server = HTTPServer(("127.0.0.1", 0), Service)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, ["ledger", *arguments], env=environment)


def test_what_was_spent_is_shown_by_each_composition_and_which_decides() -> None:
    with answering(200, {"items": [LEDGER], "next": None}) as server:
        result = run("show", "toy", "--forecast", "sha256:1", "--server", server)
        requested = Service.ASKED[0]
    assert result.exit_code == 0
    assert requested["path"] == "/v1/ledgers/toy?certificate=sha256%3A1"
    for text in ("ε = 2", "decides", "0.62", "0.51", "0.57", "1.38", "3 more runs", "reserved"):
        assert text in result.output


@pytest.mark.parametrize(
    "arguments", [("show", "toy"), ("reserve", "toy", "sha256:1"), ("release", "x")]
)
def test_the_service_may_be_named_by_the_environment(arguments: tuple[str, ...]) -> None:
    with answering(409, OVER) as server:
        assert run(*arguments, AFFIDAVIT_SERVER=server).exit_code == Exit.BLOCKED
        nowhere = run(*arguments, "--server", "http://127.0.0.1:9", AFFIDAVIT_SERVER=server)
    assert nowhere.exit_code == Exit.UNDECIDED
    assert len(Service.ASKED) == 1


def test_a_reservation_sends_its_token_and_its_key() -> None:
    with answering(201, RESERVATION) as server:
        result = run(
            "reserve", "toy", "sha256:1", "--key", "k", "--server", server, AFFIDAVIT_TOKEN="t"
        )
        requested = Service.ASKED[0]
    assert result.exit_code == 0
    assert requested == {
        "method": "POST",
        "path": "/v1/ledgers/toy/reservations",
        "token": "Bearer t",
        "key": "k",
        "body": {"certificate": "sha256:1"},
    }
    assert "0.5613" in result.output


@pytest.mark.parametrize("name", [".", ".."])
@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("show", "NAME"), "/v1/ledgers/NAME"),
        (("reserve", "NAME", "sha256:1"), "/v1/ledgers/NAME/reservations"),
        (("release", "NAME"), "/v1/reservations/NAME/release"),
    ],
)
def test_a_name_of_dots_is_a_name(arguments: tuple[str, ...], path: str, name: str) -> None:
    with answering(409, OVER) as server:
        run(
            *(name if argument == "NAME" else argument for argument in arguments),
            "--server",
            server,
        )
        requested = Service.ASKED[0]
    assert requested["path"] == path.replace("NAME", "%2E" * len(name))


@pytest.mark.parametrize("token", ["gehe\u00efm", "secret\n", "secret\nx: y", "a secret", " "])
@pytest.mark.parametrize(
    "arguments",
    [("ledger", "show", "toy"), ("runs", "cancel", RESERVATION["id"])],
    ids=lambda item: item[0],
)
def test_what_is_no_token_is_told_of_and_not_repeated(
    arguments: tuple[str, ...], token: str
) -> None:
    with answering(200, {}) as server:
        environment = {"AFFIDAVIT_SERVER": server, "AFFIDAVIT_TOKEN": token}
        result = CliRunner().invoke(app, arguments, env=environment)
        assert Service.ASKED == []
    assert result.exit_code == Exit.USAGE, result.output
    assert "AFFIDAVIT_TOKEN is not valid" in result.output
    assert "secret" not in result.output
    assert "gehe" not in result.output


def test_json_is_what_the_service_said() -> None:
    with answering(200, RESERVATION) as server:
        result = run("release", "../x", "--reason", "why", "--json", "--server", server)
        requested = Service.ASKED[0]
    assert json.loads(result.stdout) == RESERVATION
    assert requested["path"] == "/v1/reservations/..%2Fx/release"
    assert requested["body"] == {"reason": "why"}


@pytest.mark.parametrize(
    ("status", "code"),
    [(409, Exit.BLOCKED), (403, Exit.BLOCKED), (422, Exit.USAGE), (503, Exit.UNDECIDED)],
)
def test_a_refusal_has_its_exit_code(status: int, code: Exit) -> None:
    with answering(status, OVER) as server:
        result = run("reserve", "toy", "sha256:1", "--server", server)
    assert result.exit_code == code
    assert "over_budget" in result.output


def test_a_service_that_is_not_there_decides_nothing() -> None:
    assert run("show", "toy", "--server", "http://127.0.0.1:9").exit_code == Exit.UNDECIDED
    assert run("show", "toy", "--server", "nonsense").exit_code == Exit.USAGE
