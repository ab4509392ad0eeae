"""The ledger over HTTP: who may do what, what is answered, and what a certificate says of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from affidavit.service.core.database import open_engine
from affidavit.service.identity.scopes import Scope
from affidavit.service.identity.tokens import TokenRepository
from affidavit.service.settings import Settings
from affidavit.trust import KeyStore, read_envelope
from tests.service.conftest import EACH_SCOPE, ON_SQLITE, token_texts
from tests.service.ledger_replay import replay

BUDGET = {"adjacency": "add_remove", "epsilon": 2, "delta": 1e-4}
RECORD = "sha256:" + "0" * 64


@dataclass
class Office:
    """A running service and a token for each scope."""

    client: Any
    tokens: dict[str, str]
    document: Callable[..., dict[str, Any]]

    def ask(self, method: str, path: str, who: str, body: Any = None, **headers: str) -> Any:
        sent = {"authorization": f"Bearer {self.tokens[who]}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.request(method, path, headers=sent, json=body)

    def certify(self, **changes: Any) -> str:
        """The id of the quick plan's certificate."""
        result = self.ask("POST", "/v1/certificates", "submit", self.document(**changes)).json()
        return str(result["certificate"]["id"])

    def reserve(self, certificate: str, **headers: str) -> Any:
        body = {"certificate": certificate}
        return self.ask("POST", "/v1/ledgers/toy/reservations", "submit", body, **headers)

    def ledger(self, query: str = "") -> Any:
        (result,) = self.ask("GET", f"/v1/ledgers/toy{query}", "audit").json()["items"]
        return result


@pytest.fixture
def office(
    database_url: str, tmp_path: Path, client_of: Any, document: Callable[..., dict[str, Any]]
) -> Iterator[Office]:
    KeyStore(tmp_path / "keys").new("test")
    settings = Settings(
        database_url=database_url,
        key_directory=tmp_path / "keys",
        workers=1,
        loopback=True,
        rate_limit=1_000_000,
    )
    engine = open_engine(database_url)
    tokens = token_texts(engine, EACH_SCOPE | {"other": ["submit"]})
    with client_of(settings) as client:
        yield Office(client, tokens, document)
    assert not replay(engine)
    engine.dispose()


def test_a_run_from_its_budget_to_its_settlement(office: Office) -> None:
    created = office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET)
    assert created.status_code == 201
    assert created.json()["budget"] == {"version": 1, "epsilon": 2, "delta": 1e-4}
    assert office.ledger()["remaining"] == {"epsilon": 2}
    certificate = office.certify()
    fits = office.ledger(f"?certificate={certificate}")["forecast"]
    assert fits["runs"] > 3
    assert fits["message"].startswith(f"{fits['runs']} more runs of this size fit: after them ε ≤ ")
    reserved = office.reserve(certificate)
    assert reserved.status_code == 201
    where = reserved.headers["location"]
    assert office.ask("POST", f"{where}/commit", "work").json()["state"] == "committed"
    settled = office.ask("POST", f"{where}/settle", "work", {"record": RECORD}).json()
    assert settled["state"] == "settled"
    assert settled["steps"] == {"certified": 10, "run": 10}
    assert settled["charged"] == settled["reserved"]
    assert office.ask("GET", where, "audit").json() == settled
    ledger = office.ledger(f"?certificate={certificate}")
    spent = ledger["spent"]
    assert spent["filter"]["decides"]
    assert not spent["composed"]["decides"]
    assert not spent["sum"]["decides"]
    assert spent["composed"]["engine"] == "gaussian"
    assert 0 < spent["composed"]["epsilon"]["upper"] <= spent["filter"]["epsilon"]
    assert ledger["forecast"]["runs"] <= fits["runs"]
    assert ledger["entries"] == [settled]
    (known,) = office.ask("GET", "/v1/ledgers", "submit").json()["items"]
    assert known["dataset"] == "toy"
    left, gone = known["remaining"]["epsilon"], spent["filter"]["epsilon"]
    assert Decimal(str(left)) + Decimal(str(gone)) <= 2
    assert left == pytest.approx(2 - gone, rel=1e-9)


