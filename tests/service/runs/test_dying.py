"""A service that dies within a request, anywhere: nothing is half done, and nothing happens twice.

Death is played within the process: from one statement or commit on no connection executes or
commits anything more, as after SIGKILL, whatever the service's own error handling would do. The
same request is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from affidavit.service.audit.audit import audit
from affidavit.service.core.database import snapshot
from tests.service.ledger_replay import replay
from tests.service.runs.conftest import Yard

Request = tuple[str, str, dict[str, Any]]
"""A path, the scope of its caller, and a body."""
RECORD = "sha256:" + "0" * 64


class Died(Exception):
    """Nothing is executed any more."""


@contextmanager
def dying(engine: Engine, after: int) -> Iterator[list[int]]:
    """Let so many statements and commits happen; the list has how many came after them."""
    left, denied = count(after, -1), [0]

    def step(*_: Any) -> None:
        if denied[0] or next(left) <= 0:
            denied[0] += 1
            raise Died

    for name in ("before_cursor_execute", "commit"):
        event.listen(engine, name, step)
    try:
        yield denied
    finally:
        for name in ("before_cursor_execute", "commit"):
            event.remove(engine, name, step)


def run(_: Yard, certificate: str) -> Request:
    body = {"certificate": certificate, "data": "digits", "model": "mlp:8", "output": "o"}
    return "/v1/runs", "submit", body


def reservation(_: Yard, certificate: str) -> Request:
    return "/v1/ledgers/toy/reservations", "submit", {"certificate": certificate}


def commit(yard: Yard, certificate: str) -> Request:
    path, who, body = reservation(yard, certificate)
    made = yard.ask("POST", path, who, body)
    return f"{made.headers['location']}/commit", "work", {}


def settle(yard: Yard, certificate: str) -> Request:
    path, who, _ = commit(yard, certificate)
    assert yard.ask("POST", path, who, {}).status_code == 200
    return path.replace("/commit", "/settle"), who, {"record": RECORD}


def certificate(yard: Yard, _: str) -> Request:
    return "/v1/certificates", "submit", yard.document(name=f"plan-{next(NUMBERS)}")


NUMBERS = count()
KINDS: dict[str, tuple[Callable[[Yard, str], Request], str]] = {
    "run": (run, "SELECT COUNT(*) FROM runs JOIN reservations ON reservation_id = reservations.id"),
    "reservation": (reservation, "SELECT COUNT(*) FROM reservations"),
    "commit": (commit, "SELECT COUNT(*) FROM ledger_events WHERE kind = 'commit'"),
    "settle": (settle, "SELECT COUNT(*) FROM ledger_events WHERE kind = 'settle'"),
    "certificate": (certificate, "SELECT COUNT(*) FROM certificates WHERE issue = 1"),
}
"""What each request is, and of what there is one more after it."""


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_dies_anywhere_happens_once(yard: Yard, kind: str) -> None:
    prepare, rows = KINDS[kind]
    certified = yard.certify()
    engine = yard.client.app.state.services.engine

    def number(query: str) -> int:
        with yard.engine.connect() as connection:
            return int(connection.execute(text(query)).scalar_one())

    for after in count():
        path, who, body = prepare(yard, certified)
        before = number(rows)
        key = {"idempotency_key": f"{kind}-{after}"}
        with dying(engine, after) as denied:
            first = yard.ask("POST", path, who, body, **key)
        if denied[0]:
            assert first.status_code in (200, 201, 500, 503), first.text
        assert number(rows) in (before, before + 1)
        again = yard.ask("POST", path, who, body, **key)
        assert again.status_code in (200, 201), again.text
        assert number(rows) == before + 1
        if first.is_success:
            assert first.json() == again.json()
        if not denied[0]:
            break
    assert after > 5
    assert number("SELECT COUNT(*) FROM reservations") >= number("SELECT COUNT(*) FROM runs")
    assert not replay(yard.engine)
    with snapshot(yard.engine) as connection:
        assert not list(audit(connection, []))
