"""Down and up again across the revision that numbers issues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from affidavit.certificate import read_envelope
from affidavit.service.database import open_engine
from affidavit.service.lifecycle.issuing import not_after, statement_of
from affidavit.service.lifecycle.standing import Status
from affidavit.service.migrate import downgrade, upgrade
from affidavit.service.store import CertificateStore
from tests.service.lifecycle.conftest import Company
from tests.service.test_store import KEY, NOON, REQUEST, bundle, certificate


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    found = open_engine(database_url)
    yield found
    found.dispose()


def test_down_keeps_the_newest_issue_and_up_numbers_it_anew(
    database_url: str, engine: Engine
) -> None:
    store = CertificateStore(engine)
    first = certificate(not_after=NOON + timedelta(days=1), status=Status.EXPIRED)
    second = certificate(issue=2, result='{"second": true}', bundle=bundle("another"))
    store.add(first, KEY, REQUEST)
    store.add(second, KEY, REQUEST)
    store.add(certificate(1), KEY, REQUEST)
    engine.dispose()
    downgrade(database_url, "0004")
    with engine.connect() as connection:
        kept = connection.execute(text("SELECT * FROM certificates ORDER BY id")).mappings().all()
        asked = connection.execute(text("SELECT count(*) FROM requests")).scalar_one()
    assert [row["result"] for row in kept] == [second.result, certificate(1).result]
    assert "issue" not in kept[0]
    assert asked == 3
    with (
        pytest.raises(IntegrityError, match="append-only"),
        engine.begin() as connection,
    ):
        connection.execute(text("DELETE FROM certificates"))
    engine.dispose()
    upgrade(database_url)
    (again,) = store.issues(second.id)
    assert (again.issue, bytes(again.bundle), again.result) == (1, second.bundle, second.result)
    # A statement without an end of validity, so that it ends as every certificate of its day did.
    assert again.not_after == second.created_at + timedelta(days=365)


def test_what_the_signed_bytes_say_is_read_from_them_again(
    company: Company, plan: Any, database_url: str
) -> None:
    company.submit(plan())
    (before,) = company.client.app.state.services.store.issues(
        company.submit(plan()).json()["certificate"]["id"]
    )
    company.client.app.state.services.close()
    company.engine.dispose()
    downgrade(database_url, "0004")
    upgrade(database_url)
    engine = open_engine(database_url)
    (after,) = CertificateStore(engine).issues(before.id)
    engine.dispose()
    assert after == before
    assert after.not_after == not_after(statement_of(after))
    assert after.envelope_digest == read_envelope(json.loads(after.bundle)["envelope"]).digest
