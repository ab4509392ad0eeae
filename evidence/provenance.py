r"""Provenance of a run: an SLSA in-toto statement, signed by the worker's key.

The subject is the trained weights, or the run record if there are none. ``resolvedDependencies``
are the certificate, the plan, the data by reference and by the commitment in the record, and the
digest of the trainer's code. ``byproducts`` has the record's last digest and the result of its
conformance check.

Provenance proves that the holder of the worker's key made these statements. The record stays with
the weights, so that conformance can be checked again (``affidavit conformance``). The service reads
the provenance when a run ends; anyone can verify it offline (``affidavit runs verify``).

References: in-toto Attestation Framework, Statement v1; SLSA Provenance v1.0; DSSE v1.

>>> from affidavit.trust.key import SigningKey
>>> key = SigningKey.generate()
>>> read_provenance({}, [key.public])
Traceback (most recent call last):
affidavit.evidence.provenance.BadProvenance: the envelope: payload: Field required.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from affidavit.evidence.conformance import Conformance
from affidavit.plan import MalformedPlan, canonical_json, load_json
from affidavit.trust import (
    BadEnvelope,
    KeyRole,
    SigningPort,
    TrustedKeys,
    format_instant,
    parse_instant,
    read_envelope,
    sign_envelope,
)
from affidavit.trust.dates import fault_of_signature
from affidavit.trust.dsse import (
    PAYLOAD_TYPE,
    STATEMENT_TYPE,
    in_toto,
)

PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://affidavit.dev/run/v1"
MAX_FINDINGS = 20
"""The most findings that are signed; there may be one per step."""


class BadProvenance(ValueError):
    """The document is not the provenance of a run, signed by a trusted worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProvenance:
    """The content of a signed provenance.

    ``record`` is the last digest of the run record, ``findings`` are the codes of the findings as a
    text, ``subject`` is the name and the sha256 of the subject, ``code`` the digest of the trainer
    in the record, ``key`` the id of the signing key, and ``finished`` the stated time.
    """

    run: str
    conformant: bool
    findings: str
    steps_to_charge: int
    certificate: str
    plan_digest: str
    data: str
    model: str
    code: str
    subject: tuple[str, str]
    record: str | None
    worker: str
    key: str
    finished: datetime


def sign_provenance(
    key: SigningPort,
    report: Conformance,
    *,
    run: str,
    fence: int,
    data: str,
    model: str,
    worker: str,
    weights: str | None,
    header: Mapping[str, Any],
    began: datetime,
) -> dict[str, Any]:
    """Return the signed provenance of a run, as JSON data.

    ``weights`` is the hexadecimal sha256 of the weights, ``header`` the record's first line.
    """
    subject = {"weights.pt": weights} if weights else {"record.jsonl": _hex(report.head)}
    conformance = report.as_dict()
    conformance["findings"] = conformance["findings"][:MAX_FINDINGS]
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {"data": data, "model": model},
        "internalParameters": {"run": run, "fence": fence},
        "resolvedDependencies": [
            {"name": "certificate", "digest": {"sha256": _hex(report.certificate_id)}},
            {"name": "plan", "digest": {"sha256": _hex(report.plan_digest)}},
            {"name": "data", "annotations": {"recorded": header.get("data")}},
            {"name": "code", "annotations": {"recorded": header.get("code")}},
        ],
    }
    record = {
        "name": "record.jsonl",
        "digest": {"sha256": _hex(report.head)},
        "annotations": {"conformance": conformance},
    }
    details = {
        "builder": {"id": f"affidavit-worker:{worker}"},
        "metadata": {
            "invocationId": run,
            "startedOn": format_instant(began),
            "finishedOn": format_instant(datetime.now(UTC)),
        },
        "byproducts": [record],
    }
    predicate = {"buildDefinition": definition, "runDetails": details}
    statement = in_toto(subject, PREDICATE_TYPE, predicate)
    return sign_envelope(canonical_json(statement), key).as_document()


def _hex(digest: str | None) -> str:
    return (digest or "").removeprefix("sha256:")


def read_provenance(document: Any, trusted: TrustedKeys, *, later: bool = False) -> RunProvenance:
    """Verify and parse ``document``, signed by a key of ``trusted``; raises ``BadProvenance``.

    Workers' statements are neither logged nor listed, so that a trust policy requires nothing of
    them; it applies to the run's certificate.

    The key must be valid now; with ``later``, when the run finished by the statement. A key that
    was revoked since is refused in both cases, because its holder can write any date.
    """
    try:
        envelope = read_envelope(document)
    except BadEnvelope as error:
        raise BadProvenance(f"{error}.") from None
    key = trusted.key(envelope.key_id)
    if key is None:
        raise BadProvenance(
            f"the key {envelope.key_id[:16]!r} is not a trusted worker's key; put its public "
            "record into worker-keys."
        )
    if not key.has_role(KeyRole.RUN):
        raise BadProvenance(f"the key {envelope.key_id[:16]!r} is not for run records.")
    if envelope.payload_type != PAYLOAD_TYPE or not key.accepts(
        envelope.signature, envelope.signed_bytes
    ):
        raise BadProvenance("the signature does not match.")
    try:
        result = _parse_statement(load_json(envelope.payload).data, envelope.key_id)
    except (KeyError, IndexError, TypeError, ValueError, MalformedPlan):
        raise BadProvenance("this is not the provenance of a run.") from None
    now = trusted.now()
    at = result.finished if later else now
    if key.development or fault_of_signature(key, at, now=now) is not None:
        raise BadProvenance(
            "the key is not allowed to sign now (outside its window, revoked, or for trials), or "
            "the date is in the future; then check this machine's clock."
        )
    return result


def _parse_statement(statement: Any, key_id: str) -> RunProvenance:
    if (statement["_type"], statement["predicateType"]) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise ValueError("another type")
    predicate = statement["predicate"]
    definition, details = predicate["buildDefinition"], predicate["runDetails"]
    certificate, plan, data, code = definition["resolvedDependencies"]
    result = details["byproducts"][0]["annotations"]["conformance"]
    steps, conformant = result["steps"]["to_charge"], result["conformant"]
    if (
        definition["buildType"] != BUILD_TYPE
        or (certificate["name"], plan["name"]) != ("certificate", "plan")
        or (data["name"], code["name"]) != ("data", "code")
        or type(steps) is not int
        or not 0 <= steps < 2**31
        or not isinstance(conformant, bool)
        or not isinstance(result["head"], str | None)
    ):
        raise ValueError("another shape")
    codes = ", ".join(sorted({str(item["code"]) for item in result["findings"]}))
    (subject,) = statement["subject"]
    parameters = definition["externalParameters"]
    return RunProvenance(
        run=str(definition["internalParameters"]["run"]),
        certificate="sha256:" + certificate["digest"]["sha256"],
        plan_digest="sha256:" + plan["digest"]["sha256"],
        conformant=conformant,
        steps_to_charge=steps,
        record=result["head"],
        findings=codes[:500] or "the record conforms.",
        subject=(str(subject["name"]), str(subject["digest"]["sha256"])),
        data=str(parameters["data"]),
        model=str(parameters["model"]),
        code=str(code["annotations"]["recorded"]),
        worker=str(details["builder"]["id"]),
        key=key_id,
        finished=parse_instant(details["metadata"]["finishedOn"]),
    )
