"""Reservations that nobody uses: what is released, when, and what an audit names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import text

from affidavit.service.ledger.repository import UNUSED_LIFETIME, orphaned_reservations
from affidavit.service.ledger.store import LedgerStore
from tests.service.ledger_replay import replay
from tests.service.runs.conftest import Yard
from tests.service.runs.conftest import yard as yard

NOW = datetime.now(UTC)
LATER = NOW + UNUSED_LIFETIME + timedelta(hours=1)


def expired(yard: Yard, at: datetime) -> int:
    return LedgerStore(yard.engine).expire(at)


def named(yard: Yard, at: datetime) -> set[str]:
    with yard.engine.connect() as connection:
        return {reservation for reservation, _ in orphaned_reservations(connection, at)}


def test_only_what_has_no_run_and_was_never_used_expires(yard: Yard) -> None:
    certificate = yard.certify()
    body = {"certificate": certificate}
    path = "/v1/ledgers/toy/reservations"
    made: list[Any] = [yard.ask("POST", path, "submit", body).json() for _ in range(3)]
    unused, used, released = (one["id"] for one in made)
    assert yard.ask("POST", f"/v1/reservations/{used}/commit", "work", {}).is_success
    assert yard.ask("POST", f"/v1/reservations/{released}/release", "submit", {}).is_success
    waiting = yard.request(certificate).json()
    assert expired(yard, NOW + UNUSED_LIFETIME - timedelta(hours=1)) == 0
    assert named(yard, NOW) == set()
    assert named(yard, LATER) == {unused}
    assert expired(yard, LATER) == 1
    assert expired(yard, LATER) == 0
    assert named(yard, LATER) == set()
    states = {"reservation": yard.charged({"reservation": unused})[0]}
    assert states == {"reservation": "released"}
    assert yard.charged(waiting)[0] == "reserved"
    assert yard.charged({"reservation": used})[0] == "committed"
    assert not replay(yard.engine)


def test_a_run_that_is_queued_meanwhile_keeps_its_reservation(yard: Yard) -> None:
    certificate = yard.certify()
    path = "/v1/ledgers/toy/reservations"
    unused = yard.ask("POST", path, "submit", {"certificate": certificate}).json()["id"]

    class Late(LedgerStore):
        """Another client is quicker, once it is known what to release."""

        def change(self, *values: Any, **named: Any) -> Any:
            assert yard.request(certificate, reservation=unused).status_code == 201
            return super().change(*values, **named)

    assert Late(yard.engine).expire(LATER) == 0
    assert yard.charged({"reservation": unused})[0] == "reserved"


def test_a_run_that_ended_and_left_its_charge_open_is_named(yard: Yard) -> None:
    """As a version did that died between the two; nothing of this version can write it."""
    run = yard.request(yard.certify()).json()
    assert named(yard, NOW) == set()
    with yard.engine.begin() as connection:
        connection.execute(text("UPDATE run_leases SET state = 'ended'"))
    assert named(yard, NOW) == {run["reservation"]}
