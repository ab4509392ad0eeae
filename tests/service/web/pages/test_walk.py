"""Every page that somebody is led to, as each of them, in a company whose people write attacks.

A crawler signs in and follows every link: nobody is shown a way that is closed to them, nor a
form that they may not send, and what was written freely stands on no page but as text.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest

from affidavit.evidence.evidence_file import STORY, read_evidence
from tests.browser.sample_company import PEOPLE, Company, settle
from tests.browser.serving import Site, settings_in

MARKUP = "<img src=x onerror=alert(1)>"
ATTACK = f"=cmd|' /C calc'!A0 {MARKUP} \"'><script>alert(2)</script> {{{{7*7}}}} a\u202eb\u200bc "
NOT_FOLLOWED = re.compile(r"/sign-|/v1/|/static/|\.yaml$|\.svg$|/bundle\.json$")
ENDS = re.compile(r"/sign-out$|^/tokens/.*/revocation$")
"""Forms that would end somebody's session, empty as they are sent here."""


class Reader(HTMLParser):
    """The links and forms of a page, and what a strict policy would not run."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.forms: list[dict[str, Any]] = []
        self.forbidden: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        provided = dict(attrs)
        self.forbidden += [f"{tag} {name}" for name in provided if name.startswith("on")]
        if "style" in provided or tag in ("style", "iframe", "object", "embed", "base"):
            self.forbidden.append(tag)
        if tag == "script" and not (provided.get("src") or "").startswith("/static/"):
            self.forbidden.append("script")
        if tag == "a" and provided.get("href"):
            self.links.append(str(provided["href"]))
        if tag == "form":
            self.forms.append({"method": provided.get("method"), "action": provided.get("action")})
        if tag == "input" and provided.get("name") == "csrf":
            self.forms[-1]["csrf"] = provided["value"]
        if tag == "h1":
            self.titles.append(tag)


@lru_cache(maxsize=1)  # the walk reads a page, and so does who walks
def read(html: str) -> Reader:
    result = Reader()
    result.feed(html)
    return result


@pytest.fixture(scope="module")
def company(
    migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory, client_of: Callable[..., Any]
) -> Iterator[Company]:
    """A company on SQLite without a port, whose people write attacks wherever they can."""
    settings = settings_in(tmp_path_factory.mktemp("walk"), migrated_sqlite, loopback=False)
    with client_of(settings) as client:
        yield settle(Site("http://127.0.0.1", settings, client), lambda text: (ATTACK + text)[:250])


def sign_in(company: Company, token: str) -> Any:
    client = company.site.client
    client.cookies.clear()
    requested = client.get("/sign-in", headers={"accept": "text/html"})
    sent = {"csrf": read(requested.text).forms[0]["csrf"], "token": token, "next": "/"}
    assert client.post("/sign-in", data=sent).status_code == 200
    return client


def walk(client: Any, of_a_kind: int) -> Iterator[tuple[str, Any]]:
    """Every page that is linked from the overview, so many of each pattern."""
    waiting, seen, kinds = ["/"], {"/"}, Counter[str]()
    while waiting:
        path = waiting.pop(0)
        page = client.get(path, headers={"accept": "text/html"}, follow_redirects=False)
        yield path, page
        if "text/html" not in page.headers["content-type"]:
            continue
        for link in read(page.text).links:
            parts = urlsplit(urljoin(path, link))
            assert not parts.netloc, f"{path} leads to another host: {link}"
            to = parts.path + (f"?{parts.query}" if parts.query else "")
            pattern = re.sub(r"[0-9a-f-]{36}|sha256:[0-9a-f]+|/\d+|=[^&]*", "*", to)
            if to in seen or NOT_FOLLOWED.search(parts.path) or kinds[pattern] >= of_a_kind:
                continue
            seen.add(to)
            kinds[pattern] += 1
            waiting.append(to)


@pytest.mark.ordinary("submit-*")
@pytest.mark.parametrize("of_a_kind", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("scope", sorted(PEOPLE))
def test_no_page_links_to_a_forbidden_page(company: Company, scope: str, of_a_kind: int) -> None:
    client = sign_in(company, company.tokens[scope])
    forms: dict[str, tuple[str, str]] = {}
    pages = 0
    for path, page in walk(client, of_a_kind):
        assert page.status_code == 200, (path, page.text[:500])
        pages += 1
        if "text/html" not in page.headers["content-type"]:
            continue
        result = read(page.text)
        assert len(result.titles) == 1, path
        for form in result.forms:
            if form["method"] == "post" and not ENDS.search(form["action"]):
                assert "csrf" in form, (path, form)
                forms[form["action"]] = (path, form["csrf"])
    assert pages > 10
    for to, (path, token) in forms.items():
        sent = client.post(to, data={"csrf": token}, headers={"accept": "text/html"})
        assert sent.status_code in (200, 201, 409, 422), (path, to, sent.status_code)


def test_user_text_is_never_markup_or_a_formula(company: Company) -> None:
    client = sign_in(company, company.site.token("ines", *PEOPLE))
    told = 0
    for path, page in walk(client, 2):
        body = page.text
        if path.endswith("/evidence.zip"):  # its other files are data, to be read by programs
            body = read_evidence(page.content)[STORY].decode()
        assert "\u202e" not in body, path
        assert "\u200b" not in body, path
        if path.split("?")[0].endswith(".csv"):
            cells = [cell for line in csv.reader(io.StringIO(body)) for cell in line if cell]
            wrong = [item for item in cells if item[0] in "=+@\t\r" or item.startswith("-c")]
            assert not wrong, path
            told += any(MARKUP in cell for cell in cells)
            continue
        assert MARKUP not in body, path
        assert "49" not in re.findall(r"A0.{0,120}", body), path
        own_style = ["style"] if path.endswith("/evidence.zip") else []
        assert read(body).forbidden == own_style, path
        told += "&lt;img src=x" in body
    assert told > 12, "the attacks are on too few pages for this to say anything"


def test_every_response_has_security_headers(company: Company) -> None:
    client = sign_in(company, company.tokens["audit"])
    for path, status in (
        ("/", 200),
        ("/audit.csv", 200),
        ("/tokens", 403),
        ("/nowhere", 404),
        ("/runs?state=odd", 422),
        ("/static/none.js", 404),
    ):
        page = client.get(path, headers={"accept": "text/html"})
        assert page.status_code == status, path
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        for part in ("frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'"):
            assert part in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "same-origin"
        if status == 200:
            assert page.headers["cache-control"] == "no-store"
        elif path.startswith("/static/"):
            assert "immutable" not in page.headers.get("cache-control", "")


def test_errors_are_pages_with_advice(company: Company) -> None:
    client = sign_in(company, company.tokens["submit"])
    for path, stated in (
        ("/tokens", "needs the scope admin"),
        ("/runs/00000000-0000-4000-8000-000000000000", "run"),
        ("/datasets/..%2Fx", "name"),
        ("/approvals?cursor=forged", "cursor"),
        (f"/compare?id={MARKUP}", "id"),
    ):
        page = client.get(path, headers={"accept": "text/html"})
        assert page.status_code in (403, 404, 422), path
        result = read(page.text)
        assert "text/html" in page.headers["content-type"], path
        assert not result.forbidden
        assert stated in page.text.lower() or stated in page.text, (path, page.text)
        assert "/" in result.links, path
        assert MARKUP not in page.text


def test_invalid_text_is_refused_and_not_stored(company: Company) -> None:
    admin = sign_in(company, company.site.token("vera", "admin", "approve", "submit"))
    page = admin.get("/datasets", headers={"accept": "text/html"})
    token = read(page.text).forms[-1]["csrf"]
    budget = {"unit": "example", "adjacency": "add_remove", "epsilon": "1", "delta": "1e-5"}
    base = {"csrf": token, "dataset": "odd", **budget}
    for name in ("a\x00b", "x" * 10_000, "a\u202eb", "=cmd", "<b>"):
        sent = admin.post("/datasets", data={**base, "dataset": name})
        assert sent.status_code == 422, repr(name[:9])
        assert "\u202e" not in sent.text
        assert "<b>" not in sent.text.split("<main")[1].replace("<b></b>", "")
    for reason in ("a\x00b", "x" * 10_000):
        assert admin.post("/datasets", data={**base, "reason": reason}).status_code == 422
    # Percent-encoded bytes that are no UTF-8, and a lone surrogate written as one.
    headers = {"content-type": "application/x-www-form-urlencoded", "accept": "text/html"}
    for raw in (b"dataset=%FF", b"dataset=%ED%A0%80", b"dataset=\xff", b"a=1&" * 300):
        sent = admin.post(
            "/datasets", content=b"csrf=" + token.encode() + b"&" + raw, headers=headers
        )
        assert sent.status_code == 400, raw[:20]
        assert "malformed_form" in sent.text
    assert "/datasets/odd" not in admin.get("/datasets").text