@ON_SQLITE
def test_nobody_gives_back_what_was_reserved_on_their_word(office: Office) -> None:
    """A stolen token of any scope settles at no step, with a digest that it invents."""
    office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET)
    certificate = office.certify()
    where = office.reserve(certificate).headers["location"]
    office.ask("POST", f"{where}/commit", "work")
    spent = office.ledger()["spent"]["filter"]
    for who in EACH_SCOPE:
        for steps in (0, 4, 9):
            body = {"steps_run": steps, "record": RECORD}
            refused = office.ask("POST", f"{where}/settle", who, body)
            code = "record_required" if who == "work" else "missing_scope"
            assert refused.json()["code"] == code, refused.text
    assert office.ledger()["spent"]["filter"] == spent
    office.ask("POST", f"{where}/settle", "work", {})
    assert office.ledger()["spent"]["filter"] == spent


def test_an_overspending_run_is_refused_and_nothing_is_written(office: Office) -> None:
    office.ask("POST", "/v1/ledgers/toy/budget", "admin", {**BUDGET, "epsilon": 0.1})
    certificate = office.certify()
    refused = office.reserve(certificate)
    assert refused.status_code == 409
    assert refused.json()["code"] == "over_budget"
    assert refused.json()["reasons"][0]["remedy"]
    assert office.ledger(f"?certificate={certificate}")["forecast"]["runs"] == 0
    assert office.ledger()["entries_total"] == 0


@ON_SQLITE
def test_a_certificate_says_where_the_ledger_stood_at_its_issue(office: Office) -> None:
    def position(found: dict[str, Any]) -> Any:
        envelope = read_envelope(found["certificate"]["bundle"]["envelope"])
        return json.loads(envelope.payload)["predicate"]["ledger"]

    def certify(**changes: Any) -> Any:
        return office.ask("POST", "/v1/certificates", "submit", office.document(**changes)).json()

    assert position(certify()) is None
    office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET)
    before = position(certify(steps=9))
    assert before["fits"]
    assert before["spent"] == {"epsilon": "0"}
    assert before["at"] == "issue"
    certificate = certify(steps=9)["certificate"]["id"]
    office.reserve(certificate)
    after = position(certify(steps=8))
    assert after["seq"] == 2
    assert float(after["spent"]["epsilon"]) == float(before["with_this_run"]["epsilon"])
    assert position(certify(steps=9)) == before
    large = [{"name": "all", "clip_norm": 1, "noise_multiplier": 3}]
    beyond = position(certify(releases=large))
    assert not beyond["fits"]


def test_requests_repeat_by_their_key(office: Office) -> None:
    first = office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET, idempotency_key="b")
    again = office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET, idempotency_key="b")
    assert (first.status_code, again.status_code) == (201, 200)
    certificate = office.certify()
    one = office.reserve(certificate, idempotency_key="k")
    two = office.reserve(certificate, idempotency_key="k")
    assert (one.status_code, two.status_code) == (201, 200)
    assert one.json() == two.json()
    other = office.reserve(office.certify(steps=9), idempotency_key="k")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


def test_a_repetition_is_answered_though_the_certificate_was_revoked(office: Office) -> None:
    office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET)
    certificate = office.certify()
    first = office.reserve(certificate, idempotency_key="k")
    elsewhere = {"certificate": certificate}
    path = "/v1/ledgers/other/reservations"
    reused = office.ask("POST", path, "submit", elsewhere, idempotency_key="k")
    assert (reused.status_code, reused.json()["code"]) == (422, "idempotency_key_reused")
    why = {"code": "plan_error", "reason": "x"}
    revoked = office.ask("POST", f"/v1/certificates/{certificate}/revocation", "approve", why)
    assert revoked.is_success, revoked.text
    again = office.reserve(certificate, idempotency_key="k")
    assert (again.status_code, again.json()) == (200, first.json())
    new = office.reserve(certificate, idempotency_key="l")
    assert (new.status_code, new.json()["code"]) == (409, "certificate_not_usable")


