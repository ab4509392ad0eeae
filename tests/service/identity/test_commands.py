"""``affidavit tokens``, and a service that does not start where it would know nobody."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from affidavit.service.__main__ import main
from affidavit.service.core.clock import DatabaseClock
from affidavit.service.core.errors import OperatorError
from affidavit.service.identity.tokens import parse_token
from affidavit.service.settings import Settings
from affidavit.service.web.serve import serve
from affidavit.trust import KeyStore
from tests.support.polling import wait_until

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """One command in this process: exit code, standard output, standard error."""
    assert sqlite_url
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    monkeypatch.delenv("DATABASE_URL", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        return main(arguments), *capsys.readouterr()

    return run


def test_a_token_is_shown_once_alone_on_standard_output(run: Run) -> None:
    code, shown, stated = run("tokens", "new", "--name", "ci", "--scope", "submit", "--scope=audit")
    assert code == 0
    created = parse_token(shown.removesuffix("\n"))
    assert created is not None
    assert created.id in stated
    assert created.text not in stated
    for arguments in (("tokens", "list"), ("tokens", "list", "--json")):
        code, listed, _ = run(*arguments)
        assert code == 0
        assert created.id in listed
        assert created.text[23:] not in listed
        assert created.digest not in listed
    (record,) = json.loads(run("tokens", "list", "--json")[1])["tokens"]
    assert (record["name"], record["scopes"]) == ("ci", ["audit", "submit"])
    assert record["created_by"] == f"operator:{pwd.getpwuid(os.getuid()).pw_name}"
    assert record["revoked_at"] is record["last_used_at"] is None


def test_a_revoked_token_stays_in_the_list(run: Run) -> None:
    created = json.loads(run("tokens", "new", "--name=ci", "--scope=work", "--days=7", "--json")[1])
    assert parse_token(created["token"]) is not None
    assert "until" in run("tokens", "list")[1]
    code, stated, _ = run("tokens", "revoke", "--reason", "left", created["id"])
    assert (code, created["id"] in stated) == (0, True)
    assert run("tokens", "revoke", created["id"])[0] == 0
    assert "revoked" in run("tokens", "list")[1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("new", "--name", "a b", "--scope", "submit"), "name"),
        (("new", "--name", "", "--scope", "submit"), "name"),
        (("new", "--name", "ci", "--scope", "root"), "approve"),
        (("new", "--name", "ci", "--scope", "submit", "--days", "0"), "days"),
        (("new", "--name", "ci", "--scope", "submit", "--days", "99999"), "days"),
        (("new", "--name", "ci", "--scope", "submit", "--days", "x"), "days"),
        (("new", "--name", "ci"), "--scope"),
        (("new", "--scope", "submit"), "--name"),
        (("revoke", "000000000000"), "not found"),
        (("revoke", "'; DROP TABLE tokens; --"), "not found"),
        (("revoke", "--reason", "a\nb", "000000000000"), "line"),
        ((), "revoke"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    run: Run, arguments: tuple[str, ...], named: str
) -> None:
    code, shown, stated = run("tokens", *arguments)
    assert (code, shown) == (2, "")
    assert named in stated
    assert "Traceback" not in stated
    assert json.loads(run("tokens", "list", "--json")[1]) == {"tokens": []}


def test_without_a_schema_it_says_to_migrate(run: Run, tmp_path: Path) -> None:
    (tmp_path / "affidavit.db").unlink()
    for arguments in (("list",), ("new", "--name", "a", "--scope", "submit"), ("revoke", "0")):
        code, _, stated = run("tokens", *arguments)
        assert (code, "affidavit migrate" in stated) == (2, True)
    assert not (tmp_path / "affidavit.db").exists()


def test_the_command_line_hands_them_to_the_service(
    run: Run, sqlite_url: str, tmp_path: Path
) -> None:
    assert sqlite_url
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "AFFIDAVIT_HOME": str(tmp_path)}

    command = [sys.executable, "-m", "affidavit", "tokens", "new", "--name", "ci"]
    command += ["--scope", "work", "--days", "90", "--person", "ana", "--team", "vision"]
    command += ["--queue", "gpu", "--queue=cpu", "--dataset", "mnist"]
    created = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert created.returncode == 0, created.stderr
    token = parse_token(created.stdout.strip())
    assert token is not None
    (record,) = json.loads(run("tokens", "list", "--json")[1])["tokens"]
    assert (record["id"], record["person"]) == (token.id, "person:ana")
    assert (record["team"], record["queues"]) == ("vision", ["cpu", "gpu"])
    assert record["datasets"] == ["mnist"]


# ---- where the service listens --------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_it_does_not_listen_to_a_network_that_it_knows_nobody_on(run: Run, host: str) -> None:
    code, _, stated = run("serve", "--host", host, "--port", "0")
    assert code == 2
    assert "affidavit tokens new" in stated
    assert "AFFIDAVIT_OIDC_ISSUER" in stated
    assert len(stated.splitlines()) == 1


@pytest.mark.parametrize("known", ["token", "revoked token", "provider"])
def test_it_does_once_it_can_know_somebody(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """A service whose only token was revoked still answers who asks for keys."""
    KeyStore(tmp_path / "keys").new("test")
    if known == "provider":
        monkeypatch.setenv("AFFIDAVIT_OIDC_ISSUER", "https://id.example.org")
        monkeypatch.setenv("AFFIDAVIT_OIDC_AUDIENCE", "affidavit")
        monkeypatch.setenv("AFFIDAVIT_OIDC_JWKS_FILE", "/none")
        monkeypatch.setenv("AFFIDAVIT_OIDC_SCOPES", '{"a": ["submit"]}')
    else:
        created = json.loads(run("tokens", "new", "--name=a", "--scope=submit", "--json")[1])
        if known == "revoked token":
            run("tokens", "revoke", created["id"])
    served = []
    monkeypatch.setattr("affidavit.service.web.serve._run", lambda *given: served.append(given))
    assert run("serve", "--host", "0.0.0.0", "--port", "0")[0] == 0
    ((listening, settings),) = served
    assert listening.fileno() == -1  # closed again
    assert settings.loopback is False


def test_nobody_known_is_an_error_of_its_own(settings: Settings) -> None:
    with pytest.raises(OperatorError, match=r"0\.0\.0\.0"):
        serve("0.0.0.0", 0, settings)


def _listed(run: Run) -> dict[str, Any]:
    """The only token, as the command tells of it."""
    (record,) = json.loads(run("tokens", "list", "--json")[1])["tokens"]
    return dict(record)


def test_a_running_service_asks_for_tokens_from_the_first_one_on(
    forked_server: Any, run: Run
) -> None:
    """Made by this process, and asked for by the service at its next request."""
    server = forked_server
    server.start()
    assert "OPEN: no token has been created" in "".join(server.log)
    path = f"{server.url}/v1/certificates"
    assert httpx.get(path).status_code == 200
    assert httpx.get(path, headers={"x-forwarded-for": "127.0.0.1"}).status_code == 401
    assert httpx.get(path, headers={"host": "rebound.example"}).status_code == 401
    created = run("tokens", "new", "--name", "ci", "--scope", "submit")[1].strip()
    assert httpx.get(path).status_code == 401
    headers = {"authorization": f"Bearer {created}"}
    assert httpx.get(path, headers=headers).status_code == 200
    # A use is written down after the request was answered.
    wait_until(lambda: _listed(run)["last_used_at"] is not None)
    record = _listed(run)
    run("tokens", "revoke", record["id"])
    refused = httpx.get(path, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (401, "revoked_token")
    assert httpx.get(path).status_code == 401


def test_a_tokens_life_is_counted_by_the_clock_of_the_database(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of the operator may be years off."""
    database = datetime(2031, 5, 6, tzinfo=UTC)
    monkeypatch.setattr(DatabaseClock, "now", lambda _: database)
    code, shown, _ = run("tokens", "new", "--name=ci", "--scope=submit", "--days=2", "--json")
    assert (code, json.loads(shown)["created_at"]) == (0, "2031-05-06T00:00:00Z")
    assert json.loads(shown)["expires_at"] == "2031-05-08T00:00:00Z"
    monkeypatch.setattr(DatabaseClock, "now", lambda _: database + timedelta(days=3))
    assert "expired 2031-05-08" in run("tokens", "list")[1]
    assert run("tokens", "revoke", json.loads(shown)["id"])[0] == 0
    assert "revoked 2031-05-09" in run("tokens", "list")[1]
