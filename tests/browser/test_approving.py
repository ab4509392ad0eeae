"""The story of an approval: what is new, four eyes, the policy behind it, and what would break."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.soak

POLICY = {
    "schema_version": 1,
    "name": "clinical",
    "version": 1,
    "datasets": ["wards"],
    "epsilon_cap": 8,
    "approvals": 1,
}
PLAN = {
    "version": 1,
    "name": "wards-model",
    "dataset": {"name": "wards", "size": 20000},
    "adjacency": "add_remove",
    "sampling": {"scheme": "full_batch"},
    "steps": 500,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 60}],
    "target": {"epsilon": 8, "delta": 1e-6},
}


def _certified(site: Any, token: str, **changes: Any) -> dict[str, Any]:
    answer = site.ask("POST", "/v1/certificates", token, json={**PLAN, **changes})
    result: dict[str, Any] = answer.json()["certificate"]
    return result


def test_an_approver_reviews_changes_and_decides(visitor: Any, site: Any) -> None:
    page, name = visitor.page, f"wards-{visitor.kind}"
    asks = site.token("dana", "submit")
    approves = site.token("priya", "approve", "audit", "admin", "submit")
    site.ask("POST", "/v1/policies", approves, json=POLICY)
    budget = {"adjacency": "add_remove", "epsilon": 10, "delta": 1e-5}
    site.ask("POST", "/v1/ledgers/wards/budget", approves, json=budget)
    before = _certified(site, asks, name=name)
    path = f"/v1/certificates/{before['id']}/approvals"
    if before["status"] == "awaiting_approval":
        site.ask("POST", path, approves, json={"envelope": before["envelope_digest"]})
    pending = _certified(site, asks, name=name, steps=700, optimizer={"name": "dp_adam"})

    visitor.sign_in(approves, "/approvals")
    visitor.sees(name)
    page.click(f"tr:has-text('{name}') >> text=Review")
    visitor.sees("Steps T")
    stated = visitor.text()
    assert "500" in stated
    assert "700" in stated
    assert "dp_adam" in stated
    assert pending["envelope_digest"] == page.locator(".copyable input").first.input_value()
    visitor.look("approval")
    page.click("button:text-is('Reject')")
    visitor.sees("comment")
    page.fill("#comment", "Looked at the sampler & the <code>.")
    page.click("button:text-is('Approve')")
    visitor.sees("the certificate has been issued")
    visitor.sees("Looked at the sampler & the <code>.")

    visitor.goto("/policies")
    assert page.input_value("#policy") == "clinical"
    page.fill("#epsilon_cap", "1")
    if not visitor.kind.scripts:
        page.click("button:text-is('Simulate')")
    page.get_by_text("would change").first.wait_for()
    visitor.sees("the policy clinical allows 1.")
    visitor.look("draft")
