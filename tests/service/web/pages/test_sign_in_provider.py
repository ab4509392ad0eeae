"""Signing in with an OpenID provider: a real token endpoint that insists on PKCE, and forgeries."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from affidavit.service.core.errors import SettingsError
from affidavit.service.identity.provider import Provider, SignInClient, read_provider
from affidavit.service.identity.scopes import Scope
from affidavit.service.settings import Settings
from tests.service.identity.provider_server import (
    GOOD_KEYS,
    ISSUER,
    STRANGER,
    Quiet,
    answering_by,
    document,
    token,
)

PUBLIC = "https://dp.example.com"
CLIENT = "affidavit pages"
SECRET = "s3cret:with/odd&signs"


@dataclass
class TokenEndpoint:
    """What a code is worth: a challenge, and the token that is given for its verifier."""

    url: str = ""
    challenges: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    asked: list[tuple[dict[str, list[str]], str | None]] = field(default_factory=list)

    def answer(self, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        verifier = form.get("code_verifier", [""])[0]
        digest = hashlib.sha256(verifier.encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if self.challenges.get(form["code"][0]) != challenge:
            return 400, {"error": "invalid_grant"}
        return self.status, {"id_token": token(**self.changes), "access_token": "opaque"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[TokenEndpoint]:
    with _endpoint() as result:
        yield result


@contextmanager
def _endpoint() -> Iterator[TokenEndpoint]:
    state = TokenEndpoint()

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
            state.asked.append((form, self.headers.get("authorization")))
            status, said = state.answer(form)
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with answering_by(Handler) as address:
        state.url = f"{address}/token"
        yield state


@pytest.fixture
def browser(
    request: pytest.FixtureRequest,
    settings: Settings,
    tmp_path: Path,
    endpoint: TokenEndpoint,
    client_of: Callable[..., Any],
) -> Iterator[Any]:
    """A browser before a service whose provider people sign in with."""
    if hasattr(request, "param"):
        url = request.getfixturevalue(f"{request.param}_url")
        settings = replace(settings, database_url=url)
    (tmp_path / "jwks.json").write_bytes(document(*GOOD_KEYS))
    endpoint.challenges, endpoint.asked, endpoint.status = {}, [], 200
    provider = Provider(
        issuer=ISSUER,
        audience="affidavit",
        jwks_url=None,
        jwks_file=tmp_path / "jwks.json",
        claim=("groups",),
        scopes={
            "ml-team": frozenset({Scope.SUBMIT}),
            "vision": frozenset({Scope.SUBMIT, Scope.APPROVE}),
            "language": frozenset({Scope.SUBMIT}),
            "privacy": frozenset({Scope.AUDIT}),
        },
        teams={"vision": "vision", "language": "language"},
        client=SignInClient(
            client_id=CLIENT,
            client_secret=SECRET,
            authorization_url="https://id.example.org/authorize?tenant=1",
            token_url=endpoint.url,
        ),
    )
    changed = replace(settings, provider=provider, public_url=PUBLIC, loopback=False)
    with client_of(changed) as client:
        client.base_url = PUBLIC
        client.follow_redirects = False
        yield client


def leave(browser: Any, endpoint: TokenEndpoint, to: str = "/keys") -> dict[str, str]:
    """Go to the provider; what it is told, and a code that it gives for that."""
    gone = browser.get("/sign-in/provider", params={"next": to})
    assert gone.status_code == 303
    where = urlsplit(gone.headers["location"])
    requested = {name: values[0] for name, values in parse_qs(where.query).items()}
    assert requested["code_challenge_method"] == "S256"
    endpoint.challenges["good"] = requested["code_challenge"]
    endpoint.changes = {"aud": CLIENT, "nonce": requested["nonce"]}
    return requested


def arrive(browser: Any, asked: dict[str, str], **changes: str) -> Any:
    """Come back from the provider."""
    provided = {"code": "good", "state": asked["state"], "iss": ISSUER} | changes
    return browser.get("/sign-in/callback", params=provided)


def test_the_provider_signs_in_the_subject_with_the_scopes_of_its_groups(
    browser: Any, endpoint: TokenEndpoint
) -> None:
    assert "Sign in with your organisation" in browser.get("/sign-in").text
    requested = leave(browser, endpoint, "/keys?x=1")
    assert requested["tenant"] == "1"
    assert requested["redirect_uri"] == f"{PUBLIC}/sign-in/callback"
    done = arrive(browser, requested)
    assert (done.status_code, done.headers["location"]) == (303, "/keys?x=1")
    cookie = next(
        item for item in done.headers.get_list("set-cookie") if "affidavit_session=" in item
    )
    assert cookie.startswith("__Host-")
    assert {"Secure", "HttpOnly", "SameSite=lax", "Path=/"} <= set(cookie.split("; "))
    page = browser.get("/keys", headers={"accept": "text/html"})
    assert "oidc:00u1-alice" in page.text
    assert browser.get("/audit", headers={"accept": "text/html"}).status_code == 403
    form, secret = endpoint.asked[-1]
    assert "client_id" not in form
    assert secret is not None
    sent = base64.b64decode(secret.removeprefix("Basic ")).decode()
    assert sent == "affidavit%20pages:s3cret%3Awith%2Fodd%26signs"


def form_token(browser: Any) -> str:
    """That of the forms on a page."""
    page = browser.get("/datasets", headers={"accept": "text/html"}).text
    return str(page.partition('name="csrf" value="')[2].partition('"')[0])


def choose(browser: Any, team: str, csrf: str) -> Any:
    """Act for another team."""
    return browser.post("/team", data={"csrf": csrf, "team": team})


@pytest.mark.parametrize("browser", ["sqlite", "postgresql"], indirect=True)
def test_who_is_in_several_teams_acts_for_one_and_switches(
    browser: Any, endpoint: TokenEndpoint, document: Callable[..., dict[str, Any]]
) -> None:
    requested = leave(browser, endpoint)
    endpoint.changes["groups"] = ["vision", "language", "privacy"]
    done = arrive(browser, requested)
    assert done.status_code == 303, done.text

    def seen() -> str:
        return str(browser.get("/certificates").text)

    def submit(name: str) -> None:
        text = json.dumps(document(name=name))
        form = {"csrf": form_token(browser), "do": "certify", "mode": "yaml", "yaml": text}
        sent = browser.post("/plans/new", data=form)
        assert sent.status_code == 303, sent.text

    # The first by name; the organisation's role waits to be chosen.
    submit("plan-of-language")
    assert browser.get("/audit").status_code == 403
    page = browser.get("/datasets", headers={"accept": "text/html"}).text
    options = [line for line in page.splitlines() if line.startswith("<option")]
    assert [line.partition(">")[2].partition("<")[0] for line in options[:3]] == [
        "language",
        "vision",
        "all teams",
    ]

    cookie, csrf = dict(browser.cookies), form_token(browser)
    assert choose(browser, "vision", csrf).status_code == 303
    assert "plan-of-language" not in seen()
    submit("plan-of-vision")
    assert "plan-of-vision" in seen()
    # A page of the team before sends nothing in the new one's name, and its session has ended.
    assert choose(browser, "language", csrf).status_code == 403
    before = browser.get("/certificates", headers={"cookie": _as_header(cookie)})
    assert before.status_code == 303

    # Who audits sees all and submits nothing; a team that is not theirs is nobody's to choose.
    assert choose(browser, "", form_token(browser)).status_code == 303
    assert browser.get("/audit").status_code == 200
    assert browser.get("/plans/new").status_code == 403
    assert "plan-of-language" in seen()
    assert "plan-of-vision" in seen()
    for stranger in ("other", "default", "vision' OR 1=1"):
        assert choose(browser, stranger, form_token(browser)).status_code == 403
    assert choose(browser, "language", form_token(browser)).status_code == 303
    assert "plan-of-language" in seen()
    assert "plan-of-vision" not in seen()
    assert browser.get("/audit").status_code == 403


def _as_header(cookies: dict[str, str]) -> str:
    return "; ".join(f"{name}={value}" for name, value in cookies.items())


def test_a_callback_is_valid_once_and_in_one_browser(browser: Any, endpoint: TokenEndpoint) -> None:
    requested = leave(browser, endpoint)
    assert arrive(browser, requested).status_code == 303
    again = arrive(browser, requested)
    assert again.status_code == 422
    assert "did not start in this browser" in again.text.lower()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"state": "other"}, "did not start in this browser"),
        ({"iss": "https://evil.example/"}, "another provider"),
        ({"code": ""}, "denied the sign-in"),
        ({"code": "stolen"}, "does not accept the authorization code"),
    ],
)
def test_a_callback_of_another_sign_in_is_refused(
    browser: Any, endpoint: TokenEndpoint, changes: dict[str, str], said: str
) -> None:
    answer = arrive(browser, leave(browser, endpoint), **changes)
    assert answer.status_code == 422
    assert said in answer.text.lower()
    assert "affidavit_session" not in answer.headers.get("set-cookie", "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nonce": "other"}, "another sign-in"),
        ({"nonce": None}, "another sign-in"),
        ({"aud": "affidavit"}, "another service"),
        ({"aud": [CLIENT, "x"], "azp": "x"}, "another client"),
        ({"iss": "https://evil.example/"}, "another provider"),
        ({"private": STRANGER}, "not from the provider"),
        ({"exp": 1}, "expired"),
        ({"groups": ["strangers"]}, "none of your groups"),
    ],
    ids=lambda item: "-".join(item) if isinstance(item, dict) else "",
)
def test_an_id_token_for_another_sign_in_is_refused(
    browser: Any, endpoint: TokenEndpoint, changes: dict[str, Any], said: str
) -> None:
    requested = leave(browser, endpoint)
    endpoint.changes |= changes
    answer = arrive(browser, requested)
    assert answer.status_code == 422
    assert said in answer.text.lower()
    assert "affidavit_session" not in answer.headers.get("set-cookie", "")


def test_a_failing_provider_is_reported(browser: Any, endpoint: TokenEndpoint) -> None:
    requested = leave(browser, endpoint)
    endpoint.status = 500
    answer = arrive(browser, requested)
    assert answer.status_code == 503
    assert "does not answer" in answer.text


def test_the_callback_never_redirects_to_another_host(
    browser: Any, endpoint: TokenEndpoint
) -> None:
    for to in ("//evil.example/x", "https://evil.example", "/\\evil.example", "javascript:1"):
        assert arrive(browser, leave(browser, endpoint, to)).headers["location"] == "/"


BASE = {
    "AFFIDAVIT_OIDC_ISSUER": ISSUER,
    "AFFIDAVIT_OIDC_AUDIENCE": "affidavit",
    "AFFIDAVIT_OIDC_JWKS_URL": "https://id.example.org/jwks",
    "AFFIDAVIT_OIDC_SCOPES": '{"ml": ["submit"]}',
    "AFFIDAVIT_OIDC_CLIENT_ID": "pages",
    "AFFIDAVIT_OIDC_AUTHORIZATION_URL": "https://id.example.org/authorize",
    "AFFIDAVIT_OIDC_TOKEN_URL": "https://id.example.org/token",
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"AFFIDAVIT_OIDC_TOKEN_URL": ""}, "TOKEN_URL is not set"),
        ({"AFFIDAVIT_OIDC_TOKEN_URL": "http://id.example.org/token"}, "TOKEN_URL must begin"),
        ({"AFFIDAVIT_OIDC_AUTHORIZATION_URL": "x"}, "AUTHORIZATION_URL must begin"),
        ({"AFFIDAVIT_OIDC_CLIENT_SCOPE": "profile"}, "must include openid"),
        ({"AFFIDAVIT_OIDC_CLIENT_ID": ""}, "CLIENT_ID is not set"),
    ],
    ids=str,
)
def test_an_incomplete_client_configuration_is_refused_at_start(
    change: dict[str, str], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        read_provider(BASE | change)


def test_the_client_needs_a_public_url() -> None:
    with pytest.raises(SettingsError, match="AFFIDAVIT_PUBLIC_URL is not set"):
        Settings.from_environment(BASE | {"AFFIDAVIT_HOME": "/x"})
    provided = BASE | {
        "AFFIDAVIT_HOME": "/x",
        "AFFIDAVIT_PUBLIC_URL": "https://DP.example.com:443/",
    }
    assert Settings.from_environment(provided).public_url == PUBLIC
    for wrong in ("dp.example.com", "https://dp.example.com/path", "ftp://x", "https://a b"):
        with pytest.raises(SettingsError, match="AFFIDAVIT_PUBLIC_URL is"):
            Settings.from_environment(provided | {"AFFIDAVIT_PUBLIC_URL": wrong})
