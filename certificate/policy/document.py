"""The policy document, schema version 1: the plans that an organisation allows.

Accounting proves the bounds of a plan; a policy decides whether it is allowed. A policy is parsed
as strictly as a plan and identified by the digest of its canonical JSON, so that a certificate can
name the policy it was issued under. A missing rule does not restrict, with two exceptions that
need an opt-in: a δ of 1/N or more (``allow_large_delta``), and continuing when the service cannot
be reached (``on_outage: warn``).

A policy applies to the data sets that it names, or to all that no other policy names
(``datasets: default``). An empty list retires a policy.

>>> policy = Policy(schema_version=1, name="nlg", version=3, datasets=("e2e-nlg",),
...                 epsilon_cap=8.0, delta_cap=1e-5, caps={"e2e-nlg": Caps(epsilon=4.0)})
>>> policy.cap("e2e-nlg")
Caps(epsilon=4.0, delta=1e-05, mu=None)
>>> policy.reference()["name"], policy.covers("e2e-nlg"), policy.covers("other")
('nlg', True, False)
>>> parse_policy(b"schema_version: 1\\nname: nlg\\nversion: 1\\ndatasets: default\\n", "yaml").name
'nlg'
>>> parse_policy(b'{"schema_version": 1, "name": "nlg", "version": 1, "epsilon_cup": 8}', "json")
Traceback (most recent call last):
affidavit.certificate.policy.document.MalformedPolicy: missing_field at /datasets: ...

Units: ε in nats, δ a probability, ``valid_days`` in days.

Policies and waivers are stored as DSSE envelopes over in-toto statements. The subject is the digest
of the document, the predicate the document, and the predicate's type its kind, so that a waiver
cannot pass for a policy. Every read checks digest, form and signature.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from affidavit.accountants import ENGINE_NAMES
from affidavit.certificate.policy.limits import (
    MAX_APPROVALS,
    MAX_DATASETS,
    MAX_RECORDS,
    MAX_VALID_DAYS,
)
from affidavit.plan import (
    Adjacency,
    DocumentSchema,
    Integer,
    MalformedPlan,
    Name,
    PlanError,
    Positive,
    PrivacyUnit,
    Probability,
    Reason,
    Scheme,
    StrictModel,
    Syntax,
    Text,
    canonical_json,
    digest_of,
    load_json,
    load_yaml,
    locate_in_document,
    max_items,
    pointer_to,
)
from affidavit.trust import (
    BadEnvelope,
    KeyRole,
    PublicKey,
    SigningPort,
    read_envelope,
    sign_envelope,
)
from affidavit.trust.dsse import PAYLOAD_TYPE, in_toto

SCHEMA_VERSION = 1
VERSION_PATTERN = r"^[0-9]{1,6}(\.[0-9]{1,6}){0,4}$"


class MalformedPolicy(PlanError):
    """The document cannot be read as a policy of schema version 1."""


def _sorted_distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    """Sort distinct values, because their order has no meaning and must not change the digest."""
    if len(set(values)) < len(values):
        raise PydanticCustomError("twice", "a name is listed twice")
    return tuple(sorted(values))


def _validate_engine(name: str) -> str:
    if name not in ENGINE_NAMES:
        raise PydanticCustomError("no_engine", f"engines are {', '.join(ENGINE_NAMES)}")
    return name


def _validate_schema_version(version: int) -> int:
    if version != SCHEMA_VERSION:
        raise PydanticCustomError("schema_version", "this release reads schema version 1")
    return version


def _validate_release(version: str) -> str:
    if re.fullmatch(VERSION_PATTERN, version, re.ASCII) is None:
        raise PydanticCustomError("not_version", "a version is text like '0.6.0'")
    return version


Engine = Annotated[str, Field(strict=True), AfterValidator(_validate_engine)]
Release = Annotated[str, Field(strict=True), AfterValidator(_validate_release)]
_Few = Field(min_length=1, fail_fast=True)


class Caps(StrictModel):
    """The largest allowed ε, δ and μ of Gaussian DP; None is no cap."""

    epsilon: Positive | None = None
    delta: Probability | None = None
    mu: Positive | None = None


class GroupCap(StrictModel):
    """The largest ε of data sets that differ in ``records`` records, or users, by ``relation``.

    ``relation`` is the plan's adjacency if it is None.
    """

    records: Annotated[Integer, Field(ge=1, le=MAX_RECORDS)] = 1
    relation: Adjacency | None = None
    epsilon: Positive


class Policy(StrictModel):
    """The rules for some data sets; ``version`` counts one name's documents from 1."""

    schema_version: Annotated[Integer, AfterValidator(_validate_schema_version)]
    name: Name
    version: Annotated[Integer, Field(ge=1)]
    notes: Text | None = None
    datasets: (
        Literal["default"]
        | Annotated[tuple[Name, ...], max_items(MAX_DATASETS), AfterValidator(_sorted_distinct)]
    )
    adjacencies: Annotated[tuple[Adjacency, ...], _Few, AfterValidator(_sorted_distinct)] | None = (
        None
    )
    samplers: Annotated[tuple[Scheme, ...], _Few, AfterValidator(_sorted_distinct)] | None = None
    units: Annotated[tuple[PrivacyUnit, ...], _Few, AfterValidator(_sorted_distinct)] | None = None
    engines: Annotated[tuple[Engine, ...], _Few, AfterValidator(_sorted_distinct)] | None = None
    accountants: dict[Engine, Release] = Field(default={})
    second_opinion: Literal["required", "if_available"] = "if_available"
    proof: Literal["required"] | None = None
    epsilon_cap: Positive | None = None
    delta_cap: Probability | None = None
    mu_cap: Positive | None = None
    group_cap: GroupCap | None = None
    caps: Annotated[dict[Name, Caps], Field(max_length=MAX_DATASETS)] = Field(default={})
    allow_large_delta: Annotated[bool, Field(strict=True)] = False
    budget: Literal["required", "optional"] = "optional"
    approvals: Annotated[Integer, Field(ge=0, le=MAX_APPROVALS)] = 0
    valid_days: Annotated[Integer, Field(ge=1, le=MAX_VALID_DAYS)] = 365
    on_outage: Literal["block", "warn"] = "block"

    @model_validator(mode="after")
    def _validate_caps(self) -> Policy:
        if self.datasets != "default" and (
            strange := sorted(self.caps.keys() - set(self.datasets))
        ):
            raise MalformedPolicy.with_reason(
                code="conflict",
                pointer=pointer_to("caps", strange[0]),
                message=f"the policy is not for the data set {strange[0]}.",
                remedy="Add it to datasets, or remove its caps.",
            )
        return self

    def covers(self, dataset: str | None) -> bool:
        """Whether the policy applies to ``dataset``, which is None if the plan names none."""
        return self.datasets == "default" or dataset in self.datasets

    def cap(self, dataset: str | None) -> Caps:
        """Return the caps for ``dataset``: its own, or else the policy's."""
        own = self.caps.get(dataset, Caps()) if dataset is not None else Caps()
        return Caps(
            epsilon=self.epsilon_cap if own.epsilon is None else own.epsilon,
            delta=self.delta_cap if own.delta is None else own.delta,
            mu=self.mu_cap if own.mu is None else own.mu,
        )

    def as_document(self) -> dict[str, Any]:
        """Return the policy as plain data, with defaults."""
        return self.model_dump(mode="json", exclude_none=True)

    def digest(self) -> str:
        """Return ``sha256:`` and the digest of the canonical JSON."""
        return digest_of(self.as_document())

    def reference(self) -> dict[str, Any]:
        """Return the reference to the policy that a certificate has."""
        return {"name": self.name, "version": self.version, "digest": self.digest()}