@pytest.mark.ordinary("sqlite-True", "postgresql-False")
@pytest.mark.parametrize("again", [False, True])
def test_a_run_does_not_begin_whose_certificate_was_withdrawn(office: Office, again: bool) -> None:
    """Revoked after it was reserved, and perhaps issued anew; what began before goes on."""
    office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET)
    certificate = office.certify()
    begun, waits = (office.reserve(certificate).headers["location"] for _ in range(2))
    first = office.ask("POST", f"{begun}/commit", "work", idempotency_key="k")
    why = {"code": "plan_error", "reason": "x"}
    where = f"/v1/certificates/{certificate}"
    assert office.ask("POST", f"{where}/revocation", "approve", why).is_success
    if again:
        result = office.ask("GET", where, "submit").json()["certificate"]
        requested = {"former": result["envelope_digest"], "reason": "x"}
        issued = office.ask("POST", f"{where}/issues", "approve", requested)
        assert issued.is_success, issued.text
    for path, key in ((begun, "k"), (begun, "l")):
        same = office.ask("POST", f"{path}/commit", "work", idempotency_key=key)
        assert (same.status_code, same.json()) == (200, first.json())
    refused = office.ask("POST", f"{waits}/commit", "work")
    assert (refused.status_code, refused.json()["code"]) == (409, "certificate_not_usable")
    stated = "it has been reissued since" if again else "it is revoked"
    assert stated in refused.json()["detail"]
    assert "Release the reservation" in refused.text
    assert office.ask("GET", waits, "submit").json()["state"] == "reserved"
    assert office.ask("POST", f"{waits}/release", "work").json()["state"] == "released"
    assert office.ask("POST", f"{begun}/settle", "work", {}).json()["state"] == "settled"


@ON_SQLITE
def test_who_may_only_submit_releases_their_own(office: Office) -> None:
    office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET)
    where = office.reserve(office.certify()).headers["location"]
    refused = office.ask("POST", f"{where}/release", "other")
    assert (refused.status_code, refused.json()["code"]) == (403, "not_yours")
    released = office.ask("POST", f"{where}/release", "submit", {"reason": "not needed"})
    assert released.json()["state"] == "released"


NOWHERE = "00000000-0000-0000-0000-000000000000"
BAD = (
    ("ledgers/toy/budget", {**BUDGET, "epsilon": 0}, "/epsilon"),
    ("ledgers/toy/budget", {**BUDGET, "delta": 1}, "/delta"),
    ("ledgers/toy/budget", {**BUDGET, "delta": "1e-5"}, "/delta"),
    ("ledgers/toy/budget", {**BUDGET, "unit": "record"}, "/unit"),
    ("ledgers/toy/budget", {**BUDGET, "epsilonn": 1}, "/epsilonn"),
    ("ledgers/toy/budget", {"epsilon": 1, "delta": 1e-5}, "/adjacency"),
    ("ledgers/toy/reservations", {"certificate": "x"}, "/certificate"),
    ("ledgers/toy/reservations", [], ""),
    (f"reservations/{NOWHERE}/settle", {"steps_run": -1}, "/steps_run"),
)


@ON_SQLITE
def test_a_bad_body_is_told_where(office: Office) -> None:
    for path, body, pointer in BAD:
        who = {"budget": "admin", "reservations": "submit", "settle": "work"}[path.split("/")[-1]]
        refused = office.ask("POST", f"/v1/{path}", who, body)
        assert refused.status_code == 400, (path, body)
        assert refused.json()["reasons"][0]["pointer"] == pointer


