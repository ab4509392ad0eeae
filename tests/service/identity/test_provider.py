"""The settings of an OpenID provider, and its keys: read within bounds, kept within bounds."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest

from affidavit.service.core.errors import SettingsError
from affidavit.service.identity import openid
from affidavit.service.identity.openid import (
    FRESH_SECONDS,
    REREAD_SECONDS,
    RETRY_SECONDS,
    STALE_SECONDS,
    ProviderKeys,
    ProviderUnavailable,
    UnknownKey,
    parse_keys,
)
from affidavit.service.identity.provider import read_provider
from affidavit.service.settings import Settings
from tests.service.identity.provider_server import (
    EC,
    GOOD_KEYS,
    RSA,
    SHORT_RSA,
    ProviderServer,
    document,
    jwk,
    provider_server,
)  # fmt: skip
from tests.support.polling import TIMEOUT_SECONDS

GIVEN = {
    "AFFIDAVIT_OIDC_ISSUER": "https://id.example.org/",
    "AFFIDAVIT_OIDC_AUDIENCE": "affidavit",
    "AFFIDAVIT_OIDC_JWKS_URL": "https://id.example.org/jwks",
    "AFFIDAVIT_OIDC_SCOPES": '{"ml-team": ["submit"]}',
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ISSUER": ""}, "ISSUER"),
        ({"AUDIENCE": ""}, "AUDIENCE"),
        ({"SCOPES": ""}, "SCOPES"),
        ({"JWKS_URL": ""}, "JWKS_URL"),
        ({"JWKS_FILE": "/keys.json"}, "not both"),
        ({"JWKS_URL": "http://id.example.org/jwks"}, "https://"),
        ({"JWKS_URL": "http://127.0.0.1.example.org/jwks"}, "https://"),
        ({"JWKS_URL": "http://localhost@example.org/"}, "https://"),
        ({"JWKS_URL": "file:///etc/passwd"}, "https://"),
        ({"JWKS_URL": "ftp://127.0.0.1/"}, "https://"),
        ({"JWKS_URL": "//id.example.org"}, "https://"),
        ({"JWKS_URL": "https://"}, "https://"),
        ({"JWKS_URL": "https://[::1"}, "JWKS_URL"),
        ({"SCOPES": "ml=submit"}, "SCOPES"),
        ({"SCOPES": "{}"}, "SCOPES"),
        ({"SCOPES": "[]"}, "SCOPES"),
        ({"SCOPES": '{"a": []}'}, "SCOPES"),
        ({"SCOPES": '{"a": "submit"}'}, "SCOPES"),
        ({"SCOPES": '{"a": ["root"]}'}, "SCOPES"),
        ({"SCOPES": '{"a": [["submit"]]}'}, "SCOPES"),
        ({"SCOPES": '{"a": ["submit"], "a": ["admin"]}'}, "SCOPES"),
        ({"SCOPES": "[" * 100_000}, "SCOPES"),
        ({"AUDIENSE": "x"}, "unknown setting AFFIDAVIT_OIDC_AUDIENSE"),
    ],
)
def test_a_provider_that_is_half_or_unsafely_configured_is_refused_by_name(
    changes: dict[str, str], named: str
) -> None:
    provided = GIVEN | {f"AFFIDAVIT_OIDC_{name}": value for name, value in changes.items()}
    with pytest.raises(SettingsError, match=named):
        read_provider(provided)
    with pytest.raises(SettingsError, match=named):
        Settings.from_environment(provided)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "http://[::1]/x", "http://localhost/x"])
def test_keys_come_over_http_from_this_machine_only(url: str) -> None:
    result = read_provider(GIVEN | {"AFFIDAVIT_OIDC_JWKS_URL": url})
    assert result is not None
    assert result.jwks_url == url


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ("groups",)),
        ("roles", ("roles",)),
        ("realm_access.roles", ("realm_access", "roles")),
        ("https://example.org/claims.groups", ("https://example.org/claims.groups",)),
    ],
)
def test_a_claim_is_named_by_its_path(text: str, path: tuple[str, ...]) -> None:
    result = read_provider(GIVEN | {"AFFIDAVIT_OIDC_CLAIM": text})
    assert result is not None
    assert result.claim == path


PRIVATE: dict[str, Any] = jwt.get_algorithm_by_name("RS256").to_jwk(RSA, as_dict=True)


def test_only_public_keys_for_signatures_are_keys() -> None:
    symmetric = {"kty": "oct", "k": "c2VjcmV0", "kid": "oct", "alg": "HS256"}
    unusable: list[Any] = [
        symmetric,
        jwk(RSA, "encrypts", "RS256", use="enc"),
        jwk(RSA, "wraps", "RS256", key_ops=["wrapKey"]),
        jwk(RSA, "odd", "RS256", key_ops="verify"),
        {**PRIVATE, "kid": "private", "key_ops": ["verify"]},
        jwk(SHORT_RSA, "short", "RS256"),
        {**jwk(RSA, "none", "RS256"), "alg": "none"},
        {**jwk(RSA, "hmac", "RS256"), "alg": "HS256"},
        {**jwk(RSA, "x", "RS256"), "kid": None},
        {**jwk(RSA, "x", "RS256"), "kid": ["x"]},
        {**jwk(RSA, "cut", "RS256"), "n": "!"},
        {**jwk(EC, "off-curve", "ES256"), "x": "AAAA"},
        {"kty": "EC", "crv": "secp256k1", "kid": "k1"},
        {"kty": "RSA", "kid": "empty"},
        jwk(RSA, "twice", "RS256"), jwk(EC, "twice", "ES256"),
        None, [], "x", 1,
    ]  # fmt: skip
    assert set(parse_keys(document(*unusable))) == set()
    assert set(parse_keys(document(*unusable, *GOOD_KEYS))) == {"rsa", "ec", "ed"}


@pytest.mark.parametrize(
    "raw",
    [b"", b"{}", b"[]", b"null", b'{"keys": {}}', b"\xff", b"[" * 100_000,
     document(*[jwk(EC, str(n), "ES256") for n in range(101)])],
)  # fmt: skip
def test_what_is_no_key_document_gives_no_keys(raw: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse_keys(raw)
    keys = ProviderKeys(lambda: raw)
    with pytest.raises(ProviderUnavailable):
        keys.key("rsa")


class Source:
    """A document that can fail, a clock that can be turned, and how often it was read."""

    def __init__(self) -> None:
        self.now, self.read, self.error = 0.0, 0, ""
        self.keys = list(GOOD_KEYS)

    def __call__(self) -> bytes:
        self.read += 1
        if self.error:
            raise OSError(self.error)
        return document(*self.keys)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def keys(source: Source) -> ProviderKeys:
    return ProviderKeys(source, lambda: source.now)


def test_known_keys_are_read_once_in_five_minutes(source: Source, keys: ProviderKeys) -> None:
    for second in range(int(FRESH_SECONDS) + 1):
        source.now = second
        assert keys.key("rsa").key_id == "rsa"
    assert source.read == 1
    source.now += 1
    keys.key("ec")
    assert source.read == 2


def test_a_flood_of_unknown_keys_reads_twice_a_minute(source: Source, keys: ProviderKeys) -> None:
    for step in range(6000):
        source.now = step / 100
        with pytest.raises(UnknownKey):
            keys.key(f"kid-{step}")
        assert keys.key("rsa")
    assert source.read == 60 / REREAD_SECONDS


def test_a_new_key_is_found_and_a_withdrawn_one_lost(source: Source, keys: ProviderKeys) -> None:
    keys.key("rsa")
    source.keys = [jwk(EC, "new", "ES256")]
    source.now = REREAD_SECONDS
    assert keys.key("new").key_id == "new"
    with pytest.raises(UnknownKey):
        keys.key("rsa")


def test_in_an_outage_known_keys_count_for_an_hour_and_nothing_after_it(
    source: Source, keys: ProviderKeys, caplog: pytest.LogCaptureFixture
) -> None:
    keys.key("rsa")
    source.error = "no route"
    for now in (FRESH_SECONDS + 1, STALE_SECONDS):
        source.now = now
        assert keys.key("rsa")
        with pytest.raises(ProviderUnavailable):  # it may be a key that we cannot know yet
            keys.key("new")
    source.now = STALE_SECONDS + 1
    with pytest.raises(ProviderUnavailable):
        keys.key("rsa")
    assert "no route" in caplog.text
    source.error, source.now = "", source.now + RETRY_SECONDS
    assert keys.key("rsa")


def test_a_provider_that_is_down_is_asked_again_every_few_seconds(
    source: Source, keys: ProviderKeys
) -> None:
    source.error = "down"
    for step in range(1000):
        source.now = step / 100
        with pytest.raises(ProviderUnavailable):
            keys.key("rsa")
    assert source.read == 10 / RETRY_SECONDS


def test_no_request_with_known_keys_waits_for_new_ones(source: Source) -> None:
    reading, go = threading.Event(), threading.Event()
    held = [False]

    def read() -> bytes:
        if held[0]:
            reading.set()
            assert go.wait(TIMEOUT_SECONDS)
        return document(*GOOD_KEYS)

    keys = ProviderKeys(read, lambda: source.now)
    keys.key("rsa")
    held[0], source.now = True, FRESH_SECONDS + 1
    slow = threading.Thread(target=lambda: keys.key("rsa"))
    slow.start()
    assert reading.wait(TIMEOUT_SECONDS)
    assert keys.key("rsa")
    go.set()
    slow.join()


# ---- over a real socket, and from a file ----------------------------------------------


@pytest.fixture
def server() -> Iterator[ProviderServer]:
    with provider_server() as result:
        yield result


def of(**changes: str) -> ProviderKeys:
    provided = {**GIVEN, "AFFIDAVIT_OIDC_JWKS_URL": ""}
    result = read_provider(
        provided | {f"AFFIDAVIT_OIDC_{name}": item for name, item in changes.items()}
    )
    assert result is not None
    return ProviderKeys.of(result)


def test_keys_are_read_from_a_server(server: ProviderServer) -> None:
    keys = of(JWKS_URL=server.url)
    assert keys.key("ed").key_id == "ed"
    assert server.asked == ["/jwks"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": 500},
        {"status": 404},
        {"status": 302, "headers": {"Location": "http://127.0.0.1:1/"}},
        {"body": b"<html>sign in</html>"},
        {"body": b" " * 300_000 + document(*GOOD_KEYS)},
        {"body": b"junk", "headers": {"Content-Encoding": "gzip"}},
    ],
)
def test_an_answer_that_is_no_key_document_lets_nobody_in(
    server: ProviderServer, wrong: dict[str, Any]
) -> None:
    for name, value in wrong.items():
        setattr(server, name, value)
    with pytest.raises(ProviderUnavailable):
        of(JWKS_URL=server.url).key("rsa")
    assert len(server.asked) == 1


def test_a_server_that_does_not_answer_is_waited_for_only_so_long(
    server: ProviderServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openid, "READ_SECONDS", 0.1)
    server.delay = 20.0
    start = time.monotonic()
    with pytest.raises(ProviderUnavailable):
        of(JWKS_URL=server.url).key("rsa")
    assert time.monotonic() - start < server.delay
    with pytest.raises(ProviderUnavailable):
        of(JWKS_URL="http://127.0.0.1:1/jwks").key("rsa")


def test_a_small_answer_that_unpacks_to_a_huge_one_is_cut_off(server: ProviderServer) -> None:

    server.body = gzip.compress(b" " * 50_000_000)
    server.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(ProviderUnavailable):
        of(JWKS_URL=server.url).key("rsa")


def test_keys_are_read_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    with pytest.raises(ProviderUnavailable):
        of(JWKS_FILE=str(path)).key("rsa")
    path.write_bytes(json.dumps({"keys": GOOD_KEYS}).encode())
    assert of(JWKS_FILE=str(path)).key("rsa").key_id == "rsa"
