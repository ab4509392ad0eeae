"""The page about approvals and revocation: its commands, against a service that runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from affidavit.client import REVOCATION_CODES
from affidavit.gate import app
from affidavit.service.certificates.decisions import RevocationRequest
from affidavit.service.core.wire_models import Status
from affidavit.service.settings import Settings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "approvals-and-revocation.md"
POLICY = "schema_version: 1\nname: strict\nversion: 1\ndatasets: default\napprovals: 1\n"


def test_the_commands_of_the_page_run_in_their_order(
    forked_server: Any,
    token_for: Any,
    plan: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = forked_server
    settings = Settings(database_url=f"sqlite:///{tmp_path}/affidavit.db", key_directory=tmp_path)
    ada, bea, dan = (
        token_for(settings, scope, name=scope) for scope in ("submit", "approve", "admin")
    )
    server.start()
    provided: dict[str, Any] = {
        "content": POLICY,
        "headers": {**dan, "content-type": "application/yaml"},
    }
    assert httpx.post(f"{server.url}/v1/policies", **provided).is_success
    result = httpx.post(f"{server.url}/v1/certificates", json=plan(), headers=ada).json()
    certificate = result["certificate"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("AFFIDAVIT_SERVER", server.url)
    monkeypatch.setenv("AFFIDAVIT_TOKEN", bea["authorization"].removeprefix("Bearer "))
    Path("keys.json").write_bytes(httpx.get(f"{server.url}/v1/keys").content)
    codes, run = [], CliRunner()
    for line in "".join(re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)).splitlines():
        filled = line.replace("ID", certificate["id"]).replace(
            "DIGEST", certificate["envelope_digest"]
        )
        if "verify" in line:
            where = f"{server.url}/v1/certificates/{certificate['id']}/bundle"
            Path("bundle.json").write_bytes(httpx.get(where, headers=bea).content)
        outcome = run.invoke(app, shlex.split(filled, comments=True)[1:])
        codes.append(outcome.exit_code)
    assert codes == [2, 0, 0, 0, 1], outcome.output
    assert "revoked:" in outcome.output


def test_every_status_and_reason_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert not [word for word in (*Status, *REVOCATION_CODES) if f"`{word}`" not in text]
    assert set(REVOCATION_CODES) == set(
        RevocationRequest.model_json_schema()["properties"]["code"]["enum"]
    )
