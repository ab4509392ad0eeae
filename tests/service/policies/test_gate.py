"""``affidavit check --server``: the gate with the organisation's own word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from affidavit.client import calls
from affidavit.gate import app
from tests.service.conftest import ON_SQLITE

ADDRESS = "http://affidavit.example"
Document = Callable[..., dict[str, Any]]
Check = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def check(house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Document) -> Check:
    """Check the plan as sam's pipeline does, over the service in this process."""
    monkeypatch.setenv("AFFIDAVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AFFIDAVIT_TOKEN", house.tokens["sam"]["authorization"].split()[-1])

    def handle(_: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        if house.client is None:
            raise httpx.ConnectError("refused")
        url = str(request.url)
        assert url.startswith(f"{ADDRESS}/")
        headers = {name: request.headers[name] for name in request.headers if name != "host"}
        path = url.removeprefix(ADDRESS)
        answer = house.client.request(request.method, path, content=request.read(), headers=headers)
        return httpx.Response(answer.status_code, content=answer.content)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle)
    monkeypatch.setattr(calls, "FIRST_RETRY_SECONDS", 0.01)

    def run(**changes: Any) -> tuple[int, list[dict[str, Any]]]:
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(plan(**changes)))
        arguments = ["check", str(file), "--server", ADDRESS, "--format", "json"]
        result = CliRunner().invoke(app, arguments)
        document = json.loads(result.stdout)
        return result.exit_code, document["plans"][0]["findings"]

    return run


@ON_SQLITE
def test_the_service_s_reasons_block_and_its_waivers_stay_visible(house: Any, check: Check) -> None:
    assert check()[0] == 0
    house.activate(epsilon_cap=0.5)
    code, findings = check()
    (result,) = [finding for finding in findings if finding["blocks"]]
    assert (code, result["rule"], result["line"]) == (1, "policy_epsilon_cap", 1)
    waiver = house.waive().json()
    code, findings = check()
    (waived,) = [item for item in findings if item["waiver"]]
    assert (code, waived["rule"]) == (0, "policy_epsilon_cap")
    assert waived["waiver"]["id"] == waiver["id"]
    assert not any(entry["blocks"] for entry in findings)


@ON_SQLITE
def test_what_waits_for_approval_or_was_revoked_blocks(house: Any, check: Check) -> None:
    house.activate(approvals=1)
    code, findings = check()
    assert (code, [finding["rule"] for finding in findings if finding["blocks"]]) == (
        1,
        ["awaiting_approval"],
    )
    house.activate(version=2)
    assert check()[0] == 0
    answer = house.ask("sam", "GET", "/v1/certificates").json()["items"][0]
    reason = {"code": "plan_error", "reason": "the wrong data set"}
    revoked = house.ask("amy", "POST", f"/v1/certificates/{answer['id']}/revocation", reason)
    assert revoked.status_code in (200, 201), revoked.text
    code, findings = check()
    assert (code, [item["rule"] for item in findings if item["blocks"]]) == (1, ["revoked"])


@ON_SQLITE
@pytest.mark.parametrize(("word", "code"), [("block", 3), ("warn", 0)])
def test_an_outage_is_judged_by_the_policy_s_last_word(
    house: Any, check: Check, word: str, code: int
) -> None:
    client, house.client = house.client, None
    assert check()[0] == 3  # never reached, so nothing was ever allowed
    house.client = client
    house.activate(on_outage=word)
    assert check()[0] == 0
    house.client = None
    result, findings = check()
    assert (result, findings[-1]["rule"], findings[-1]["blocks"]) == (
        code,
        "server_unreachable",
        word == "block",
    )
    assert check(target={"epsilon": 0.01, "delta": 1e-5})[0] == 1
    house.client = client


@ON_SQLITE
def test_a_token_that_does_not_count_decides_nothing(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFFIDAVIT_TOKEN", "affidavit_nobody")
    code, findings = check()
    assert (code, findings[-1]["rule"]) == (3, "server_unreachable")


@ON_SQLITE
@pytest.mark.parametrize(
    ("change", "rule"),
    [({"verdict": "certified"}, "engines_disagree"), ({"plan_digest": "sha256:0"}, "other_plan")],
)
def test_a_service_that_says_otherwise_is_not_believed(
    house: Any, check: Check, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], rule: str
) -> None:
    honest = httpx.HTTPTransport.handle_request

    def lies(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        answer = honest(transport, request)
        if request.method == "GET":
            return answer
        return httpx.Response(200, json=json.loads(answer.read()) | change)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lies)
    code, findings = check(target={"epsilon": 0.01, "delta": 1e-5})
    assert (code, findings[-1]["rule"]) == (3, rule)
    assert house.client is not None
