"""Provenance of a run, as its worker makes it (``affidavit.certificate.provenance``)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from affidavit.certificate import (
    BUILD_TYPE,
    PREDICATE_TYPE,
    STATEMENT_TYPE,
    Conformance,
    SigningPort,
    seal,
)
from affidavit.plan import canonical_json
from affidavit.worker.queue import Job

MOST_FINDINGS = 20


def provenance(
    job: Job,
    found: Conformance,
    key: SigningPort,
    *,
    worker: str,
    weights: str | None,
    header: Mapping[str, Any] | None,
    began: datetime,
) -> dict[str, Any]:
    """The signed envelope, as JSON data.

    ``weights`` is the sha256 of the weights in hexadecimal, ``header`` the record's first line.
    """
    said = dict(header or {})
    subject = ("weights.pt", weights) if weights else ("record.jsonl", _hex(found.head))
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": subject[0], "digest": {"sha256": subject[1]}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"data": job.data, "model": job.model},
                "internalParameters": {"run": job.run, "fence": job.fence},
                "resolvedDependencies": [
                    {"name": "certificate", "digest": {"sha256": _hex(job.certificate)}},
                    {"name": "plan", "digest": {"sha256": _hex(job.plan_digest)}},
                    {"name": "data", "annotations": {"recorded": said.get("data")}},
                    {"name": "code", "annotations": {"recorded": said.get("code")}},
                ],
            },
            "runDetails": {
                "builder": {"id": f"affidavit-worker:{worker}"},
                "metadata": {
                    "invocationId": job.run,
                    "startedOn": _instant(began),
                    "finishedOn": _instant(datetime.now(UTC)),
                },
                "byproducts": [
                    {
                        "name": "record.jsonl",
                        "digest": {"sha256": _hex(found.head)},
                        "annotations": {"conformance": _told(found)},
                    }
                ],
            },
        },
    }
    return seal(canonical_json(statement), key).as_document()


def _told(found: Conformance) -> dict[str, Any]:
    """What a record comes to, with the first findings of what may be one for each step."""
    told = found.as_dict()
    return {**told, "findings": told["findings"][:MOST_FINDINGS]}


def _hex(digest: str | None) -> str:
    return (digest or "").removeprefix("sha256:")


def _instant(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
