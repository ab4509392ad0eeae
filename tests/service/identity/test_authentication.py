"""One bearer token in one header; whatever else is sent is refused, repeated nowhere."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from affidavit.service.identity.actor import AuthenticationError
from affidavit.service.identity.authentication import MAX_TOKEN_LENGTH, parse_bearer
from affidavit.service.identity.tokens import generate_token
from tests.support.polling import TIMEOUT_SECONDS

LIST = "/v1/certificates"
SECRET = generate_token().text


@pytest.mark.parametrize("header", ["Bearer a", "bearer a", "BEARER  a", " Bearer a ", "Bearer a="])
def test_a_bearer_token_is_read(header: str) -> None:
    assert parse_bearer([header], "limit=1") == header.strip()[7:].strip()


REFUSED = {
    "unsupported_scheme": [
        "Basic dXNlcjpwdw==", "Digest x", "Token abc", "", "abc", "Bearer\tabc", "Bearerabc",
        f"{SECRET}", "ⓑearer abc", "Negotiate YII=", "AWS4-HMAC-SHA256 x",
    ],
    "malformed_credentials": [
        "Bearer", "Bearer ", "Bearer a b", "Bearer a,b", "Bearer a, Bearer b", "Bearer é",
        "Bearer \udc80", "Bearer a\nb", "Bearer a\x00", "Bearer \"a\"", "Bearer a;b", "Bearer =",
        f"Bearer {'a' * (MAX_TOKEN_LENGTH + 1)}", "Bearer ٣", "Bearer a\u200b", "Bearer a=b",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "header"),
    [(code, header) for code, many in REFUSED.items() for header in many],
    ids=[f"{code}-{index}" for code, many in REFUSED.items() for index in range(len(many))],
)
def test_anything_else_is_refused_by_a_stable_code(code: str, header: str) -> None:
    with pytest.raises(AuthenticationError) as caught:
        parse_bearer([header], "")
    assert caught.value.code == code
    assert SECRET not in caught.value.detail


def test_several_headers_are_refused_even_if_they_say_the_same() -> None:
    with pytest.raises(AuthenticationError) as caught:
        parse_bearer(["Bearer a", "Bearer a"], "")
    assert caught.value.code == "malformed_credentials"


@pytest.mark.parametrize(
    "query",
    [
        "access_token=x", "limit=1&ACCESS_TOKEN=x", "token", "api_key=", "authorization=Bearer%20x",
        f"name={SECRET}", SECRET, f"name={SECRET.replace('_', '%5F')}", "%61ccess_token=x",
    ],
    ids=lambda query: query.replace(SECRET, "token").replace(SECRET.replace("_", "%5F"), "coded"),
)  # fmt: skip
def test_a_token_in_the_url_is_refused_beside_a_good_one_too(query: str) -> None:
    for headers in ([], ["Bearer good"]):
        with pytest.raises(AuthenticationError) as caught:
            parse_bearer(headers, query)
        assert caught.value.code == "token_in_url"
        assert "revoke" in caught.value.detail
        assert SECRET not in caught.value.detail


@pytest.mark.parametrize("query", ["limit=1", "cursor=abc", "name=token", "a=b;token=x", "%ff=%00"])
def test_other_parameters_are_none_of_its_business(query: str) -> None:
    assert parse_bearer([], query) is None


def test_over_http_each_refusal_is_a_401_problem_with_a_challenge(network: Any) -> None:
    good = network.tokens["submit"]
    sent: list[tuple[Any, str, str]] = [
        ([("Authorization", "Basic dTpw")], LIST, "unsupported_scheme"),
        ([("Authorization", f"Bearer {good}")] * 2, LIST, "malformed_credentials"),
        ([("Authorization", f"Bearer {good[:-1]}")], LIST, "invalid_token"),
        ([("Authorization", f"Bearer {good}")], f"{LIST}?access_token={good}", "token_in_url"),
        ([("Authorization", b"Bearer \xff")], LIST, "malformed_credentials"),
        ([("Authorization", "Bearer a.b.c")], LIST, "invalid_token"),
        ([("Authorization", f"Bearer {generate_token().text}")], LIST, "invalid_token"),
        ([("X-Api-Key", good)], LIST, "unauthenticated"),
        ([("Cookie", f"token={good}")], LIST, "unauthenticated"),
        ([("Proxy-Authorization", f"Bearer {good}")], LIST, "unauthenticated"),
    ]
    for headers, path, code in sent:
        answer = network.client.get(path, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, code)
        assert answer.headers["www-authenticate"].startswith('Bearer realm="affidavit"')
        assert good not in answer.text
        assert good not in str(answer.headers)
    assert network.ask("GET", LIST, "submit").status_code == 200


def test_the_log_of_a_real_server_never_holds_a_token(
    migrated_sqlite: Path, tmp_path: Path, serving: Any, settings: Any, token_for: Any
) -> None:
    """Neither a good one nor one that was refused, in a header, a URL or a header split."""
    assert migrated_sqlite.exists()
    good = token_for(settings, "submit")["authorization"].partition(" ")[2]
    other = generate_token().text
    with serving(tmp_path, forked=True) as server:
        for request in (
            f"GET {LIST} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {good}\r\n",
            f"GET {LIST} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {other}\r\n",
            f"GET {LIST}?token={good} HTTP/1.1\r\nHost: x\r\n",
            f"GET /{good} HTTP/1.1\r\nHost: x\r\n",
            f"GET {LIST} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {good}\x00\r\n",
            f"GET {LIST} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\r\n {good}\r\n",
        ):
            with socket.create_connection(
                ("127.0.0.1", server.port), timeout=TIMEOUT_SECONDS
            ) as peer:
                peer.sendall(f"{request}Connection: close\r\n\r\n".encode("latin-1"))
                answer = b""
                while piece := peer.recv(65536):
                    answer += piece
            status = int(answer.split(b" ", 2)[1])
            assert status in (200, 400, 401, 404), answer
            assert good.encode() not in answer
    stated = "".join(server.log)
    assert "listening" in stated
    assert good not in stated
    assert good[23:] not in stated
    assert other not in stated
