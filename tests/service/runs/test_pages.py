"""``GET /v1/runs``: pages that follow their links, and filters that let through what they name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from affidavit.evidence import check_conformance
from affidavit.trust import read_envelope
from tests.service.runs.conftest import ON_SQLITE, Yard
from tests.support.polling import wait_until
from tests.support.run_records import record_of


def listed(yard: Yard, query: str) -> list[str]:
    answer = yard.ask("GET", f"/v1/runs?{query}", "audit")
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["items"]]


@ON_SQLITE
def test_pages_follow_their_links_and_filters(yard: Yard) -> None:
    """Every run once, latest first, whatever is asked for meanwhile; filters join."""
    certificate = yard.certify()
    created = [yard.request(certificate, queue=f"q{number % 2}").json() for number in range(5)]
    seen, path = [], "/v1/runs?limit=2"
    while path is not None:
        answer = yard.ask("GET", path, "audit")
        page = answer.json()
        seen += [element["id"] for element in page["items"]]
        path = page["next"]
        assert ("link" in answer.headers) == (path is not None)
        if len(seen) == 2:
            late = yard.request(certificate).json()
    ids = [item["id"] for item in created]
    assert seen == ids[::-1]
    assert listed(yard, "queue=q1") == [ids[3], ids[1]]
    assert listed(yard, "queue=q1&limit=1") == [ids[3]]

    job = yard.claim()
    assert job["run"] == late["id"]
    assert listed(yard, "state=claimed") == [late["id"]]
    yard.start(job)
    assert listed(yard, "state=running") == [late["id"]]
    yard.complete(job, 10)
    assert listed(yard, "state=settled") == [late["id"]]
    assert listed(yard, "state=settled&queue=q0") == []
    yard.ask("POST", f"/v1/runs/{ids[0]}/cancel", "submit", {"reason": "no"})
    assert listed(yard, "state=cancelled") == [ids[0]]
    assert listed(yard, "state=queued") == ids[:0:-1]
    states = [yard.run(entry)["state"] for entry in (late, *created)]
    for state in ("queued", "claimed", "running", "settled", "failed", "cancelled"):
        assert len(listed(yard, f"state={state}")) == states.count(state)

    after = quote(created[2]["requested_at"][:-1] + "999Z")  # milliseconds are shown
    assert listed(yard, f"requested_after={after}&queue=q1") == [ids[3]]
    assert listed(yard, f"requested_before={after}&queue=q0") == [ids[2], ids[0]]
    assert listed(yard, f"certificate={certificate}&limit=200") == [late["id"], *ids[::-1]]
    assert listed(
        yard, f"requested_by={quote(created[0]['requested_by'])}&queue=q0&state=cancelled"
    )
    assert listed(yard, "requested_by=nobody") == []


@ON_SQLITE
def test_the_record_behind_a_verdict_and_its_bundle_can_be_had(yard: Yard) -> None:
    """They are the bytes that were checked, in the API and on the page, and conform again."""
    certificate = yard.certify()
    yard.request(certificate)
    yard.request(certificate)
    first, second = yard.claim(), yard.claim()
    for job in (first, second):
        yard.start(job)
    path = f"/v1/runs/{first['run']}"
    assert yard.ask("GET", f"{path}/record", "audit").json()["code"] == "no_record"
    record = record_of(yard.predicate(first), 7)
    yard.complete(first, record)
    yard.complete(second, 10)
    for prefix, ending in (("/v1", ""), ("", ".jsonl")):
        sent = yard.ask("GET", f"{prefix}/runs/{first['run']}/record{ending}", "audit")
        assert sent.content == record.content.encode()
    # The certificate is in the log soon after it is issued.
    wait_until(lambda: "log" in yard.ask("GET", f"{path}/bundle", "audit").json())
    bundles = [
        yard.ask("GET", where, who).json()
        for where, who in (
            (f"{path}/bundle", "audit"),
            (f"{path}/bundle", "work"),
            (f"/runs/{first['run']}/bundle.json", "submit"),
        )
    ]
    # The log may have grown between two requests.
    same = [(item["envelope"], item["log"]["leafIndex"]) for item in bundles]
    assert same[0] == same[1] == same[2]
    predicate = json.loads(read_envelope(bundles[0]["envelope"]).payload)["predicate"]
    checked = check_conformance(sent.content, predicate)
    assert (checked.head, checked.steps_to_charge) == (record.head, 7)
    assert yard.run({"id": first["run"]})["steps"]["charged"] == 7
    assert yard.ask("GET", f"{path}/record", "work").status_code == 403
    page = yard.ask("GET", f"/runs/{first['run']}", "audit").text
    assert f'href="/runs/{first["run"]}/record.jsonl"' in page
    assert f'href="/runs/{first["run"]}/bundle.json"' in page


@ON_SQLITE
def test_a_parameter_that_is_not_one_is_refused_by_name(
    yard: Yard,
    database_url: str,  # noqa: ARG001
    client_of: Callable[..., Any],  # noqa: ARG001
) -> None:
    for query, field in (
        ("state=done", "state"),
        ("status=queued", "status"),
        ("cursor=abc", "cursor"),
        ("cursor=WzEsMl0", "cursor"),
        ("limit=0", "limit"),
        ("queue=a%20b", "queue"),
        ("requested_by=%00", "requested_by"),
        ("requested_after=yesterday", "requested_after"),
        ("requested_after=2027", "requested_after"),
    ):
        answer = yard.ask("GET", f"/v1/runs?{query}", "audit")
        assert answer.status_code == 422, (query, answer.text)
        assert answer.json()["reasons"][0]["pointer"] == f"/query/{field}"
