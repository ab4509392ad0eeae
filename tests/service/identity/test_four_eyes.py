"""Four eyes: with a keyset that says so, no administrator sets a budget or a policy alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, text

from affidavit.client import RecordedRequest
from affidavit.plan import canonical_json
from affidavit.service.audit.audit import audit
from affidavit.service.core.database import snapshot
from affidavit.service.core.teams import acting_for
from affidavit.service.identity.actor import Actor
from affidavit.service.identity.scopes import Scope
from affidavit.service.ledger.repository import grants_of
from affidavit.service.operation import four_eyes
from affidavit.service.settings import Settings
from affidavit.service.tables.identity import admin_proposals
from affidavit.service.tables.keys import keysets
from affidavit.trust import (
    PAYLOAD_TYPE,
    KeyStore,
    Roots,
    SigningKey,
    draft_keyset,
    format_instant,
    read_keyset,
    sign_envelope,
)
from tests.service.conftest import ONCE
from tests.service.runs.test_dying import dying

BUDGET = {"adjacency": "add_remove", "epsilon": 8, "delta": 1e-4}
POLICY = {"schema_version": 1, "name": "strict", "version": 1, "datasets": ["toy"]}
ADMINS = {name: ["admin"] for name in ("ada", "bob", "cyd")}
OTHERS = {"dana": ["submit"], "omar": ["audit"], "pat": ["approve"], "quin": ["approve"]}
NOW = datetime.now(UTC).replace(microsecond=0)
TOY = "/v1/ledgers/toy"


@pytest.fixture
def ask(database_url: str, tmp_path: Path, client_of: Any, tokens_for: Any) -> Any:
    key = KeyStore(tmp_path / "keys").new("test")
    settings = Settings(
        database_url=database_url,
        key_directory=tmp_path / "keys",
        workers=1,
        loopback=True,
        comparison_seconds=ONCE,
    )
    headers = tokens_for(settings, {**ADMINS, **OTHERS})
    root = SigningKey.generate()
    with client_of(settings) as client:
        services = client.app.state.services

        def ask(who: str, path: str, body: Any) -> tuple[int, str]:
            response = client.post(path, headers=headers[who], json=body)
            return response.status_code, response.json().get("code", "")

        def draft(administrators: int | None) -> bytes:
            last = services.keysets.newest()
            signed = draft_keyset(
                None if last is None else read_keyset(last),
                roots=Roots.of([root.public], threshold=1),
                keys=[key.public],
                revoked=[],
                issued_at=NOW,
                expires_at=NOW + timedelta(days=9),
                administrators=administrators,
            ).signed_by(root)
            return signed.as_bytes()

        def publish(administrators: int | None) -> None:
            services.keysets.publish(draft(administrators), actor="ada", at=datetime.now(UTC))

        def post(who: str, path: str, **sent: Any) -> Any:
            headers_of = {**headers[who], "accept": "application/json"}
            return client.post(path, headers=headers_of, follow_redirects=False, **sent)

        def submit(who: str, **fields: str) -> str:
            page = client.post(
                "/datasets", headers=headers[who], data=fields, follow_redirects=False
            )
            return page.headers.get("location", page.text)

        def read(who: str, path: str) -> Any:
            html = {**headers[who], "accept": "text/html"}
            answer = client.get(path, headers=html if path.startswith("/data") else headers[who])
            assert answer.status_code == 200, answer.text
            return answer.text if path.startswith("/data") else answer.json()["items"]

        ask.read = read  # type: ignore[attr-defined]
        ask.submit = submit  # type: ignore[attr-defined]
        ask.draft, ask.post = draft, post  # type: ignore[attr-defined]
        ask.delete = lambda who, path: client.delete(path, headers=headers[who])  # type: ignore[attr-defined]
        ask.publish = publish  # type: ignore[attr-defined]
        ask.services = services  # type: ignore[attr-defined]
        yield ask


NEEDED = (202, "second_person_needed")


def test_nothing_takes_effect_before_enough_people_asked_for_the_same(ask: Any) -> None:
    budget = "/v1/ledgers/toy/budget"
    assert ask("ada", budget, BUDGET) == (201, "")
    ask.publish(3)
    larger = {**BUDGET, "epsilon": 9}
    for _ in range(2):  # one person who repeats it is one
        assert ask("ada", budget, larger) == NEEDED
    assert ask("bob", budget, {**BUDGET, "epsilon": 10}) == NEEDED
    assert ask("bob", budget, {**larger, "reason": "in other words"}) == NEEDED
    assert ask("cyd", "/v1/ledgers/other/budget", larger) == NEEDED
    (ledger,) = ask.services.ledger_store.ledgers()
    assert float(ledger.state.budget.epsilon) == 8
    assert ask("cyd", budget, larger) == (201, "")
    (ledger,) = ask.services.ledger_store.ledgers()
    assert float(ledger.state.budget.epsilon) == 9
    # What was carried out is asked for anew.
    assert ask("cyd", budget, larger) == NEEDED
    with snapshot(ask.services.engine) as connection:
        assert list(audit(connection, [])) == []


def test_whose_token_was_revoked_has_not_agreed(ask: Any) -> None:
    """Or a thief of one token after the other would be two people; whatever a clock says."""
    assert ask("ada", f"{TOY}/budget", BUDGET) == (201, "")
    ask.publish(2)
    (stolen,) = (token for token in ask.services.tokens.list_all() if token.name == "ada")
    larger = {**BUDGET, "epsilon": 9}
    assert ask("ada", "/v1/policies", POLICY) == ask("ada", f"{TOY}/budget", larger) == NEEDED
    assert len(ask.read("omar", f"{TOY}/proposals")) == 1
    ask.services.tokens.revoke(stolen.id, "stolen", by="me", at=NOW - timedelta(hours=1))
    assert ask.read("omar", f"{TOY}/proposals") == []
    assert ask("bob", "/v1/policies", POLICY) == NEEDED
    assert ask("cyd", "/v1/policies", POLICY) == (201, "")


def copy_proposal(ask: Any, **changes: str) -> None:
    """Insert the only proposal again, with other columns and without an entry of the log."""
    with ask.services.engine.begin() as connection:
        row = dict(connection.execute(select(admin_proposals)).mappings().one())
        del row["id"]
        connection.execute(insert(admin_proposals).values({**row, **changes}))


def test_who_agreed_by_raw_sql_alone_does_not_count(ask: Any) -> None:
    ask.publish(2)
    assert ask("ada", "/v1/ledgers/toy/budget", BUDGET) == NEEDED
    copy_proposal(ask, proposer="token:bob")
    assert ask("ada", "/v1/ledgers/toy/budget", BUDGET) == NEEDED
    assert ask("cyd", "/v1/ledgers/toy/budget", BUDGET) == (201, "")


def test_a_keyset_that_the_roots_did_not_sign_loosens_nothing(ask: Any) -> None:
    """Whoever can insert rows can sign one with a key of their own."""
    ask.publish(2)
    genuine, laxer = ask.services.keysets.newest(), read_keyset(ask.draft(None))
    signed = sign_envelope(laxer.envelope.payload, SigningKey.generate(), PAYLOAD_TYPE)
    row = {"version": 2, "follows": 1, "digest": laxer.digest, "publisher": "token:ada"}
    with ask.services.engine.begin() as connection:
        content = canonical_json(signed.as_document())
        connection.execute(insert(keysets).values(**row, document=content, published_at=NOW))
    assert ask("ada", "/v1/ledgers/toy/budget", BUDGET) == NEEDED
    assert ask.services.keysets.newest() == genuine


def test_a_logged_request_is_no_agreement_whatever_its_row_says(ask: Any) -> None:
    ask.publish(2)
    assert ask("dana", "/v1/ledgers/toy/budget", BUDGET) == NEEDED
    copy_proposal(ask, kind="budget")
    assert ask("ada", "/v1/ledgers/toy/budget", BUDGET) == NEEDED


def test_the_form_of_a_budget_notes_the_request(ask: Any) -> None:
    ask.publish(2)
    fields = {**BUDGET, "dataset": "toy", "unit": "example", "reason": "a", "delta": "1e-4"}
    first = ask.submit("ada", **fields)
    assert "Request a budget" in first
    assert "1 of 2 administrators have agreed" in first
    assert ask.submit("bob", **fields) == "/datasets?done=set"


def test_a_policy_needs_them_too_and_the_roots_loosen_it(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask.publish(2)
    assert ask("ada", "/v1/policies", POLICY) == NEEDED
    monkeypatch.setattr(four_eyes, "PROPOSAL_LIFETIME", timedelta(seconds=-1))
    assert ask("bob", "/v1/policies", POLICY) == NEEDED
    monkeypatch.undo()
    # What could not be activated is refused at once, and notes nothing.
    assert ask("bob", "/v1/policies", {**POLICY, "version": 2}) == (409, "policy_version")
    assert ask("bob", "/v1/policies", {**POLICY, "datasets": ["other"]}) == NEEDED
    assert ask("cyd", "/v1/policies", POLICY) == (201, "")
    ask.publish(None)
    assert ask("ada", "/v1/policies", {**POLICY, "version": 2}) == (201, "")


def test_so_do_grants_and_keysets_and_nobody_makes_the_second_person(ask: Any) -> None:
    assert ask("ada", "/v1/ledgers/toy/budget", BUDGET) == (201, "")
    ask.publish(2)
    grants, use = "/v1/ledgers/toy/grants", {"team": "vision", "may": "reserve"}
    assert ask("ada", grants, use) == NEEDED
    assert ask("bob", grants, {**use, "may": "read"}) == NEEDED
    assert ask.services.ledger_store.read(grants_of, "toy") == []
    assert ask("bob", grants, use) == (200, "")
    # One alone takes it back.
    assert ask("ada", grants, {**use, "may": "nothing"}) == (200, "")
    token = {"name": "eve", "scope": ["admin"], "days": "9"}
    before = len(ask.services.tokens.list_all())
    assert ask.post("ada", "/tokens", data=token).status_code == 202
    assert ask.post("ada", "/tokens", data=token).status_code == 202
    assert len(ask.services.tokens.list_all()) == before
    assert ask.post("bob", "/tokens", data=token).status_code == 201
    sent = {"json": json.loads(ask.draft(None))}
    recorded = ask.post("ada", "/v1/keysets", **sent)
    assert recorded.headers["content-type"] == "application/json"
    waiting = RecordedRequest.model_validate_json(recorded.content)
    assert (waiting.agreed, waiting.required) == (1, 2)
    assert waiting.expires_at > datetime.now(UTC)
    assert ask.services.keysets.administrators() == 2
    assert ask.post("bob", "/v1/keysets", **sent).status_code == 201
    assert ask.services.keysets.administrators() == 1
    assert ask.post("bob", "/v1/keysets", **sent).status_code == 200
    assert ask("ada", grants, use) == (200, "")
    with snapshot(ask.services.engine) as connection:
        assert list(audit(connection, [])) == []


def test_waivers_take_as_many_approvers(ask: Any) -> None:
    """Or one of them would loosen for each plan what takes several administrators to loosen."""
    assert ask("ada", "/v1/policies", POLICY) == (201, "")
    waiver = {**WAIVER, "reason": "a trial"}
    assert ask("pat", "/v1/waivers", waiver) == (201, "")
    ask.publish(2)
    asked = {**waiver, "reason": "another trial"}
    assert ask("pat", "/v1/waivers", asked) == NEEDED
    assert ask("pat", "/v1/waivers", asked) == NEEDED
    assert ask("quin", "/v1/waivers", {**asked, "team": "vision"}) == NEEDED
    # Whoever answers for it is none of those who agree.
    owned = {**asked, "owner": "token:pat"}
    assert ask("pat", "/v1/waivers", owned) == (403, "four_eyes")
    assert ask("quin", "/v1/waivers", owned) == NEEDED
    assert len(ask.services.policies.granted()) == 1
    assert ask("quin", "/v1/waivers", asked) == (201, "")
    assert len(ask.services.policies.granted()) == 2
    with snapshot(ask.services.engine) as connection:
        assert list(audit(connection, [])) == []


WAIVER = {
    "rule": "policy_adjacency",
    "policy": "strict",
    "dataset": "toy",
    "owner": "dana",
    "expires_at": format_instant(NOW + timedelta(days=9)),
}
Change = tuple[str, Any]
"""A path and a body."""


def a_keyset(ask: Any, _: int) -> Change:
    return "/v1/keysets", json.loads(ask.draft(2))


def a_policy(ask: Any, number: int) -> Change:
    version = ask.services.policies.policy_set().policies["strict"].version + 1
    return "/v1/policies", {**POLICY, "version": version, "epsilon_cap": 1 + number}


CHANGES: dict[str, tuple[tuple[str, str], Callable[[Any, int], Change]]] = {
    "ledger_events": (
        ("ada", "bob"),
        lambda _, number: ("/v1/ledgers/toy/budget", {**BUDGET, "epsilon": 9 + number}),
    ),
    "dataset_grants": (
        ("ada", "bob"),
        lambda _, number: ("/v1/ledgers/toy/grants", {"team": f"t{number}", "may": "read"}),
    ),
    "policies": (("ada", "bob"), a_policy),
    "keysets": (("ada", "bob"), a_keyset),
    "waivers": (
        ("pat", "quin"),
        lambda _, number: ("/v1/waivers", {**WAIVER, "reason": f"trial {number}"}),
    ),
}
"""Of each kind of change the table that it adds a row to, who agrees, and the request."""


@pytest.mark.ordinary("postgresql-waivers")
@pytest.mark.parametrize("table", CHANGES)
def test_a_service_that_dies_carries_out_what_was_agreed_or_leaves_it_waiting(
    ask: Any, table: str
) -> None:
    """Between any two statements: what the log says was carried out is there, and once."""
    assert ask("ada", "/v1/ledgers/toy/budget", BUDGET) == (201, "")
    assert ask("ada", "/v1/policies", POLICY) == (201, "")
    ask.publish(2)
    (first, last), change = CHANGES[table]
    engine = ask.services.engine

    def counted(query: str) -> int:
        with engine.connect() as connection:
            return int(connection.execute(text(query)).scalar_one())

    def changes() -> int:
        carried_out = counted("SELECT COUNT(*) FROM admin_proposals WHERE carried_out")
        assert counted(f"SELECT COUNT(*) FROM {table}") - initial == carried_out
        return carried_out

    initial = counted(f"SELECT COUNT(*) FROM {table}")
    for after in count():
        path, body = change(ask, after)
        assert ask(first, path, body) == NEEDED
        before = changes()
        with dying(engine, after) as denied:
            status, _ = ask(last, path, body)
        made = changes() - before
        if not denied[0]:
            assert (status, made) == (200 if table == "dataset_grants" else 201, 1)
            break
        again, code = ask(last, path, body)
        assert again in (200, 201) or (made and (again, code) == NEEDED), (again, code)
        assert changes() - before == 1
    assert after > 3
    with snapshot(engine) as connection:
        assert list(audit(connection, [])) == []


def test_others_ask_for_budgets_that_wait_for_administrators(ask: Any) -> None:
    budget, waiting = "/v1/ledgers/toy/budget", "/v1/ledgers/toy/proposals"
    assert ask("dana", budget, {**BUDGET, "reason": "a <b>trial</b>"}) == NEEDED
    assert ask.services.ledger_store.ledgers() == []
    (proposal,) = ask.read("omar", waiting)
    assert proposal["proposers"] == ["token:dana"]
    assert (proposal["content"]["epsilon"], proposal["reason"]) == ("8", "a <b>trial</b>")
    page = ask.read("ada", "/datasets/toy")
    assert "Set this budget" in page
    assert "a &lt;b&gt;trial" in page
    assert "Set this budget" not in ask.read("dana", "/datasets/toy")
    # The page's button sends what was asked for, and then nothing waits.
    assert ask.submit("ada", **proposal["content"]) == "/datasets?done=set"
    (ledger,) = ask.services.ledger_store.ledgers()
    assert float(ledger.state.budget.epsilon) == 8
    assert ask.read("dana", waiting) == []
    # Another budget than the one asked for answers the request too.
    fields = {**BUDGET, "dataset": "toy", "unit": "example", "epsilon": "9", "delta": "1e-4"}
    assert "0 of 1 administrators have agreed" in ask.submit("dana", **fields)
    assert len(ask.read("ada", waiting)) == 1
    assert ask("ada", budget, {**BUDGET, "epsilon": 10}) == (201, "")
    assert ask.read("ada", waiting) == []
    # With more eyes, theirs are none of the administrators'.
    ask.publish(2)
    larger = {**BUDGET, "epsilon": 12}
    assert [ask(who, budget, larger) for who in ("dana", "ada")] == [NEEDED, NEEDED]
    (proposal,) = ask.read("bob", waiting)
    assert proposal["proposers"] == ["token:dana", "token:ada"]
    assert ask("bob", budget, larger) == (201, "")
    assert ask.read("bob", waiting) == []
    assert ask("dana", budget, {**BUDGET, "epsilon": 20}) == NEEDED
    outsider = Actor("token:vision/x", frozenset({Scope.SUBMIT}), "vision")
    with acting_for(outsider.visible_team):
        assert ask.services.four_eyes.waiting(outsider, datetime.now(UTC)) == ()
    # One administrator declines, on the page or by the API; what was agreed to before is void.
    (proposal,) = ask.read("bob", waiting)
    path = f"/datasets/toy/proposals/{proposal['digest']}"
    assert ask.post("dana", path, data={"reason": "mine"}).status_code == 403
    assert ask("ada", budget, {**BUDGET, "epsilon": 20}) == NEEDED
    assert ask.post("bob", path, data={"reason": "too much"}).status_code == 303
    assert ask.read("ada", waiting) == []
    assert ask.post("bob", path, data={"reason": "too much"}).status_code == 404
    assert ask("bob", budget, {**BUDGET, "epsilon": 20}) == NEEDED
    (proposal,) = ask.read("ada", waiting)
    assert proposal["proposers"] == ["token:bob"]
    assert ask.delete("bob", f"{waiting}/{proposal['digest']}").json()["items"] == []
    with snapshot(ask.services.engine) as connection:
        assert list(audit(connection, [])) == []


def test_grants_are_made_on_the_page_of_a_data_set_by_four_eyes(ask: Any) -> None:
    assert ask("ada", "/v1/ledgers/toy/budget", BUDGET) == (201, "")
    path, use = "/datasets/toy/grants", {"team": "vision", "may": "reserve", "reason": ""}
    assert ask.post("ada", path, data={**use, "team": "No Team"}).status_code == 422
    ask.publish(2)
    assert ask.post("ada", path, data=use).headers["location"] == "/datasets/toy?done=noted"
    assert "Grant use" in ask.read("bob", "/datasets/toy")
    assert "Grant use" not in ask.read("ada", "/datasets/toy")
    assert "vision" not in ask.read("dana", "/datasets/toy")
    assert ask.post("bob", path, data=use).headers["location"] == "/datasets/toy?done=granted"
    page = ask.read("omar", "/datasets/toy")
    assert "vision may reserve" in page
    assert "Grant use" not in page
