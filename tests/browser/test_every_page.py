"""Every page of a company that has everything, with every browser; and one by keyboard alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.company import PEOPLE, Company, settle
from tests.browser.serving import Site, served, settings_in


@pytest.fixture(scope="module")
def company(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    """One company for all of these tests."""
    with served(settings_in(tmp_path_factory.mktemp("company"), migrated)) as site:
        yield settle(site)


@pytest.fixture(scope="module")
def site(company: Company) -> Site:
    """Its site."""
    return company.site


def pages_of(company: Company) -> dict[str, str]:
    """A name for each page, and where it is; pages that other stories look at are left out."""
    certificates, runs = company.certificates, company.runs
    clicks, zeroed = certificates["clicks"], certificates["zeroed"]
    return {
        "overview": "/",
        "compare-unranked": f"/compare?first={clicks}&second={zeroed}",
        "datasets": "/datasets",
        "dataset-not-bounded": f"/datasets/digits?certificate={certificates['digits']}",
        "dataset-empty": "/datasets/panel",
        "run-new": f"/runs/new?certificate={certificates['digits']}",
        "run-not-conformant": f"/runs/{runs['not-conformant']}",
        "run-cancelled": f"/runs/{runs['cancelled']}",
        "approvals": "/approvals",
        "approval-rejected": f"/approvals/{certificates['rejected']}",
        "policies": "/policies",
        "policy": "/policies/clinical/2",
        "waivers": "/waivers",
        "audit": "/audit?start=0&end=20",
    }


@pytest.fixture(scope="module")
def everything(company: Company) -> str:
    """The token of somebody who may do all of it."""
    return company.site.token("ines", *PEOPLE)


def test_every_page_renders_in_every_browser(
    visitor: Any, company: Company, everything: str
) -> None:
    visitor.sign_in(everything)
    for name, path in pages_of(company).items():
        visitor.goto(path)
        assert visitor.page.locator("h1").count() == 1, name
        visitor.look(name)


def test_long_names_do_not_overflow(visitor: Any, company: Company, everything: str) -> None:
    name, dataset = "n" * 64, "d" * 64
    created = company.certify("long", name=name, dataset={"name": dataset, "size": 48_211})
    budget = {"adjacency": "add_remove", "epsilon": 10, "delta": 1e-5}
    company.ask("admin", f"/v1/ledgers/{dataset}/budget", budget)
    visitor.sign_in(everything)
    for kind, path in (
        ("certificate", f"/certificates/{created['id']}"),
        ("approval", f"/approvals/{created['id']}"),
        ("dataset", f"/datasets/{dataset}"),
    ):
        visitor.goto(path)
        visitor.look(f"{kind}-of-a-long-name")


def test_pages_work_with_the_keyboard_alone(
    visitor_of: Callable[..., Any], company: Company, everything: str
) -> None:
    """Skip to the content, filter, and follow a link; what has the focus shows it."""
    visitor = visitor_of(company.site)
    visitor.sign_in(everything, "/runs")
    page = visitor.page
    press = page.keyboard.press
    page.goto(page.url)
    press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    box = page.locator(".skip").bounding_box()
    assert box["x"] >= 0
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for _ in range(12):
        press("Tab")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) != "none"
        if page.evaluate("document.activeElement.id") == "queue-name":
            break
    page.keyboard.type("nightly")
    press("Enter")
    page.wait_for_url("**/runs?*queue=nightly*")
    assert page.locator("tbody tr").count() == 1
    page.locator("tbody th a").focus()
    press("Enter")
    page.wait_for_url(f"**/runs/{company.runs['other-queue']}")


def test_printed_pages_have_whole_tables_and_no_navigation(
    visitor_of: Callable[..., Any], company: Company, everything: str
) -> None:
    visitor = visitor_of(company.site)
    visitor.sign_in(everything, "/runs")
    visitor.page.emulate_media(media="print")
    for gone in (".places", ".top", "main form"):
        assert not visitor.page.locator(gone).first.is_visible()
    visitor.page.locator("tbody tr").last.wait_for(state="visible")  # it reloads itself
    scrolls = "getComputedStyle(document.querySelector('.scroll')).overflowX"
    assert visitor.page.evaluate(scrolls) == "visible"


def test_the_api_is_documented_without_another_host(
    visitor_of: Callable[..., Any], company: Company
) -> None:
    visitor = visitor_of(company.site)
    visitor.goto("/docs")
    visitor.page.wait_for_selector("#operations-certificates-list_certificates")
    visitor.page.click("#operations-certificates-list_certificates button")
    visitor.page.wait_for_selector(".model-example")
