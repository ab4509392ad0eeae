"""The audit log is searched by person, data set, day and kind, and each search has an address."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.service.conftest import ON_SQLITE
from tests.service.runs.conftest import Yard
from tests.support.page_views import page_views
from tests.support.polling import wait_until


def entries_of(yard: Yard, search: str) -> list[dict[str, Any]]:
    """The logged entries on the pages of a search, as they were logged."""
    found: list[dict[str, Any]] = []
    path: str | None = f"/audit?{search}"
    while path:
        with page_views() as views:
            assert yard.ask("GET", path, "audit", accept="text/html").status_code == 200
        view = views[-1]
        found += [json.loads(entry["content"]) for entry in view["entries"]]
        path = f"/audit?{search}&before={view['next']}" if view["next"] is not None else None
    return found


@ON_SQLITE
def test_a_search_finds_what_it_names_and_nothing_else(yard: Yard) -> None:
    other = yard.document(dataset={"name": "other_set", "size": 1000})
    yard.ask("POST", "/v1/certificates", "submit", other)
    certificate = yard.certify()
    yard.request(certificate)
    revoked = {"reason": "plan_error", "comment": "seen"}
    yard.ask("POST", f"/v1/certificates/{certificate}/revocation", "admin", revoked)
    wait_until(lambda: yard.ask("GET", "/v1/log/checkpoint", "audit").is_success)
    wait_until(lambda: len(entries_of(yard, "dataset=toy")) >= 4)
    whole = entries_of(yard, "")

    def matching(search: str, test: Any) -> None:
        found, expected = entries_of(yard, search), [entry for entry in whole if test(entry)]
        assert found == expected, search
        assert 0 < len(found) < len(whole) or search.startswith(("since", "until")), search

    matching("actor=token:submit", lambda entry: entry["actor"] == "token:submit")
    matching("kind=reservation", lambda entry: entry["kind"] == "reservation")
    both = "actor=token:submit&kind=certificate"
    matching(both, lambda entry: (entry["actor"], entry["kind"]) == ("token:submit", "certificate"))
    about = {entry["subject"] for entry in entries_of(yard, "dataset=toy")}
    assert certificate in about
    assert "toy/example/add_remove" in about
    assert about.isdisjoint(entry["subject"] for entry in entries_of(yard, "dataset=other_set"))
    tomorrow = f"{datetime.now(UTC) + timedelta(days=1):%F}"
    yesterday = f"{datetime.now(UTC) - timedelta(days=1):%F}"
    matching(f"since={yesterday}&until={tomorrow}", lambda _: True)
    assert entries_of(yard, f"until={yesterday}") == []
    assert entries_of(yard, f"since={tomorrow}") == []
    assert entries_of(yard, "actor=token:sub_it") == entries_of(yard, "actor=%25") == []
    page = yard.ask("GET", "/audit?raw=yes&kind=reservation", "audit", accept="text/html").text
    assert "&#34;kind&#34;:&#34;reservation&#34;" in page
    for wrong in ("since=soon", "dataset=a/b", "raw=no"):
        assert yard.ask("GET", f"/audit?{wrong}", "audit", accept="text/html").status_code == 422
