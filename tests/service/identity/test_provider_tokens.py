"""Tokens of an OpenID provider with a real JWKS server: good ones, and every forgery we know."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding

from affidavit.service.identity.openid import LEEWAY_SECONDS
from affidavit.service.identity.provider import Provider
from affidavit.service.identity.scopes import Scope
from affidavit.service.settings import Settings
from tests.service.identity.provider_server import (
    AUDIENCE,
    EC,
    ED,
    GOOD_KEYS,
    ISSUER,
    RSA,
    SHORT_RSA,
    STRANGER,
    ProviderServer,
    claims,
    document,
    jwk,
    provider_server,
    token,
)  # fmt: skip

LIST = "/v1/certificates"
SCOPES = {
    "ml-team": frozenset({Scope.SUBMIT}),
    "privacy": frozenset({Scope.APPROVE, Scope.AUDIT}),
    "a b": frozenset({Scope.ADMIN}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ProviderServer]:
    with provider_server() as result:
        yield result


@pytest.fixture(autouse=True)
def _answering(server: ProviderServer) -> None:
    server.body, server.status = document(*GOOD_KEYS), 200


@pytest.fixture(scope="module")
def provider(server: ProviderServer) -> Provider:
    return Provider(
        issuer=ISSUER, audience=AUDIENCE, jwks_url=server.url, jwks_file=None,
        claim=("groups",), scopes=SCOPES,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ask(network_settings: Settings, provider: Provider, client_of: Any) -> Iterator[Any]:
    """Ask for the list with a token."""
    with client_of(replace(network_settings, provider=provider), "192.0.2.1") as client:

        def ask(text: str, method: str = "GET", path: str = LIST, **sent: Any) -> Any:
            return client.request(method, path, headers={"authorization": f"Bearer {text}"}, **sent)

        yield ask


@pytest.mark.parametrize(
    ("private", "alg", "kid"), [(RSA, "RS256", "rsa"), (EC, "ES256", "ec"), (ED, "EdDSA", "ed")]
)
def test_a_good_token_lets_its_holder_in_by_its_groups(
    ask: Any, private: Any, alg: str, kid: str
) -> None:
    assert ask(token(private, alg, kid)).status_code == 200
    assert ask(token(private, alg, kid, aud=["other", AUDIENCE])).status_code == 200
    assert ask(signed_by_hand({})).status_code == 200
    refused = ask(token(private, alg, kid, groups=["nobody"]))
    assert (refused.status_code, refused.json()["code"]) == (403, "missing_scope")
    assert "oidc:00u1-alice" in refused.json()["detail"]


def test_a_certificate_names_the_holder_by_sub(
    settings: Settings, provider: Provider, client_of: Any, plan: Any, post: Any
) -> None:
    """Names and addresses can change hands; ``sub`` never does."""
    text = token(name="Mallory", email="ceo@example.org", preferred_username="root")
    with client_of(replace(settings, provider=provider, loopback=False)) as client:
        client.headers["authorization"] = f"Bearer {text}"
        bundle = post(client, plan()).json()["certificate"]["bundle"]
    payload = json.loads(base64.b64decode(bundle["envelope"]["payload"]))
    assert payload["predicate"]["requester"] == "oidc:00u1-alice"


@pytest.mark.parametrize(
    ("groups", "held"),
    [
        (["ml-team"], {"submit"}),
        (["ml-team", "privacy", "unknown"], {"submit", "approve", "audit"}),
        ("privacy", {"approve", "audit"}),
        ("a b", {"admin"}),
        ("ml-team privacy", set()),
        ([], set()),
        (None, set()),
        ([["ml-team"], {"ml-team": 1}, 7, None], set()),
        ({"ml-team": True}, set()),
        (True, set()),
        (["ML-TEAM", "ml-team "], set()),
    ],
)
def test_what_a_group_may_do_is_what_the_table_says(ask: Any, groups: Any, held: set[str]) -> None:
    stated = ask(token(groups=groups), "POST", "/v1/keysets").json()
    if "admin" in held:
        assert stated["code"] != "missing_scope"
    else:
        assert stated["code"] == "missing_scope"
        assert f"has {', '.join(sorted(held)) or 'none'};" in stated["detail"]


@pytest.mark.parametrize(
    ("claim", "value"),
    [
        (("realm_access", "roles"), {"realm_access": {"roles": ["ml-team"]}}),
        (("scope",), {"scope": "openid ml-team"}),
        (("https://example.org/groups",), {"https://example.org/groups": ["ml-team"]}),
    ],
)
def test_the_claim_may_lie_elsewhere(
    settings: Settings, provider: Provider, client_of: Any, claim: tuple[str, ...], value: Any
) -> None:
    result = replace(settings, provider=replace(provider, claim=claim), loopback=False)
    with client_of(result) as client:
        good = {"authorization": f"Bearer {token(groups=None, **value)}"}
        assert client.get(LIST, headers=good).status_code == 200
        other = {"authorization": f"Bearer {token()}"}
        assert client.get(LIST, headers=other).json()["code"] == "missing_scope"


# ---- forgeries -----------------------------------------------------------------------


def part(value: Any) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def unsigned(header: Any, payload: Any = None, signature: bytes = b"") -> str:
    return f"{part(header)}.{part(claims() if payload is None else payload)}.{part(signature)}"


def hmac_with(secret: bytes, kid: str = "rsa", alg: str = "HS256") -> str:
    """Signed symmetrically, with what everybody can know as the secret."""
    body = unsigned({"alg": alg, "typ": "JWT", "kid": kid}).rpartition(".")[0]
    return f"{body}.{part(hmac.new(secret, body.encode(), hashlib.sha256).digest())}"


def signed_by_hand(header: Any) -> str:
    """Signed by the right key, with a header that the library would not write."""
    known = {"alg": "RS256", "typ": "JWT", "kid": "rsa"}
    body = unsigned(known | header).rpartition(".")[0]
    return f"{body}.{part(RSA.sign(body.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


PEM = RSA.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)
DER = RSA.public_key().public_bytes(
    serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
)
GOOD = token()
HEAD, BODY, SIGNATURE = GOOD.split(".")
OWN = jwk(STRANGER, "rsa", "RS256")

FORGED = {
    "no signature": f"{HEAD}.{BODY}.",
    "alg none": unsigned({"alg": "none", "kid": "rsa"}),
    "alg None": unsigned({"alg": "None", "kid": "rsa"}),
    "alg nOnE with a signature": unsigned({"alg": "nOnE", "kid": "rsa"}, signature=b"x"),
    "no alg": unsigned({"kid": "rsa"}),
    "alg a list": unsigned({"alg": ["RS256"], "kid": "rsa"}),
    "HS256 with the public key as PEM": hmac_with(PEM),
    "HS256 with the public key as DER": hmac_with(DER),
    "HS256 with the JWK": hmac_with(json.dumps(GOOD_KEYS[0]).encode()),
    "HS256 with nothing": hmac_with(b""),
    "RS256 said, HMAC done": hmac_with(PEM, alg="RS256"),
    "another key under the known kid": token(STRANGER),
    "a kid of nobody": token(STRANGER, kid="stranger"),
    "no kid": token(kid=None),
    "an empty kid": token(kid=""),
    "a kid that is a path": token(STRANGER, kid="../../../../dev/null"),
    "a kid that is SQL": token(STRANGER, kid="x' UNION SELECT 'key"),
    "a kid that is a URL": token(STRANGER, kid="http://127.0.0.1:1/"),
    "a kid that is a number": unsigned({"alg": "RS256", "kid": 0}),
    "a kid that is an object": unsigned({"alg": "RS256", "kid": {"a": 1}}),
    "a huge kid": token(kid="k" * 1000),
    "its own key in the header": token(STRANGER, header={"jwk": OWN}),
    "its own key's address": token(STRANGER, header={"jku": "http://127.0.0.1:1/jwks"}),
    "its own certificate": token(STRANGER, header={"x5c": ["AAAA"], "x5u": "http://127.0.0.1:1"}),
    "another algorithm than the key's": token(alg="RS512"),
    "PSS with a key for PKCS#1": token(alg="PS256"),
    "the EC key's kid": token(kid="ec"),
    "critical extensions": token(header={"crit": ["exp"]}),
    "an extension that changes nothing": signed_by_hand({"crit": ["b64"], "b64": True}),
    "detached payload": token(header={"crit": ["b64"], "b64": False}),
    "another payload": f"{HEAD}.{part(claims(groups=['privacy']))}.{SIGNATURE}",
    "another header": f"{part({'alg': 'RS256', 'kid': 'rsa', 'x': 1})}.{BODY}.{SIGNATURE}",
    "a cut signature": GOOD[:-4],
    "one part more": f"{GOOD}.{SIGNATURE}",
    "one part": HEAD,
    "empty parts": "..",
    "not base64": "a.b.c",
    "a header that is a list": unsigned([]),
    "a header that is deep": unsigned(b'{"alg":' + b"[" * 4000, {}),
    "a payload that is a list": jwt.api_jws.encode(b"[]", RSA, "RS256", headers={"kid": "rsa"}),
    "a payload that is no JSON": jwt.api_jws.encode(b"\xff", RSA, "RS256", headers={"kid": "rsa"}),
    "infinite life": jwt.api_jws.encode(
        json.dumps(claims(exp=float("inf"))).encode(), RSA, "RS256", headers={"kid": "rsa"}
    ),
    "life that is no number": jwt.api_jws.encode(
        json.dumps(claims(exp=float("nan"))).encode(), RSA, "RS256", headers={"kid": "rsa"}
    ),
    "life as a text": token(exp="tomorrow"),
    "life as a list": token(exp=[1]),
    "no life": token(exp=None),
    "no birth": token(iat=None),
    "birth in the future": token(iat=int(time.time()) + 3600),
    "not yet": token(nbf=int(time.time()) + 3600),
    "another audience": token(aud="other"),
    "no audience": token(aud=None),
    "an audience that contains ours": token(aud=f"{AUDIENCE}2"),
    "an audience of letters": token(aud=list(AUDIENCE)),
    "an audience that is an object": token(aud={AUDIENCE: 1}),
    "another issuer": token(iss="https://id.example.org"),
    "no issuer": token(iss=None),
    "issuers": token(iss=[ISSUER]),
    "nobody": token(sub=None),
    "an empty name": token(sub=""),
    "a name that is a number": token(sub=7),
    "a name with a line break": token(sub="a\r\nX-Evil: 1"),
    "a name with an escape": token(sub="a\x1b[2J"),
    "a name that looks like another": token(sub="\u0430lice"),
    "a name with a space": token(sub="alice (admin)"),
    "a long name": token(sub="a" * 201),
    "a notice of signing out": token(events={"urn:signed-out": {}}),
    "another kind of token": token(header={"typ": "logout+jwt"}),
    "a kind that is no text": token(header={"typ": ["JWT"]}),
}  # fmt: skip


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED.keys())
def test_a_forgery_lets_nobody_in(ask: Any, text: str) -> None:
    answer = ask(text)
    assert answer.status_code == 401, answer.text
    assert answer.json()["code"] in ("invalid_token", "malformed_credentials")
    assert len(text) < 20 or text not in answer.text
    assert ask(GOOD).status_code == 200


@pytest.fixture
def fresh(settings: Settings, provider: Provider, client_of: Any) -> Iterator[Any]:
    """Ask a service that has read no keys yet."""
    with client_of(replace(settings, provider=provider, loopback=False)) as client:
        yield lambda text: client.get(LIST, headers={"authorization": f"Bearer {text}"})


def test_a_key_that_is_too_short_is_no_key(fresh: Any, server: ProviderServer) -> None:
    server.body = document(jwk(SHORT_RSA, "short", "RS256"), *GOOD_KEYS)
    with pytest.warns(jwt.warnings.InsecureKeyLengthWarning):
        weak = token(SHORT_RSA, kid="short")
    assert fresh(weak).json()["code"] == "invalid_token"
    assert fresh(GOOD).status_code == 200


def test_a_symmetric_key_in_the_document_is_no_key(fresh: Any, server: ProviderServer) -> None:
    secret = b"a secret that the provider published by mistake"
    record = {"kty": "oct", "kid": "oct", "alg": "HS256", "k": part(secret)}
    server.body = document(record, *GOOD_KEYS)
    assert fresh(hmac_with(secret, kid="oct")).json()["code"] == "invalid_token"
    assert fresh(GOOD).status_code == 200


def test_a_token_lives_as_long_as_it_says_and_a_minute(ask: Any) -> None:
    now = int(time.time())
    assert ask(token(exp=now - LEEWAY_SECONDS + 20)).status_code == 200
    expired = ask(token(exp=now - LEEWAY_SECONDS - 1))
    assert (expired.status_code, expired.json()["code"]) == (401, "expired_token")
    assert ask(token(nbf=now + LEEWAY_SECONDS - 20)).status_code == 200
    assert ask(token(header={"typ": "at+jwt"})).status_code == 200


def test_huge_tokens_are_refused_by_size_before_anything_is_computed(
    ask: Any, server: ProviderServer
) -> None:
    before = len(server.asked)
    for text in (token(pad="x" * 20_000), "a" * 60_000, "." * 30_000):
        answer = ask(text)
        assert (answer.status_code, answer.json()["code"]) == (401, "malformed_credentials")
    assert len(server.asked) == before


def test_where_the_provider_is_down_the_answer_is_503_and_never_a_way_in(
    settings: Settings, provider: Provider, client_of: Any, token_for: Any
) -> None:
    own = token_for(settings, "submit")
    down = replace(provider, jwks_url="http://127.0.0.1:1/jwks")
    with client_of(replace(settings, provider=down, loopback=True)) as client:
        for text in (token(), token(STRANGER), FORGED["another audience"]):
            answer = client.get(LIST, headers={"authorization": f"Bearer {text}"})
            assert answer.status_code == 503
            assert answer.json()["code"] == "identity_provider_unavailable"
            assert int(answer.headers["retry-after"]) > 0
        assert client.get(LIST, headers=own).status_code == 200  # needs no provider
        assert client.get(LIST).status_code == 401


def test_a_flood_of_strange_kids_is_one_more_reading(fresh: Any, server: ProviderServer) -> None:
    assert fresh(token()).status_code == 200
    before = len(server.asked)
    for number in range(50):
        assert fresh(token(STRANGER, kid=f"kid-{number}")).status_code == 401
    assert len(server.asked) - before <= 1


def test_each_holder_is_counted_apart(
    settings: Settings, provider: Provider, client_of: Any
) -> None:
    result = replace(settings, provider=provider, loopback=False, rate_limit=2)
    with client_of(result) as client:
        for name in ("alice", "bob"):
            headers = {"authorization": f"Bearer {token(sub=name)}"}
            statuses = [client.get(LIST, headers=headers).status_code for _ in range(3)]
            assert statuses == [200, 200, 429]
