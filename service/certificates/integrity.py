"""Verification that a row of ``certificates`` matches what was signed and logged.

An attacker with write access to the database can insert or change a row. Therefore a row is used
only if its columns and result match its envelope, a stored key signed the envelope, and the
envelope's entry is in the log, where monitors see the key.

Signed bytes never change, so each process verifies a row once. Lists show columns without this
check; the audit compares the columns with the signed bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isclose, isfinite
from typing import Any, Self
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Pool, RowMapping, bindparam, select
from sqlalchemy.exc import NoResultFound

from affidavit.certificate import Approvals, is_of_team
from affidavit.plan import MalformedPlan, digest_of
from affidavit.service.core.errors import DomainError
from affidavit.service.core.teams import team_in_id
from affidavit.service.log.entries import is_logged
from affidavit.service.tables.certificates import certificates, signing_keys
from affidavit.trust import (
    BadEnvelope,
    KeyFailure,
    KeyRole,
    PublicKey,
    format_instant,
    parse_instant,
    read_envelope,
)
from affidavit.trust.dsse import Envelope
from affidavit.trust.log import certificate_entry

MAX_VERIFIED = 100_000
"""Verified rows that are remembered for each database."""
ROUNDING = 1e-9
"""Relative tolerance below the signed decimal, which is rounded up."""
UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
    BadEnvelope,
    MalformedPlan,
)
"""The errors that reading a tampered row can raise."""


class NotGenuine(DomainError):
    """A stored certificate differs from what was signed and logged: run affidavit audit verify."""

    code = "not_genuine"


def require_genuine(connection: Connection, row: RowMapping) -> None:
    """Raise ``NotGenuine`` unless ``row`` matches what was signed and logged."""
    verified = _VERIFIED.setdefault(connection.engine.pool, set())
    digest = sha256(row["bundle"])
    digest.update(row["result"].encode())
    digest.update(repr([row[name] for name in _COLUMNS]).encode())
    if digest.digest() in verified:
        return
    if not _is_genuine(connection, row):
        raise NotGenuine(
            f"The stored issue {row['issue']} of {row['id']} differs from what was signed.",
            "Tell the operator: run affidavit audit verify, and restore a backup.",
        )
    if len(verified) >= MAX_VERIFIED:
        verified.clear()
    verified.add(digest.digest())


_VERIFIED: WeakKeyDictionary[Pool, set[bytes]] = WeakKeyDictionary()
"""The digests of verified rows of each database."""


def _is_genuine(connection: Connection, row: RowMapping) -> bool:
    try:
        contents = SignedContents.of(row)
        record = connection.execute(_KEY, {"key_id": contents.envelope.key_id}).scalar_one()
        key = PublicKey.from_record(json.loads(record))
        entry = certificate_entry(contents.envelope, contents.statement)
        keys = [key] if key.has_role(KeyRole.CERTIFICATE) else []
        return not contents.contradicted_by(row, keys) and (is_logged(connection, entry))
    except (*UNREADABLE, KeyFailure, NoResultFound):
        return False


_COLUMNS = [column.name for column in certificates.c if column.name not in ("bundle", "result")]
_KEY = select(signing_keys.c.record).where(signing_keys.c.key_id == bindparam("key_id"))


def signed_facets(predicate: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of ``certificate_facets`` that repeat a signed statement."""
    # DP-SGD is the default optimizer.
    mechanism = predicate["plan"].get("optimizer", {}).get("name", "dp_sgd")
    return {"mechanism": mechanism, "requester": predicate["requester"]}