BUILT_IN: Policy = Policy(
    schema_version=SCHEMA_VERSION,
    name="default",
    version=2,
    datasets="default",
    allow_large_delta=True,
)
"""The policy that applies if none is set: it allows everything that is proved."""


def parse_policy(raw: bytes, syntax: Syntax) -> Policy:
    """Parse ``raw`` as a policy; raises ``MalformedPolicy`` with every reason."""
    try:
        document = load_yaml(raw) if syntax == "yaml" else load_json(raw)
    except MalformedPlan as error:
        raise MalformedPolicy(*(_adapt_reason(reason) for reason in error.reasons)) from None
    try:
        return policy_from(document.data)
    except MalformedPolicy as error:
        raise MalformedPolicy(*locate_in_document(error.reasons, document)) from None


def policy_from(data: Any) -> Policy:
    """Validate loaded data as a policy; raises ``MalformedPolicy`` without positions."""
    if not isinstance(data, dict):
        raise MalformedPolicy.with_reason(
            code="wrong_type",
            message="a policy must be a mapping of fields.",
            remedy="Start from one of examples/policies/.",
        )
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        raise MalformedPolicy(*_POLICY.reasons(error, data)) from None


def _adapt_reason(reason: Reason) -> Reason:
    """Replace the remedies of a parser's reason that apply only to plans."""
    if reason.code in ("too_large", "too_deep", "empty"):
        return replace(reason, remedy="Give a policy, such as one of examples/policies/.")
    return reason


