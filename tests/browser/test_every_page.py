"""Every page of a company that has everything, as each of its people, with every browser."""

from __future__ import annotations

from collections.abc import Iterator
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
    """A name for each page, and where it is."""
    certificates, runs = company.certificates, company.runs
    first, second = certificates["digits"], certificates["digits-longer"]
    clicks = certificates["clicks"]
    return {
        "overview": "/",
        "new-plan": "/plans/new",
        "certificates": "/certificates",
        "compare-form": "/compare",
        "compare": f"/compare?first={first}&second={second}",
        "compare-unranked": f"/compare?first={clicks}&second={certificates['zeroed']}",
        "datasets": "/datasets",
        "dataset": "/datasets/clicks",
        "dataset-exhausted": f"/datasets/digits?composed=yes&certificate={first}",
        "dataset-empty": "/datasets/panel",
        "runs": "/runs",
        "runs-failed": "/runs?state=failed",
        "run-new": f"/runs/new?certificate={first}",
        **{f"run-{label}": f"/runs/{run}" for label, run in runs.items()},
        "approvals": "/approvals",
        "approval": f"/approvals/{certificates['waiting']}",
        "approval-rejected": f"/approvals/{certificates['rejected']}",
        "policies": "/policies",
        "policy": "/policies/clinical/2",
        "draft": "/policies/draft?policy=clinical&epsilon_cap=1",
        "waivers": "/waivers",
        "audit": "/audit?start=0&end=20",
        "audit-entry": "/audit/5",
        "tokens": "/tokens",
        "keys": "/keys",
    }


def test_every_page_is_whole_in_every_browser(visitor: Any, company: Company) -> None:
    everything = company.site.token("ines", *PEOPLE)
    visitor.sign_in(everything)
    for name, path in pages_of(company).items():
        visitor.goto(path)
        assert visitor.page.locator("h1").count() == 1, name
        visitor.look(name)
