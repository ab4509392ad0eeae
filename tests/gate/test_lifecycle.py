"""Approve, revoke and fetch the status list from the command line; verify by that list."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from affidavit.certificate import sign_status
from affidavit.trust import (
    KeyStore,
    SigningKey,
    read_envelope,
)

ID, DIGEST = "sha256:" + "1" * 64, "sha256:" + "2" * 64


class Service(HTTPServer):
    """A service that answers what it is told to and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.said: tuple[int, bytes] = (200, b"{}")
        self.asked: list[tuple[str, str, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answers(self, status: int, document: Any) -> None:
        raw = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.said = (status, raw)


class Asked(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        token = self.headers.get("authorization", "")
        self.server.asked.append((self.command, self.path, token, body))
        status, raw = self.server.said
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    result = Service()
    threading.Thread(target=result.serve_forever, kwargs={"poll_interval": 0.01}).start()
    monkeypatch.setenv("AFFIDAVIT_SERVER", result.url)
    monkeypatch.setenv("AFFIDAVIT_TOKEN", "secret")
    yield result
    result.shutdown()
    result.server_close()


RESULT = {
    "verdict": "certified",
    "epsilon": {"lower": 1.0, "upper": 1.5},
    "delta": {"lower": 1e-5, "upper": 1e-5},
    "adjacency": "add_remove",
    "certificate": {
        "id": ID,
        "bundle": {},
        "issue": 1,
        "status": "awaiting_approval",
        "envelope_digest": DIGEST,
    },
}
PROBLEM = {"code": "own_request", "detail": "somebody else must decide."}


def test_without_a_digest_it_shows_what_is_there_and_decides_nothing(
    service: Service, run: Any
) -> None:
    service.answers(200, RESULT)
    told = run("approve", ID)
    assert told.exit_code == 2
    assert DIGEST in told.stdout
    assert "ε ≤ 1.5" in told.stdout
    assert [method for method, *_ in service.asked] == ["GET"]


@pytest.mark.parametrize(
    ("options", "decision", "comment"),
    [((), "approve", ""), (("--reject", "--comment", "no"), "reject", "no")],
)
def test_a_decision_names_the_digest_and_brings_the_token(
    service: Service, run: Any, options: tuple[str, ...], decision: str, comment: str
) -> None:
    service.answers(201, RESULT)
    assert run("approve", ID, "--digest", DIGEST, *options).exit_code == 0
    stated = {"decision": decision, "envelope": DIGEST, "comment": comment}
    path = f"/v1/certificates/{quote(ID, safe='')}/approvals"
    assert service.asked == [("POST", path, "Bearer secret", stated)]


def test_a_revocation_says_why(service: Service, run: Any, answer: Any) -> None:
    stored = {
        "certificate_id": ID,
        "issue": 1,
        "envelope_digest": DIGEST,
        "code": "plan_error",
        "reason": "wrong data",
        "revoked_by": "token:bea",
        "at": "2026-01-01T00:00:00Z",
    }
    service.answers(201, stored)
    provided = ("revoke", ID, "--reason", "plan_error", "--text", "wrong data")
    told = run(*provided)
    assert told.exit_code == 0
    assert "is revoked" in told.stdout
    assert service.asked[0][3] == {"code": "plan_error", "reason": "wrong data"}
    service.answers(200, stored)
    assert "already revoked" in run(*provided, "--digest", DIGEST).stdout
    assert service.asked[1][3]["envelope"] == DIGEST
    assert answer(*provided, "--json") == (0, stored)


@pytest.mark.parametrize(
    ("status", "document", "code"),
    [
        (403, PROBLEM, 1),
        (409, PROBLEM, 1),
        (503, PROBLEM, 3),
        (302, b"", 3),
        (500, b"<html>", 3),
        (404, [], 3),
    ],
)
def test_refused_is_1_and_no_answer_is_3(
    service: Service, run: Any, status: int, document: Any, code: int
) -> None:
    service.answers(status, document)
    told = run("revoke", ID, "--reason", "other", "--text", "x")
    assert (told.exit_code, told.stdout) == (code, "")
    assert told.stderr


def test_nobody_there_is_3_and_a_mistake_of_use_2(run: Any, service: Service) -> None:
    nobody = ("--server", "http://127.0.0.1:9")
    assert run("status", *nobody).exit_code == 3
    assert run("status", "--server", "not a url").exit_code == 2
    service.answers(200, b"[1]")
    assert run("status").exit_code == 3
    requested = len(service.asked)
    assert run("approve", "1").exit_code == 2
    assert run("approve", ID, "--digest", "2").exit_code == 2
    assert run("approve", ID, "--digest", DIGEST, "--reject").exit_code == 2
    assert len(service.asked) == requested


# ---- verify by a list --------------------------------------------------------------------


@pytest.fixture
def bundle(document: Callable[..., Any], save: Any, run: Any, tmp_path: Path) -> Path:
    run("keys", "new")
    path = tmp_path / "bundle.json"
    assert run("certify", save(document()), "--out", str(path)).exit_code == 0
    return path


@pytest.fixture
def listed(home: Path, bundle: Path, answer: Any) -> Callable[..., bytes]:
    """A signed status list, with the bundle in it or not."""

    def make(sequence: int, *, revoked: bool, good_for: timedelta = timedelta(hours=1)) -> bytes:
        key = KeyStore(home / "keys").signing_key()
        assert isinstance(key, SigningKey)
        now = max(datetime.now(UTC), key.public.not_before)
        code, stated = answer("verify", str(bundle), "--json")
        assert code == 0
        one = {
            "envelope": digest_in(bundle),
            "certificate_id": stated["statement"]["predicate"]["certificate_id"],
            "issue": 1,
            "status": "revoked",
            "reason": "plan_error",
            "since": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        }
        content = {
            "issuer": "here",
            "sequence": sequence,
            "issued_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            "next_update": f"{now + good_for:%Y-%m-%dT%H:%M:%SZ}",
            "keyset_version": None,
            "keys": (key.key_id,),
            "listed": (one,) if revoked else (),
        }
        return sign_status(content, key)

    return make


def digest_in(bundle: Path) -> str:
    return read_envelope(json.loads(bundle.read_bytes())["envelope"]).digest


def test_from_the_service_to_a_verdict_about_a_revoked_bundle(
    service: Service, run: Any, answer: Any, bundle: Path, listed: Any, tmp_path: Path
) -> None:
    file = tmp_path / "status.json"
    service.answers(200, listed(1, revoked=False))
    told = run("status", "--out", str(file))
    assert (told.exit_code, "0 listed" in told.stdout) == (0, True)
    assert run("verify", str(bundle), "--status", str(file)).exit_code == 0
    early = file.read_bytes()
    service.answers(200, listed(2, revoked=True))
    assert "plan_error" in run("status", "--out", str(file)).stdout
    code, stated = answer("verify", str(bundle), "--status", str(file), "--json")
    assert (code, stated["step"], stated["code"]) == (1, 13, "revoked")
    # The rejection was remembered: the list from before does not bring the bundle back.
    file.write_bytes(early)
    code, stated = answer("verify", str(bundle), "--status", str(file), "--json")
    assert (code, stated["code"]) == (1, "status_rollback")


def test_what_is_not_checked_is_said_and_can_be_demanded(run: Any, bundle: Path) -> None:
    told = run("verify", str(bundle))
    assert told.exit_code == 0
    assert "revocation not checked" in told.stdout
    assert run("verify", str(bundle), "--require-status").exit_code == 1
    assert run("verify", str(bundle), "--status", "missing.json").exit_code == 2


def test_a_memory_that_cannot_be_read_is_not_overwritten(
    run: Any, home: Path, bundle: Path, listed: Any, tmp_path: Path
) -> None:
    file, memory = tmp_path / "status.json", home / "status-lists.json"
    file.write_bytes(listed(3, revoked=False))
    for broken in ("", "[]", '{"version": 2, "lists": {}}', '{"version": 1, "lists": {"a": 1}}'):
        memory.write_text(broken)
        assert run("verify", str(bundle), "--status", str(file)).exit_code == 2
        assert memory.read_text() == broken
    memory.unlink()
    assert run("verify", str(bundle), "--status", str(file)).exit_code == 0
    assert json.loads(memory.read_text())["lists"]["here"]["sequence"] == 3
