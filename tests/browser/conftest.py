"""Headless Chromium in front of a served application.

Every ``Visitor`` is a browser of its own, with or without scripts, light or dark, as wide
as a phone or a desk. Whatever a test does with it, it fails where the console shows an
error, a script throws, a subresource does not load, or anything is asked of another host;
with scripts, ``look`` runs axe over the page. Where ``AFFIDAVIT_SCREENSHOTS`` names a
folder, ``look`` leaves a picture there.

The four browsers of ``browsers`` have every pair of those settings among them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.browser.chromium import program
from tests.browser.sample_company import Company, settle
from tests.browser.serving import Site, served, settings_in
from tests.service.conftest import accounting  # noqa: F401
from tests.support.polling import TIMEOUT_SECONDS

WAIT_MILLISECONDS = 1000 * TIMEOUT_SECONDS
expect.set_options(timeout=WAIT_MILLISECONDS)
HARMLESS = ("Failed to load resource", "htmx:sendAbort", "htmx:afterRequest")


@dataclass(frozen=True)
class Kind:
    """A browser as somebody has set it up."""

    scripts: bool
    scheme: str
    width: int

    def __str__(self) -> str:
        return f"{'scripts' if self.scripts else 'plain'}-{self.scheme}-{self.width}"


KINDS = (
    Kind(True, "light", 1280),
    Kind(True, "dark", 360),
    Kind(False, "light", 360),
    Kind(False, "dark", 1280),
)


@pytest.fixture(
    params=[
        pytest.param(kind, marks=() if kind.scheme == "light" else pytest.mark.soak)
        for kind in KINDS
    ],
    ids=str,
)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each of the four; ``make test`` opens the light ones alone."""
    result: Kind = request.param
    return result


# ---- the service -------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service for a whole module."""
    home = tmp_path_factory.mktemp("site")
    with served(settings_in(home, migrated_sqlite)) as result:
        yield result


@pytest.fixture(scope="session")
def company(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    """A company that has everything; what a test adds to it, it finds again by name."""
    with served(settings_in(tmp_path_factory.mktemp("company"), migrated_sqlite)) as result:
        yield settle(result)


# ---- the browser -------------------------------------------------------------------


@dataclass
class Visitor:
    """A person at a browser."""

    page: Any
    kind: Kind
    url: str
    wrong: list[str] = field(default_factory=list)

    def goto(self, path: str) -> None:
        """Open a page of the service."""
        self.page.goto(self.url + path)

    def sign_in(self, token: str, to: str = "/") -> None:
        """Sign in by a token, and be where one wanted to be."""
        self.goto(f"/sign-in?next={to}")
        self.page.fill("input[name=token]", token)
        self.page.click("main button[type=submit]")
        self.page.wait_for_url(lambda url: urlsplit(url).path == to)

    def text(self) -> str:
        """What the page's main part says."""
        self.page.wait_for_load_state()
        result: str = self.page.inner_text("main")
        return result

    def sees(self, text: str) -> None:
        """Wait until the page's main part says this, which a click may bring later."""
        expect(self.page.locator("main")).to_contain_text(text, use_inner_text=True)

    def look(self, name: str) -> None:
        """Look at the page: nothing sticks out of it, axe finds no fault, and a picture."""
        self.page.wait_for_load_state()
        folder = os.environ.get("AFFIDAVIT_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder) / f"{name}-{self.kind}.png"
            self.page.screenshot(path=str(path), full_page=True)
        if self.kind.scripts:
            wide = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{name} is {wide} pixels wider than the window"
            assert not faults_of(self.page), name


def faults_of(page: Any) -> list[str]:
    """What axe says is serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    result = Axe().run(page).response["violations"]
    return [
        f"{item['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
        for item in result
        if item["impact"] in ("serious", "critical")
        for node in item["nodes"]
    ]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser, for a module alone: while it runs, its event loop is this thread's."""
    browser_program = program()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_program.path,
            env={**os.environ, **browser_program.environment},
            args=["--no-sandbox", "--disable-dev-shm-usage", "--force-color-profile=srgb"],
        )
        yield browser
        browser.close()


@pytest.fixture
def visitor_of(chromium: Any) -> Iterator[Callable[..., Visitor]]:
    """Make visitors of a site; what went wrong for them is found out at the end."""
    created: list[Visitor] = []
    with ExitStack() as contexts:

        def visitor(site: Site, kind: Kind = KINDS[0]) -> Visitor:
            context = chromium.new_context(
                java_script_enabled=kind.scripts,
                color_scheme=kind.scheme,
                viewport={"width": kind.width, "height": 800},
                reduced_motion="reduce",
            )
            contexts.callback(context.close)
            context.set_default_timeout(WAIT_MILLISECONDS)
            result = Visitor(context.new_page(), kind, site.url)
            _watch(result, urlsplit(site.url).netloc)
            created.append(result)
            return result

        yield visitor
    for item in created:
        assert not item.wrong, f"{item.kind}: {item.wrong}"


def _watch(visitor: Visitor, host: str) -> None:
    """Note what no page may do."""
    page, wrong = visitor.page, visitor.wrong

    def on_message(message: Any) -> None:
        # What a page answers to a form may be an error; a file that is missing is found below.
        # So may a request of htmx that leaving the page aborts.
        if message.type in ("error", "warning") and not message.text.startswith(HARMLESS):
            wrong.append(f"console: {message.text}")

    def answered(response: Any) -> None:
        if response.status >= 500 or (response.status >= 400 and not _is_page(response.request)):
            wrong.append(f"{response.status} {response.url}")

    def on_request(request: Any) -> None:
        if urlsplit(request.url).netloc != host:
            wrong.append(f"asked another host: {request.url}")

    page.on("console", on_message)
    page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
    page.on("response", answered)
    page.on("request", on_request)


def _is_page(request: Any) -> bool:
    return request.resource_type in ("document", "xhr", "fetch")


@pytest.fixture(name="served")
def _served() -> Callable[..., Any]:
    return served


@pytest.fixture
def visitor(visitor_of: Callable[..., Visitor], site: Site, kind: Kind) -> Visitor:
    """Somebody with each of the four browsers at the module's site."""
    return visitor_of(site, kind)