@ON_SQLITE
def test_an_empty_or_too_large_body_is_told_what_belongs_there(office: Office) -> None:
    headers = {
        "authorization": f"Bearer {office.tokens['admin']}",
        "content-type": "application/json",
    }
    for body, status, code in ((b"", 400, "empty"), (b" " * 70_000, 413, "too_large")):
        refused = office.client.post("/v1/ledgers/toy/budget", headers=headers, content=body)
        assert refused.status_code == status
        (reason,) = refused.json()["reasons"]
        assert reason["code"] == code
        assert "a budget" in reason["remedy"]
        assert "plan" not in reason["remedy"]


@ON_SQLITE
def test_a_bad_header_is_not_called_a_parameter_of_the_url(office: Office) -> None:
    refused = office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET, idempotency_key="a b")
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("invalid_parameter at /header/idempotency-key: ")
    both = office.ask("POST", "/v1/ledgers/%00/budget", "admin", BUDGET, idempotency_key="a b")
    assert {reason["pointer"].lower() for reason in both.json()["reasons"]} == {
        "/path/dataset",
        "/header/idempotency-key",
    }


@ON_SQLITE
def test_what_is_not_there_is_said_so(office: Office) -> None:
    answers = [
        (office.ask("GET", "/v1/ledgers/none", "audit"), 404, "not_found"),
        (office.ask("GET", f"/v1/reservations/{NOWHERE}", "audit"), 404, "not_found"),
        (office.ask("POST", f"/v1/reservations/{NOWHERE}/commit", "work"), 404, "not_found"),
        (office.ask("POST", f"/v1/reservations/{NOWHERE}/settle", "work"), 404, "not_found"),
        (office.reserve(RECORD), 409, "certificate_not_usable"),
        (office.reserve(office.certify()), 409, "no_budget"),
    ]
    for answer, status, code in answers:
        assert (answer.status_code, answer.json()["code"]) == (status, code)


@ON_SQLITE
def test_a_plan_whose_noise_was_solved_for_is_charged_for_that_noise(office: Office) -> None:
    office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET)
    solved = office.certify(
        releases=[{"name": "all", "clip_norm": 1}], target={"epsilon": 1, "delta": 1e-5}
    )
    result = office.reserve(solved)
    assert result.status_code == 201
    assert 0.99 < float(result.json()["reserved"]["epsilon"]) <= 1
    assert result.json()["reserved"]["mu"] is not None


@ON_SQLITE
def test_answers_are_what_the_document_says(office: Office, openapi: dict[str, Any]) -> None:
    schemas = openapi["components"]["schemas"]

    def holds(name: str, found: Any) -> None:
        root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
        Draft202012Validator(root).validate(found)

    holds("LedgerSummary", office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET).json())
    certificate = office.certify()
    holds("Reservation", office.reserve(certificate).json())
    requested = f"/v1/ledgers/toy?certificate={certificate}"
    holds("LedgerPage", office.ask("GET", requested, "work").json())
    holds("LedgerSummaryPage", office.ask("GET", "/v1/ledgers", "approve").json())


def test_the_embedded_service_reserves_for_its_development_key(
    sqlite_url: str, tmp_path: Path, client_of: Any, document: Callable[..., dict[str, Any]]
) -> None:
    """There is no other key, and nobody else reaches the service."""
    settings = Settings(
        database_url=sqlite_url, key_directory=tmp_path / "nokeys", workers=1, loopback=True
    )
    engine = open_engine(sqlite_url)
    token = TokenRepository(engine).new(
        "all", [Scope.ADMIN, Scope.SUBMIT, Scope.AUDIT], 1, by="test", at=datetime.now(UTC)
    )[1]
    engine.dispose()
    for loopback, status in ((True, 201), (False, 409)):
        with client_of(replace(settings, loopback=loopback)) as client:
            office = Office(
                client, dict.fromkeys(("admin", "submit", "audit"), token.text), document
            )
            office.ask("POST", "/v1/ledgers/toy/budget", "admin", BUDGET)
            assert office.reserve(office.certify()).status_code == status
