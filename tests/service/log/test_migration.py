"""A database from before the log: what was certified then is entered when it is migrated."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import text

from affidavit.service.migrate import downgrade, upgrade
from tests.certificate.log.logged import certified
from tests.service.log.conftest import KEY, Log


def test_certificates_from_before_get_their_entries_in_order(
    log: Log, document: Callable[..., dict[str, Any]]
) -> None:
    log.engine.dispose()
    downgrade(log.url, "0002")
    made = [certified(document(steps=steps), KEY) for steps in (3, 1, 2)]
    with log.engine.begin() as connection:
        connection.execute(
            text("INSERT INTO signing_keys VALUES (:key_id, :record, :at)"),
            {"key_id": KEY.key_id, "record": json.dumps(KEY.public.as_record()), "at": _at(log, 0)},
        )
        for number, certificate in enumerate(made):
            connection.execute(
                text(
                    "INSERT INTO certificates (id, untrusted, plan_digest, adjacency, verdict, "
                    "epsilon_upper, delta, created_at, key_id, bundle, result) VALUES (:id, :no, "
                    ":plan, 'add_remove', 'certified', :epsilon, :delta, :at, :key, :bundle, "
                    ":result)"
                ),
                {
                    "id": certificate.id,
                    "no": False,
                    "plan": "sha256:" + certificate.statement["subject"][0]["digest"]["sha256"],
                    "epsilon": _upper(certificate, "epsilon"),
                    "delta": _upper(certificate, "delta"),
                    "at": _at(log, number),
                    "key": KEY.key_id,
                    "bundle": certificate.bundle,
                    "result": json.dumps(_result(certificate)),
                },
            )
    log.engine.dispose()
    upgrade(log.url)
    kept = log.sequence()
    assert kept.checkpoint.size == 3
    found = [json.loads(entry.content)["subject"] for entry in log.reader.entries(0, 9)]
    assert found == [certificate.id for certificate in made]
    for index, certificate in enumerate(made):
        place = log.reader.inclusion_of(certificate.bundle)
        assert place is not None
        assert place.leaf_index == index
    assert log.audit() == []


def _at(log: Log, number: int) -> Any:
    at = datetime(2026, 1, 1, 12, number, tzinfo=UTC)
    return at.strftime("%Y-%m-%d %H:%M:%S.%f") if log.engine.dialect.name == "sqlite" else at


def _upper(certificate: Any, name: str) -> float:
    return float(certificate.statement["predicate"]["guarantee"][name]["upper"])


def _result(certificate: Any) -> dict[str, Any]:
    return {
        "verdict": "certified",
        **{name: {"upper": _upper(certificate, name)} for name in ("epsilon", "delta")},
        "certificate": {"id": certificate.id, "bundle": json.loads(certificate.bundle)},
    }