def signed_columns(predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of ``certificates`` that repeat a signed statement."""
    plan, approvals = predicate["plan"], Approvals.of(predicate)
    return {
        "id": predicate["certificate_id"],
        "untrusted": predicate["untrusted"],
        "issue": predicate.get("issue", 1),
        "verdict": predicate["verdict"],
        "plan_digest": digest_of(plan),
        "name": plan.get("name"),
        "dataset": plan["dataset"].get("name"),
        "adjacency": plan["adjacency"],
        "approvals_required": approvals.required,
        "approvals_given": len(approvals.given),
        "not_after": parse_instant(predicate["validity"]["not_after"]),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedContents:
    """The bundle of a row, its envelope, and the signed statement."""

    bundle: Any
    envelope: Envelope
    statement: dict[str, Any]

    @classmethod
    def of(cls, row: RowMapping) -> Self:
        """Parse the bundle of a row; raises one of ``UNREADABLE``."""
        bundle = json.loads(row["bundle"])
        envelope = read_envelope(bundle["envelope"])
        statement = json.loads(envelope.payload)
        return cls(bundle=bundle, envelope=envelope, statement=statement)

    @property
    def waivers(self) -> set[str]:
        """Ids of the waivers that the certificate relies on."""
        return {item["waiver"]["id"] for item in self.statement["predicate"].get("waived", ())}

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of ``certificates`` and ``certificate_facets`` that repeat signed content."""
        predicate = self.statement["predicate"]
        return {
            **signed_columns(predicate),
            **signed_facets(predicate),
            "envelope_digest": self.envelope.digest,
            "key_id": self.envelope.key_id,
        }

    def contradicted_by(self, row: RowMapping, keys: Sequence[PublicKey]) -> list[str]:
        """Return the columns that contradict the signed bytes; ``signature`` if no key signed."""
        predicate = self.statement["predicate"]
        differing = [name for name, value in self.columns.items() if row.get(name, value) != value]
        if not is_of_team(predicate, team_in_id(row["team"])):
            differing.append("team")
        candidates = [key for key in keys if key.development is predicate["untrusted"]]
        if not self.envelope.signers(candidates):
            differing.append("signature")
        if format_instant(row["created_at"]) != predicate["validity"]["not_before"]:
            differing.append("created_at")
        result = json.loads(row["result"])
        same = result["certificate"]["bundle"] == self.bundle and all(
            result.get(name) == predicate.get(name) for name in _SHARED_FIELDS
        )
        if not same:
            differing.append("result")
        if not _has_same_noise(result["noise_multiplier"], predicate["noise_multiplier"]):
            differing.append("noise_multiplier")
        guarantee = predicate["guarantee"]
        if guarantee is None:
            # δ is then the plan's.
            claims_epsilon = row["epsilon_upper"] is not None or bool(result["epsilon"])
            return differing + ["epsilon"] * claims_epsilon
        for name, column in (("epsilon", row["epsilon_upper"]), ("delta", row["delta"])):
            upper = guarantee[name]["upper"]
            if not _rounds_to(column, upper):
                differing.append(name)
            if not _rounds_to((result[name] or {}).get("upper"), upper):
                differing.append("result")
        return differing


_SHARED_FIELDS = ("verdict", "reasons", "obligations", "assumptions", "policy", "waived")
"""Fields that are equal in a result and its signed statement."""


def _rounds_to(value: float | None, signed: str | None) -> bool:
    """Return whether ``signed`` is ``value`` rounded up."""
    if signed is None or not isfinite(float(signed)):
        return value is None or not isfinite(value)
    return value is not None and float(signed) * (1 - ROUNDING) <= value <= float(signed)


def _has_same_noise(result: Mapping[str, Any], signed: Mapping[str, Any]) -> bool:
    """Return whether both have the same releases and, up to rounding, the same noise."""
    releases = list(zip(result["releases"], signed["releases"], strict=True))
    pairs = [(result["joint"], signed["joint"])]
    pairs += [(first[name], second[name]) for first, second in releases for name in _NOISE]
    return all(first["name"] == second["name"] for first, second in releases) and all(
        value is decimal is None or isclose(value, float(decimal), rel_tol=ROUNDING)
        for value, decimal in pairs
    )


_NOISE = ("required", "given")
