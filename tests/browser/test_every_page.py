"""Every page of a company that has everything, with every browser; and one by keyboard alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
from playwright.sync_api import expect

from affidavit.service.web.pages.runs import EVENTS
from affidavit.service.web.pages.text import words
from tests.browser.conftest import Kind
from tests.browser.sample_company import PEOPLE, Company
from tests.browser.serving import Site
from tests.service.web.pages.test_words import api, glossary
from tests.support.page_views import page_views

SIZES = {"desk": (Kind(True, "light", 1360), 900), "phone": (Kind(True, "light", 390), 844)}
SCREENS = {"desk": 1, "phone": 2}
PAPER_WIDTH = 718
"""Pixels of A4 between margins of a centimetre."""
ANSWERS = {
    "plan": ("main .verdict", ".figure-row", "dt:text-is('In force')", "dt:text-is('Data set')"),
    "wrong plan": ("main .verdict", "text=What to do:", "strong:has-text('the target needs')"),
    "draft": ("#answer .verdict", "#answer .big", "button:text-is('Certify')"),
    "data set": ("main .verdict", ".amounts", "#entries", "[aria-label=Reservations] tbody tr"),
    "run": ("main .verdict", ".figure-row", "#happened", ".story li >> nth=-1", "#conformance"),
    "failed run": ("main .verdict", ".figure-row", "#happened", "#conformance"),
    "today": ("main .verdict", ".card >> nth=0", ".card >> nth=1"),
}
"""What answers each question, on the page that it is asked on."""


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
        "compare-unranked": f"/compare?id={clicks}&id={zeroed}",
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


@pytest.mark.ordinary("scripts-light-*")  # test_walk.py reads what the others render
def test_every_page_renders_in_every_browser(
    visitor: Any, company: Company, everything: str
) -> None:
    visitor.sign_in(everything)
    for name, path in pages_of(company).items():
        visitor.goto(path)
        assert visitor.page.locator("h1").count() == 1, name
        assert not unknown_marks(visitor, path), name
        visitor.look(name)


def unknown_marks(visitor: Any, path: str) -> set[str]:
    """Marks of the page that are no word of the API, of the glossary or a code in its data."""
    with page_views() as views:
        visitor.page.request.get(visitor.url + path)
    codes = re.findall(r'"code": "(\w+)"', json.dumps(views))
    known = glossary() | {words(code) for code in (*api(), *EVENTS, *codes)}
    shown = visitor.page.locator(".badge").all_inner_texts()
    # The sign before a mark, a number in it, and the plan that a comparison names.
    marks = {
        re.sub(r"^\d+\+? (% )?|^\S+ (?=is stronger)", "", text.split("\n")[-1].strip(" ✓✕!·"))
        for text in shown
    }
    return {mark for mark in marks if mark.lower() not in known}


@pytest.mark.ordinary("scripts-light-*")  # the others measure nothing
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
    expect(page.locator("tbody tr")).to_have_count(1)
    page.locator("tbody th a").press("Enter")
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


def test_a_printed_certificate_is_complete_and_fits_on_the_paper(
    visitor_of: Callable[..., Any], company: Company, everything: str
) -> None:
    """Every panel, the closed details too, in black on white, and no controls."""
    visitor = visitor_of(company.site, Kind(True, "dark", PAPER_WIDTH))
    visitor.sign_in(everything)
    path = f"/certificates/{company.certificates['digits']}"
    visitor.goto(path)
    page = visitor.page
    expect(page.locator("figure svg")).to_have_count(3)
    page.emulate_media(media="print")
    for gone in (".places", ".top", ".actions", ".tabs", "main form"):
        assert not page.locator(gone).first.is_visible(), gone
    printed = "main :is(h2, table, dd, pre, figure svg):not(.screen *, .tools *)"
    for shown in page.locator(printed).all():
        assert shown.is_visible(), shown.inner_text()
        assert shown.bounding_box()["width"] > 1
    expect(page.locator(".printed")).to_contain_text(company.site.url + path)
    cut_off = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(cut_off) <= 0
    colour = "getComputedStyle(document.querySelector('main')).{}"
    assert page.evaluate(colour.format("backgroundColor")) == "rgb(255, 255, 255)"
    assert page.evaluate(colour.format("color")) == "rgb(0, 0, 0)"


@pytest.mark.parametrize("size", SIZES)
def test_charts_answer_the_pointer_and_are_downloaded(
    visitor_of: Callable[..., Any], company: Company, everything: str, size: str
) -> None:
    """Values under the pointer, of two curves overlaid, and a file."""
    visitor = visitor_of(company.site, SIZES[size][0])
    clicks, zeroed = company.certificates["clicks"], company.certificates["zeroed"]
    visitor.sign_in(everything)
    visitor.goto(f"/compare?id={clicks}&id={zeroed}")
    visitor.page.locator(".chart").scroll_into_view_if_needed()
    chart = visitor.page.locator(".chart.live")
    chart.locator("svg").hover(position={"x": 120, "y": 90})
    axis, *curves = chart.locator(".readout").inner_text().split("; ")
    assert float(axis.rpartition(": ")[2]) > 0
    assert curves
    assert all(0 < float(value.rpartition(": ")[2]) <= 1 for value in curves)

    with visitor.page.expect_download() as waiting:
        chart.locator("button:text-is('SVG')").click()
    downloaded = ElementTree.parse(waiting.value.path()).getroot()
    assert downloaded.tag == "{http://www.w3.org/2000/svg}svg"
    legend = "".join(downloaded.itertext())
    assert "click-model" in legend
    assert "click-zeroed" in legend


def test_the_api_is_documented_without_another_host(
    visitor_of: Callable[..., Any], company: Company
) -> None:
    visitor = visitor_of(company.site)
    visitor.goto("/docs")
    visitor.page.wait_for_selector("#operations-certificates-list_certificates")
    visitor.page.click("#operations-certificates-list_certificates button")
    visitor.page.wait_for_selector(".model-example")


def questions_of(company: Company) -> dict[str, str]:
    """The pages that answer questions."""
    certificates, runs = company.certificates, company.runs
    return {
        "plan": f"/certificates/{certificates['approved']}",
        "wrong plan": f"/certificates/{certificates['under-noised']}",
        "draft": "/plans/new?example=federated",
        "data set": "/datasets/clicks",
        "run": f"/runs/{runs['settled']}",
        "failed run": f"/runs/{runs['not-conformant']}",
        "today": "/",
    }


@pytest.mark.parametrize("size", ["desk", pytest.param("phone", marks=pytest.mark.soak)])
def test_answers_are_above_the_fold(
    visitor_of: Callable[..., Any], company: Company, everything: str, size: str
) -> None:
    """What a page is opened for is on its first screen, on a phone on its first two."""
    kind, height = SIZES[size]
    visitor = visitor_of(company.site, kind)
    visitor.page.set_viewport_size({"width": kind.width, "height": height})
    visitor.sign_in(everything)
    for name, path in questions_of(company).items():
        visitor.goto(path)
        visitor.page.locator(ANSWERS[name][0]).first.wait_for()
        for answer in ANSWERS[name]:
            box = visitor.page.locator(answer).first.bounding_box()
            assert box is not None, (name, answer)
            assert box["y"] + box["height"] <= height * SCREENS[size], (name, answer, box)
        assert not unknown_marks(visitor, path), name
