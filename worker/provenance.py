r"""Provenance of a run: an in-toto statement in the form of SLSA, signed by the worker's key.

The subject is the trained weights, or the run record where there are none. What went in
(``resolvedDependencies``) is the certificate, the plan, the data by reference and by the
commitment in the record, and the digest of the trainer's code. ``byproducts`` has the record's
last digest and what it came to when it was held against the certificate.

What it proves is that the holder of the worker's key said so. The record itself stays with
the weights, for whoever wants to hold it against the certificate again (``affidavit conformance``).

References: in-toto Attestation Framework, Statement v1; SLSA Provenance v1.0; DSSE v1.

>>> from affidavit.certificate.keys import SigningKey
>>> key = SigningKey.generate()
>>> read_provenance({}, [key.public])
Traceback (most recent call last):
affidavit.worker.provenance.BadProvenance: the envelope does not have exactly the fields ...
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from affidavit.certificate.conformance import Conformance
from affidavit.certificate.envelope import PAYLOAD_TYPE, BadEnvelope, read_envelope, seal
from affidavit.certificate.keys import PublicKey, SigningPort, by_id
from affidavit.certificate.statement import STATEMENT_TYPE
from affidavit.plan.canonical import canonical_json
from affidavit.worker.queue import Job

PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://affidavit.dev/run/v1"
MOST_FINDINGS = 20


class BadProvenance(ValueError):
    """The document is no provenance of a run that a trusted worker signed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """What a signed provenance says of a run; ``record`` is the last digest of its record."""

    run: str
    certificate: str
    plan_digest: str
    conformant: bool
    steps_to_charge: int
    record: str | None
    summary: str


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


def read_provenance(document: Any, trusted: Iterable[PublicKey]) -> Reported:
    """What ``document`` says, signed by one of ``trusted``; raises ``BadProvenance``."""
    try:
        envelope = read_envelope(document)
    except BadEnvelope as error:
        raise BadProvenance(f"{error}.") from None
    key = by_id(trusted).get(envelope.key_id)
    if key is None:
        raise BadProvenance(
            f"the key {envelope.key_id[:16]!r} is none of a worker that is trusted here; put its "
            "public record into worker-keys."
        )
    if envelope.payload_type != PAYLOAD_TYPE or not key.accepts(
        envelope.signature, envelope.signed_bytes
    ):
        raise BadProvenance("the signature does not fit.")
    if key.development or not key.covers(datetime.now(UTC)):
        raise BadProvenance("the key may not sign now: outside its window, revoked, or for trials.")
    try:
        return _reported(json.loads(envelope.payload))
    except (KeyError, IndexError, TypeError, ValueError):
        raise BadProvenance("this is no provenance of a run.") from None


def _reported(statement: Any) -> Reported:
    if (statement["_type"], statement["predicateType"]) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise ValueError("another type")
    predicate = statement["predicate"]
    definition, details = predicate["buildDefinition"], predicate["runDetails"]
    certificate, plan = definition["resolvedDependencies"][:2]
    found = details["byproducts"][0]["annotations"]["conformance"]
    steps, conformant, codes = found["steps"]["to_charge"], found["conformant"], found["findings"]
    if (
        definition["buildType"] != BUILD_TYPE
        or (certificate["name"], plan["name"]) != ("certificate", "plan")
        or type(steps) is not int
        or not 0 <= steps < 2**31
        or not isinstance(conformant, bool)
        or not isinstance(found["head"], str | None)
    ):
        raise ValueError("another shape")
    named = ", ".join(sorted({str(each["code"]) for each in codes}))
    return Reported(
        run=str(definition["internalParameters"]["run"]),
        certificate="sha256:" + certificate["digest"]["sha256"],
        plan_digest="sha256:" + plan["digest"]["sha256"],
        conformant=conformant,
        steps_to_charge=steps,
        record=found["head"],
        summary=named[:500] or "the record conforms.",
    )


def _told(found: Conformance) -> dict[str, Any]:
    """What a record comes to, with the first findings of what may be one for each step."""
    told = found.as_dict()
    return {**told, "findings": told["findings"][:MOST_FINDINGS]}


def _hex(digest: str | None) -> str:
    return (digest or "").removeprefix("sha256:")


def _instant(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
