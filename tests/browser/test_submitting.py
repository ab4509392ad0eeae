"""The story of a plan: typed in, mended, worked out, certified, and compared with another."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.polling import wait_until

FIELDS = {
    "dataset.size": "60000",
    "dataset.name": "fashion",
    "steps": "30",
    "target.epsilon": "2",
    "target.delta": "1e-6",
}


SCRIPT = """
from opacus import PrivacyEngine
loader = DataLoader(data, batch_size=512)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.1, max_grad_norm=1.0
)
for epoch in range(10):
    for batch in loader:
        optimizer.step()
"""


def _fill(page: Any, fields: dict[str, str]) -> None:
    # One Gaussian: accounted in milliseconds.
    page.select_option("[name='sampling.scheme']", "full_batch")
    for name, text in fields.items():
        page.fill(f"[name='{name}']", text)


def _changing_it_takes_the_answer_away(page: Any) -> None:
    """An answer is that of the plan beside it, however long the next one takes."""
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route) if "do=check" in (route.request.post_data or "") else route.continue_()

    page.route("**/plans/new", hold)
    page.select_option("[name='sampling.scheme']", "fixed_size")
    page.locator("#answer").get_by_text("The preview appears once the plan is complete").wait_for()
    page.fill("[name='sampling.lot_size']", "60")
    page.locator("#answer").get_by_text("Computing").wait_for()
    assert "certified" not in page.inner_text("#answer")
    wait_until(lambda: page.wait_for_timeout(50) or held)
    # One that comes late, for a plan that is no longer there, finds no place either.
    page.fill("[name='sampling.lot_size']", "")
    page.select_option("[name='sampling.scheme']", "full_batch")
    page.locator("#findings").get_by_text("valid plan").wait_for()
    for item in held:
        item.continue_()
    page.unroute("**/plans/new")
    page.locator("#answer .big").first.wait_for()
    assert "Would be certified: ε ≤ 2 " in page.inner_text("#answer")


def _certify(site: Any, token: str, **changes: Any) -> str:
    plan = {
        "version": 1,
        "name": "small",
        "dataset": {"name": "fashion", "size": 60000},
        "adjacency": "add_remove",
        "sampling": {"scheme": "full_batch"},
        "steps": 100,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
        "target": {"epsilon": 8, "delta": 1e-6},
    }
    result = site.ask("POST", "/v1/certificates", token, json={**plan, **changes}).json()
    return str(result["certificate"]["id"])


def test_a_plan_is_entered_corrected_previewed_and_submitted(visitor: Any, site: Any) -> None:
    page = visitor.page
    visitor.sign_in(site.token("dana", "submit"), "/plans/new")
    _fill(page, {**FIELDS, "dataset.size": "sixty", "name": "fashion-8"})
    wrong = page.locator("#f-dataset-size-wrong")
    if not visitor.kind.scripts:
        page.click("button:text-is('Preview')")
    wrong.get_by_text("not 'sixty'").wait_for()
    visitor.sees("incomplete")
    visitor.look("new-plan-wrong")
    page.fill("[name='dataset.size']", "60000")
    if not visitor.kind.scripts:
        page.click("button:text-is('Preview')")
    # With scripts nothing is clicked: the answer comes as one types.
    page.locator("#answer .big").first.wait_for()
    page.locator("#answer svg").first.wait_for()
    stated = page.inner_text("#answer")
    assert "Would be certified: ε ≤ 2 " in stated
    assert "at δ = 1e-6 (add/remove, per example)" in stated
    assert "joint noise multiplier σ" in stated
    assert wrong.inner_text() == ""
    visitor.look("new-plan")
    if visitor.kind.scripts:
        page.locator("#answer .chart").first.scroll_into_view_if_needed()
        page.locator("#answer .chart.live").first.wait_for()
        page.locator("#noise-at").press("Home")
        assert "ε ≤" in page.inner_text("#noise output")
        _changing_it_takes_the_answer_away(page)
    else:
        # A quarter of the noise and less: four times the ε and more.
        assert float(page.inner_text("table.noise tr:nth-child(1) td >> nth=0")) > 4
    assert "/v1/certificates" in page.input_value("#findings .copyable input")
    page.click("button:text-is('Certify')")
    page.wait_for_url("**/certificates/sha256:*")


def test_a_plan_continues_as_yaml(visitor: Any, site: Any) -> None:
    page = visitor.page
    visitor.sign_in(site.token("dana", "submit"), "/plans/new")
    _fill(page, FIELDS)
    page.click("button[value=yaml]")
    text = page.input_value("#yaml")
    assert "steps: 30" in text
    page.fill("#yaml", text.replace("steps: 30", "stepz: 30"))
    if not visitor.kind.scripts:
        page.click("button:text-is('Preview')")
    page.get_by_text("Did you mean steps?").wait_for()
    visitor.look("new-plan-yaml")


def test_a_pasted_script_fills_the_plan_in(visitor: Any, site: Any) -> None:
    page = visitor.page
    visitor.sign_in(site.token("dana", "submit"), "/plans/new")
    page.click("text=Paste a script or document")
    page.fill("#document", SCRIPT)
    page.click("button[value=read]")
    page.get_by_text("adjacency is missing").wait_for()
    visitor.look("new-plan-pasted")
    page.select_option("[name=adjacency]", "add_remove")
    page.select_option("[name='sampling.scheme']", "poisson")
    for name, text in (
        ("dataset.size", "51200"),
        ("target.epsilon", "3"),
        ("target.delta", "1e-6"),
    ):
        page.fill(f"[name='{name}']", text)
    page.click("button[value=read]")
    page.get_by_text("nothing was run").wait_for()
    assert page.input_value("[name='sampling.lot_size']") == "512"
    assert page.input_value("[name='releases.0.noise_multiplier']") == "1.1"


def test_two_plans_are_compared(visitor: Any, site: Any) -> None:
    token = site.token("dana", "submit", "audit")
    first, longer = _certify(site, token), _certify(site, token, steps=200, name="longer")
    other = _certify(site, token, adjacency="zero_out", name="zeroed")
    visitor.sign_in(token)
    if visitor.kind.scripts:
        visitor.page.wait_for_load_state()
        visitor.page.keyboard.press("/")
        visitor.page.keyboard.type(longer)
        visitor.page.keyboard.press("Enter")
    else:
        visitor.page.fill("#everything", longer)
        visitor.page.press("#everything", "Enter")
    visitor.page.wait_for_url(f"**/certificates/{longer}")
    visitor.page.click("text=Compare with small")
    visitor.sees("longer")
    visitor.sees("guarantee is stronger")
    visitor.sees("Sum:")
    visitor.look("compare")
    visitor.goto(f"/compare?id={first}&id={other}")
    visitor.sees("not ranked")
    visitor.sees("Set the same adjacency in both plans.")
    visitor.look("compare-not-ranked")


@pytest.mark.ordinary("scripts-light-*")
def test_several_plans_are_compared(visitor: Any, site: Any) -> None:
    token = site.token("dana", "submit", "audit")
    several = [_certify(site, token, steps=steps, name=f"of-{steps}") for steps in (110, 120, 130)]
    visitor.sign_in(token, "/certificates")
    for certificate in several:
        visitor.page.check(f"input[value='{certificate}']")
    visitor.page.click("form[action='/compare'] button")
    expect(visitor.page.locator("[aria-label=Guarantees] tbody tr")).to_have_count(3)


@pytest.mark.soak
def test_empty_pages_say_what_to_do(visitor: Any, site: Any) -> None:
    visitor.sign_in(site.token("ada", "submit", "approve", "audit", "admin"), "/datasets")
    visitor.sees("No budgets yet")
    visitor.look("empty-datasets")
    for path, says in (("/runs", "No runs yet"), ("/waivers", "No waivers yet")):
        visitor.goto(path)
        visitor.sees(says)
    visitor.look("empty-waivers")
