"""A privacy officer's three questions, at a desk and on a phone, with the API's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from affidavit.evidence import verify_evidence
from affidavit.service.web.pages.text import round_up
from affidavit.trust import KeyStore, PublicKey, TrustedKeys
from tests.browser.conftest import Kind, Visitor
from tests.browser.sample_company import PEOPLE, Company

KINDS = (
    Kind(True, "dark", 390),
    *(
        pytest.param(kind, marks=pytest.mark.soak)
        for kind in (
            Kind(True, "light", 390),
            Kind(True, "light", 1280),
            Kind(True, "dark", 1280),
        )
    ),
)
SCREEN = 800
"""The height of a window in pixels."""

pytestmark = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture
def officer(visitor_of: Callable[..., Visitor], company: Company, kind: Kind) -> Visitor:
    """Somebody who may decide and audit, signed in."""
    result = visitor_of(company.site, kind)
    result.sign_in(company.site.token("ines", *PEOPLE))
    return result


def is_above_the_fold(visitor: Visitor, text: str) -> bool:
    box = visitor.page.locator("main").get_by_text(text).first.bounding_box()
    return bool(box and box["y"] + box["height"] <= SCREEN)


def test_is_this_plan_all_right(officer: Visitor, company: Company) -> None:
    """Two clicks from the overview: the plan that waits, and the decision."""
    name = f"ward-{officer.kind.scheme}-{officer.kind.width}"
    token = company.tokens["audit"]
    found = company.certify("asked", name=name, steps=600)
    stated = company.site.ask("GET", f"/v1/certificates/{found['id']}", token).json()
    epsilon = round_up(stated["epsilon"]["upper"])
    officer.goto("/")
    officer.page.click(f"text={name}")
    officer.sees(f"ε ≤ {epsilon}")
    assert is_above_the_fold(officer, f"ε ≤ {epsilon}")
    officer.page.click("button:text-is('Approve')")
    officer.sees("the certificate has been issued")
    decided = company.site.ask("GET", f"/v1/certificates/{found['id']}", token).json()
    assert decided["certificate"]["status"] == "active"


def test_how_much_is_left_and_who_spent_it(officer: Visitor, company: Company) -> None:
    """Two clicks from the overview."""
    officer.page.click("nav >> text=Data sets")
    officer.page.click("main >> text=clicks >> nth=0")
    officer.page.wait_for_url("**/datasets/clicks**")
    token = company.tokens["audit"]
    (ledger,) = (
        item
        for item in company.site.ask("GET", "/v1/ledgers/clicks", token).json()["items"]
        if item["adjacency"] == "add_remove"
    )
    free = re.search(r"ε = (\S+) of 40 is free", officer.text())
    assert free
    # Shown with fewer digits, and never more than there is.
    assert 0 <= ledger["remaining"]["epsilon"] - float(free[1]) < 1e-3
    officer.sees(f"≤ {round_up(ledger['spent']['filter']['epsilon'])}")
    assert is_above_the_fold(officer, "Free")
    officer.sees("Who uses it")
    officer.sees(PEOPLE["submit"])


def test_can_this_run_be_defended(officer: Visitor, company: Company) -> None:
    """Three clicks from the overview end with a file that verifies offline."""
    site, run = company.site, company.runs["settled"]
    officer.page.click("nav >> text=Runs")
    officer.page.click(f"a[href='/runs/{run}'] >> nth=0")
    stated = site.ask("GET", f"/v1/runs/{run}", company.tokens["audit"]).json()
    officer.sees("The record conforms to the certificate")
    assert is_above_the_fold(officer, "The record conforms to the certificate")
    assert str(stated["steps"]["charged"]) in officer.page.inner_text(".figure-row")
    with officer.page.expect_download() as waiting:
        officer.page.click("text=Download evidence")
    content = Path(waiting.value.path()).read_bytes()
    records = site.ask("GET", "/v1/keys", company.tokens["audit"]).json()["keys"]
    workers = KeyStore(Path(site.settings.worker_keys)).public_keys()
    keys = (*map(PublicKey.from_record, records), *workers)
    report = verify_evidence(content, TrustedKeys(keys, policy=None))
    assert report.about["run"] == run
    with pytest.raises(Exception, match="step"):
        verify_evidence(content[:-200] + bytes(200), TrustedKeys(keys, policy=None))