_POLICY = DocumentSchema(
    "a policy",
    lambda: (
        {name: f"group_cap.{name}" for name in GroupCap.model_fields}
        | {name: f"caps.NAME.{name}" for name in Caps.model_fields}
        | {name: name for name in Policy.model_fields}
    ),
    "the page on policies",
)


DocumentKind = Literal["policy", "waiver"]

PREDICATE_TYPES: dict[DocumentKind, str] = {
    "policy": "https://affidavit.dev/dp-policy/v1",
    "waiver": "https://affidavit.dev/dp-waiver/v1",
}
MAX_ENVELOPE_BYTES = 1024 * 1024


class BadSignedDocument(Exception):
    """The envelope is not signed, or does not contain the expected document."""


def sign_document(kind: DocumentKind, document: dict[str, Any], key: SigningPort) -> bytes:
    """Sign ``document`` and return the envelope as bytes to store."""
    payload = canonical_json(_statement(kind, document))
    return canonical_json(sign_envelope(payload, key).as_document())


def open_document(kind: DocumentKind, envelope: bytes, key: PublicKey) -> dict[str, Any]:
    """Verify ``envelope`` with ``key`` and return its document; raises ``BadSignedDocument``."""
    try:
        result = read_envelope(load_json(envelope, MAX_ENVELOPE_BYTES).data)
        if result.payload_type != PAYLOAD_TYPE or result.key_id != key.key_id:
            raise BadSignedDocument("the envelope has a different type or key")
        if not key.has_role(KeyRole.CERTIFICATE):
            raise BadSignedDocument("the key is not for certificates and policies")
        if not key.accepts(result.signature, result.signed_bytes):
            raise BadSignedDocument("the signature does not fit")
        statement = load_json(result.payload, MAX_ENVELOPE_BYTES).data
    except (BadEnvelope, MalformedPlan) as error:
        raise BadSignedDocument(str(error)) from None
    if not isinstance(statement, dict) or not isinstance(statement.get("predicate"), dict):
        raise BadSignedDocument(f"the statement is not about a {kind}")
    document: dict[str, Any] = statement["predicate"]
    if statement != _statement(kind, document):
        raise BadSignedDocument(f"the statement is not about this {kind}")
    return document


def _statement(kind: DocumentKind, document: dict[str, Any]) -> dict[str, Any]:
    subject: dict[str, str] = {kind: digest_of(document).removeprefix("sha256:")}
    return in_toto(subject, PREDICATE_TYPES[kind], document)
