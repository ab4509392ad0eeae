"""The story of a refusal: found, understood, and the claim behind it traced to its mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.soak

Plan = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def officer(site: Any, document: Plan) -> str:
    """A token, and certificates of several verdicts; what is claimed is K blocks for one."""
    sender = site.token("ml-team", "submit")
    three = [{"name": "all", "count": 4, "clip_norm": 1, "noise_multiplier": 20}]
    for plan in (
        document(name="usable", notes="<script>alert(1)</script>\u202etxt"),
        document(name="claimed", releases=three, target={"delta": 1e-5}, claim={"epsilon": 0.5613}),
        document(
            name="fixed-size",
            adjacency="add_remove",
            sampling={"scheme": "fixed_size", "lot_size": 100},
        ),
    ):
        site.ask("POST", "/v1/certificates", sender, json=plan)
    result: str = site.token("officer", "submit", "approve", "audit")
    return result


def test_a_refusal_is_found_and_explained(visitor: Any, officer: str) -> None:
    page = visitor.page
    visitor.sign_in(officer, "/certificates")
    visitor.look("certificates")
    page.click(".facets a:has-text('refused')")
    page.locator("caption:has-text('1 certificate')").wait_for()
    page.click("tbody th a")
    visitor.sees("No guarantee can be certified")
    visitor.sees("fixed_size_needs_replace_one")
    visitor.sees("What to do:")
    visitor.look("refused")


def test_a_wrong_claim_is_diagnosed(visitor: Any, officer: str) -> None:
    page = visitor.page
    visitor.sign_in(officer)
    page.fill("#everything", "claimed")
    page.press("#everything", "Enter")
    visitor.sees("ε = 0.5613 is claimed")
    assert page.input_value("#claimed") == "0.5613"
    if visitor.kind.scripts:
        page.locator("#claimed").scroll_into_view_if_needed()
    else:
        page.click("button:text-is('Diagnose')")
    page.get_by_text("Mistake").first.wait_for()
    visitor.sees("single block")
    visitor.look("diagnosed")
    page.fill("#claimed", "much")
    if not visitor.kind.scripts:
        page.click("button:text-is('Diagnose')")
    page.locator("#wrong").wait_for()
    visitor.look("diagnosis-wrong")


def test_a_certificate_shows_curves_and_downloads(visitor: Any, officer: str) -> None:
    page = visitor.page
    visitor.sign_in(officer, "/certificates")
    page.click("tbody a:text-is('usable')")
    drawn = page.locator("figure svg, figure img")
    expect(drawn).to_have_count(3)
    assert "13" in page.locator("[aria-label='Verification steps'] tbody tr").last.inner_text()
    visitor.look("certificate")
    with page.expect_download() as waiting:
        page.click(".actions >> text=technical documentation")
    with open(waiting.value.path(), "rb") as file:
        assert file.read().startswith(b"# Technical documentation")
