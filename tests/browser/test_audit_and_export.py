"""The story of an auditor: look, prove, export, and verify what was exported elsewhere."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from affidavit.trust import PublicKey
from affidavit.trust.log import (
    merkle_tree,
    open_checkpoint,
)
from tests.support.page_views import page_views

pytestmark = pytest.mark.soak

HOSTILE = "=cmd|' /C calc'!A0 <script>alert(1)</script> \u202etxt.exe"


@pytest.fixture(scope="module")
def auditor(site: Any, document: Callable[..., dict[str, Any]]) -> str:
    """A token, and a log with certificates, refusals and tokens in it."""
    sender = site.token("ml-team", "submit")
    for epsilon in (8, 7, 0.01):
        plan = document(target={"epsilon": epsilon, "delta": 1e-5}, notes=HOSTILE)
        site.ask("POST", "/v1/certificates", sender, json=plan)
    result: str = site.token("auditor", "audit")
    return result


def download(visitor: Any, click: str) -> str:
    """What a link saves."""
    with visitor.page.expect_download() as waiting:
        visitor.page.click(click)
    path = waiting.value.path()
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def test_the_overview_lists_what_needs_attention(visitor: Any, auditor: str) -> None:
    visitor.sign_in(auditor)
    visitor.sees("Recently not certified")
    visitor.sees("under-noised")
    visitor.look("overview")


def test_an_entry_is_proved_and_exported(visitor: Any, auditor: str, site: Any) -> None:
    visitor.sign_in(auditor, "/audit")
    visitor.look("audit")
    visitor.page.select_option("select[name=kind]", "refusal")
    if visitor.kind.scripts:
        visitor.page.get_by_text("of kind refusal").wait_for()
    else:
        visitor.page.click("button:text-is('Filter')")
    rows = visitor.page.locator("tbody tr")
    expect(rows).to_have_count(1)
    kinds = visitor.page.locator("tbody td:nth-child(3)").all_inner_texts()
    assert set(kinds) == {"refusal"}

    # As CSV: read by another program, no cell a formula.
    lines = list(csv.DictReader(io.StringIO(download(visitor, "text=CSV"))))
    assert [line["kind"] for line in lines] == ["refusal"]
    assert not [cell for line in lines for cell in line.values() if cell[:1] in "=+-@\t\r" and cell]

    # The checkpoint, verified with the key as the API gives it.
    note = download(visitor, "text=Download checkpoint")
    records = site.ask("GET", "/v1/keys", auditor).json()["keys"]
    checkpoint, _ = open_checkpoint(note, [PublicKey.from_record(record) for record in records])

    # Held to the log as it is now.
    visitor.page.fill("#saved_checkpoint", note)
    if not visitor.kind.scripts:
        visitor.page.click("button:text-is('Compare')")
    visitor.page.get_by_text("consistent").wait_for()
    visitor.look("audit-held")
    if not visitor.kind.scripts:
        visitor.page.go_back()

    # The entry's own page, its data, and the proof held to that checkpoint.
    with page_views() as views:
        visitor.page.click("tbody th a")
        visitor.sees("in the log")
    visitor.look("audit-entry")
    shown = views[-1]
    leaf = hashlib.sha256(b"\x00" + shown["content"].encode()).digest()
    assert leaf.hex() == shown["entry"]["leaf_hash"]
    assert shown["checkpoint"]["size"] >= checkpoint.size
    merkle_tree.verify_inclusion(
        leaf,
        index=shown["entry"]["index"],
        size=shown["checkpoint"]["size"],
        proof=[bytes.fromhex(item) for item in shown["proof"]],
        root=bytes.fromhex(shown["checkpoint"]["root"]),
    )


def test_a_range_of_entries_is_verified(visitor: Any, auditor: str) -> None:
    visitor.sign_in(auditor, "/audit")
    visitor.page.fill("input[name=start]", "0")
    visitor.page.fill("input[name=end]", "2")
    if not visitor.kind.scripts:
        visitor.page.click("button:has-text('Verify')")
    visitor.page.get_by_text("Entries 0 to 2 match").wait_for()
    visitor.sees("verified")
    visitor.look("audit-verified")
    visitor.page.fill("input[name=end]", "999999")
    if not visitor.kind.scripts:
        visitor.page.click("button:has-text('Verify')")
    visitor.page.get_by_text("At most 5,000 entries").wait_for()
    visitor.look("audit-too-long")


def test_tokens_are_created_shown_once_and_revoked(visitor: Any, site: Any) -> None:
    visitor.sign_in(site.token("root", "admin"), "/tokens")
    name = f"ci-{visitor.kind}"
    visitor.page.fill("input[name=name]", name)
    visitor.page.click("button:has-text('Create token')")
    visitor.sees("select one")
    visitor.page.check("input[value=submit]")
    visitor.page.click("button:has-text('Create token')")
    created = visitor.page.input_value(".card input")
    assert site.ask("GET", "/v1/certificates", created).status_code == 200
    visitor.look("token-made")
    row = visitor.page.locator("tr", has_text=name)
    row.locator("summary").click()
    row.locator("input[name=reason]").fill("left the team")
    row.locator("button").click()
    visitor.sees("The token has been revoked")
    assert created not in visitor.page.content()
    visitor.look("tokens")
    with pytest.raises(AssertionError, match="revoked_token"):
        site.ask("GET", "/v1/certificates", created)
