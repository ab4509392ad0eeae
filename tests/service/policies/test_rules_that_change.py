"""Rules that change while a plan is on its way: the certificate names those that it obeys."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text
from starlette.concurrency import run_in_threadpool

from affidavit.service.certificates.store import CertificateStore
from affidavit.service.core.pool import AccountingPool

Document = Callable[..., dict[str, Any]]


def test_a_plan_in_flight_is_judged_by_the_policy_that_is_active_when_it_is_kept(
    house: Any, plan: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy becomes active between the accounting and the certificate."""
    house.activate(epsilon_cap=3)
    accounted = AccountingPool._run
    calls = []

    async def meanwhile(pool: Any, *given: Any, **named: Any) -> Any:
        result = await accounted(pool, *given, **named)
        calls.append(given)
        if len(calls) == 1:
            await run_in_threadpool(_activate, house, 2, 0.5)
        return result

    monkeypatch.setattr(AccountingPool, "_run", meanwhile)
    result = house.submit("sam", plan()).json()
    assert (result["policy"]["version"], result["verdict"]) == (2, "refused")
    assert len(calls) == 1, "what was found was judged anew, not accounted anew"
    assert house.submit("sam", plan()).status_code == 200
    with house.engine.connect() as connection:
        stored = connection.execute(text("SELECT count(*) FROM certificates")).scalar_one()
    assert stored == 1


def test_a_change_at_the_last_moment_is_noticed_within_the_transaction(
    house: Any, plan: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy becomes active after the certificate was signed."""
    house.activate(epsilon_cap=3)
    add = CertificateStore.add
    changed = []

    def late(store: Any, *given: Any, **named: Any) -> Any:
        if not changed:
            changed.append(True)
            _activate(house, 2, 0.5)
        return add(store, *given, **named)

    monkeypatch.setattr(CertificateStore, "add", late)
    result = house.submit("sam", plan()).json()
    assert (result["policy"]["version"], result["verdict"]) == (2, "refused")
    assert [entry["kind"] for entry in house.entries("certificate")] == []


def test_issuing_again_ends_no_decision_about_the_certificate_of_other_rules(
    house: Any, plan: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiver is revoked while the plan is accounted again under it."""
    house.activate(epsilon_cap=0.5)
    without = house.submit("sam", plan()).json()["certificate"]["id"]
    waiver = house.waive().json()["id"]
    waived = house.submit("sam", plan()).json()["certificate"]["id"]
    for made in (without, waived):
        why = {"code": "other", "reason": "a mistake"}
        revoked = house.ask("amy", "POST", f"/v1/certificates/{made}/revocation", why)
        assert revoked.status_code == 201, revoked.text
    accounted = AccountingPool._run

    async def meanwhile(pool: Any, *given: Any, **named: Any) -> Any:
        result = await accounted(pool, *given, **named)
        await run_in_threadpool(house.ask, "amy", "DELETE", f"/v1/waivers/{waiver}?reason=over")
        return result

    monkeypatch.setattr(AccountingPool, "_run", meanwhile)
    again = house.ask("pat", "POST", f"/v1/certificates/{waived}/issues", {})
    assert again.status_code in (200, 201), again.text
    assert again.json()["certificate"]["id"] == without
    assert again.json()["certificate"]["status"] == "revoked"


@pytest.mark.ordinary("sqlite")
def test_no_certificate_by_an_old_policy_follows_the_new_one_in_the_log(
    house: Any, plan: Document
) -> None:
    """Plans and versions arrive together; the log shows them in an order that makes sense."""
    house.activate(epsilon_cap=100)
    done = threading.Event()

    def keep_activating() -> int:
        version = 1
        while not done.is_set() and version < 8:
            version += 1
            _activate(house, version, 100 if version % 2 else 0.01)
        return version

    def keep_asking(start: int) -> None:
        for number in range(start, start + 6):
            house.submit("sam", plan(steps=number))

    with ThreadPoolExecutor(4) as people:
        activating = people.submit(keep_activating)
        for asking in [people.submit(keep_asking, 10 * n) for n in range(1, 4)]:
            asking.result()
        done.set()
        activating.result()

    active = 0
    seen = 0
    entries = [
        entry for kind in ("policy", "certificate", "refusal") for entry in _placed(house, kind)
    ]
    for _, kind, entry in sorted(entries, key=lambda item: item[0]):
        if kind == "policy":
            assert entry["body"]["version"] == active + 1
            active += 1
            continue
        seen += 1
        assert entry["body"]["policy"]["version"] == active
        assert kind == ("certificate" if active % 2 else "refusal")
    assert seen == 18


def test_two_people_cannot_activate_one_version(house: Any, policy: Document) -> None:
    def activate(cap: float) -> int:
        answer = house.ask("ada", "POST", "/v1/policies", policy(epsilon_cap=cap))
        status: int = answer.status_code
        return status

    with ThreadPoolExecutor(8) as people:
        statuses = sorted(people.map(activate, [1 + n / 10 for n in range(8)]))
    assert statuses == [201] + [409] * 7
    assert len(house.entries("policy")) == 1


def test_another_process_follows_at_once(
    house: Any, plan: Document, client_of: Callable[..., Any]
) -> None:
    """What the rules are is asked of the database, not remembered."""
    house.activate(epsilon_cap=3)
    with client_of(house.settings, address="192.0.2.1") as second:
        here = house.client
        assert house.submit("sam", plan()).json()["verdict"] == "certified"
        house.client = second
        assert house.submit("sam", plan()).status_code == 200
        house.activate(version=2, epsilon_cap=0.5)
        house.client = here
        assert house.submit("sam", plan()).json()["verdict"] == "refused"
        house.waive(policy="toys")
        house.client = second
        assert house.submit("sam", plan()).json()["verdict"] == "certified"
        house.client = here


def _activate(house: Any, version: int, cap: float) -> None:
    document = {
        "schema_version": 1,
        "name": "toys",
        "version": version,
        "datasets": ["toy"],
        "epsilon_cap": cap,
    }
    answer = house.ask("ada", "POST", "/v1/policies", document)
    assert answer.status_code == 201, answer.text


def _placed(house: Any, kind: str) -> list[tuple[int, str, dict[str, Any]]]:
    with house.engine.connect() as connection:
        ids = connection.execute(
            text("SELECT id FROM log_entries WHERE kind = :k ORDER BY id"), {"k": kind}
        ).scalars()
        return [(i, kind, entry) for i, entry in zip(ids, house.entries(kind), strict=True)]
