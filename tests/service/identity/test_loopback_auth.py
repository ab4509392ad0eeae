"""Who needs no token: this machine alone, directly, by its own name, until a token exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from affidavit.service.identity.authentication import (
    ANONYMOUS,
    FORWARDED_HEADERS,
    is_direct_request,
    is_loopback,
)
from affidavit.service.identity.provider import Provider
from affidavit.service.settings import Settings

HOST = {"host": "127.0.0.1:8321"}
LIST = "/v1/certificates"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1"])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8321", "localhost:1", "[::1]:8321"])
def test_a_program_on_this_machine_is_let_in(address: str, host: str) -> None:
    assert is_direct_request(address, {"host": host})


@pytest.mark.parametrize(
    "address",
    [None, "", "192.0.2.1", "10.0.0.1", "::", "0.0.0.0", "::ffff:127.0.0.1", "testclient"],
)
def test_another_address_is_not(address: str | None) -> None:
    assert not is_direct_request(address, HOST)
    assert address is None or not is_loopback(address)


@pytest.mark.parametrize(
    "host",
    [
        "", "rebound.example", "rebound.example:8321", "localhost.example", "127.0.0.1.example",
        "example@127.0.0.1", "127.0.0.1@example", "127.0.0.1:8321/x", "127.0.0.1, example",
        "127.0.0.1:x", "127.1", "2130706433", "0x7f.1", "[::1", "localhost.", "127.0.0.1 ",
        "0.0.0.0", "127.0.0.1#x", "127.0.0.1?x", "\u2460.0.0.1", "[127.0.0.1]", "user:pw@localhost",
    ],
)  # fmt: skip
def test_a_name_that_was_made_to_lead_here_is_not(host: str) -> None:
    assert not is_direct_request("127.0.0.1", {"host": host})


@pytest.mark.parametrize("name", FORWARDED_HEADERS)
@pytest.mark.parametrize("value", ["127.0.0.1", "", "for=127.0.0.1"])
def test_what_somebody_forwarded_is_not(name: str, value: str) -> None:
    assert not is_direct_request("127.0.0.1", {**HOST, name: value})


def test_a_proxy_that_says_nothing_gives_itself_away_by_its_version() -> None:
    assert is_direct_request("127.0.0.1", HOST, "1.1")
    assert is_direct_request("127.0.0.1", HOST, "2")
    assert not is_direct_request("127.0.0.1", HOST, "1.0")


@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({"origin": "http://127.0.0.1:8321"}, True),
        ({"origin": "http://127.0.0.1:9999"}, False),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "https://127.0.0.1:8321"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
    ],
)
def test_what_another_sites_page_sends_is_not(headers: dict[str, str], let_in: bool) -> None:
    assert is_direct_request("127.0.0.1", {**HOST, **headers}) is let_in


def test_nobody_in_particular_approves_or_administers_nothing() -> None:
    assert sorted(ANONYMOUS.scopes) == ["audit", "submit"]
    assert ANONYMOUS.is_anonymous


def code(answer: Any) -> str:
    return str(answer.json().get("code", answer.status_code))


def test_over_http_the_same_holds(client: Any) -> None:
    assert client.get(LIST).status_code == 200
    for headers in (
        {"host": "rebound.example"},
        {"host": "[::1"},
        {"host": "a b:c"},
        {"x-forwarded-for": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1"},
        {"origin": "http://evil.example"},
    ):
        refused = client.get(LIST, headers=headers)
        assert (refused.status_code, code(refused)) == (401, "unauthenticated")
    refused = client.post("/v1/keysets", json={})
    assert (refused.status_code, code(refused)) == (403, "missing_scope")
    assert "admin" in refused.json()["detail"]
    assert "run: affidavit tokens new --name NAME --scope admin" in refused.json()["detail"]


@pytest.mark.parametrize("address", ["192.0.2.1", "testclient"])
def test_a_peer_elsewhere_is_refused_though_the_service_is_on_loopback(
    settings: Settings, client_of: Any, address: str
) -> None:
    with client_of(settings, address) as client:
        assert client.get(LIST).status_code == 401
        assert client.get("/v1/keys").status_code == 200


def test_a_service_on_a_network_lets_nobody_in_without_a_token(
    settings: Settings, client_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(replace(settings, loopback=False)) as client:
        assert code(client.get(LIST)) == "unauthenticated"
        assert client.get("/readyz").json()["warnings"] == []
    assert "OPEN" not in caplog.text


def test_a_provider_ends_the_time_without_tokens(
    settings: Settings, client_of: Any, tmp_path: Path
) -> None:
    provider = Provider(
        issuer="https://id.example", audience="a", jwks_url=None, jwks_file=tmp_path / "none",
        claim=("groups",), scopes={},
    )  # fmt: skip
    with client_of(replace(settings, provider=provider)) as client:
        assert code(client.get(LIST)) == "unauthenticated"


def test_the_first_token_ends_it_for_good_without_a_restart(
    settings: Settings, client: Any, token_for: Any
) -> None:
    (warning,) = client.get("/readyz").json()["warnings"]
    assert warning["code"] == "anonymous_access"
    assert "affidavit tokens new" in warning["remedy"]
    assert client.get(LIST).status_code == 200
    submitter = token_for(settings, "submit")
    assert code(client.get(LIST)) == "unauthenticated"
    assert client.get(LIST, headers=submitter).status_code == 200
    assert client.get("/readyz").json()["warnings"] == []


def test_a_bad_token_is_not_taken_for_none(client: Any) -> None:
    assert client.get(LIST).status_code == 200
    refused = client.get(LIST, headers={"authorization": "Bearer affidavit_0"})
    assert (refused.status_code, code(refused)) == (401, "invalid_token")
