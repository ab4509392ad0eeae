"""Functions that answer questions about a plan with proved bounds.

``load`` reads a plan, its document, YAML or JSON text, a file, an event of dp-accounting, an
accountant or ``PrivacyEngine`` of Opacus, and a configuration of jax-privacy. Fields that the
object of another library lacks (the adjacency, the sampling, the target) must be given; fields that
it has cannot be contradicted.

>>> plan = {"version": 1, "adjacency": "add_remove", "sampling": {"scheme": "full_batch"},
...     "steps": 10, "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
...     "target": {"delta": 1e-5}}
>>> f"{epsilon(plan):.4f}", f"{epsilon(plan, delta=1e-6):.4f}"
('0.5613', '0.6482')
>>> noise_multiplier(plan, epsilon=1.0), steps(plan, epsilon=1.0)
(11.79741, 28)
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import numpy as np

from affidavit.assessment import (
    PlanComparison,
    compare_plans,
    group_bound,
)
from affidavit.assessment import certify as assess
from affidavit.certificate import VerificationOptions, VerifiedCertificate
from affidavit.certificate import verify as verify_bundle
from affidavit.importers import import_document
from affidavit.library.certification import (
    Bound,
    Certification,
    Curve,
    NotCertified,
    bound_of,
    curve_of,
)
from affidavit.mechanisms import load_noise_files, other_file, read_bytes
from affidavit.plan import (
    Adjacency,
    MalformedPlan,
    Plan,
    PlanFields,
    Target,
    as_document,
    in_keywords,
    load_json,
    load_yaml,
    locate_in_document,
    plan_from,
    showing_fields,
    syntax_of,
    with_fields,
)
from affidavit.trust import TrustedKeys, trusted_or_own

if TYPE_CHECKING:
    from affidavit.assessment.diagnose import Diagnosis


Source = Plan | Mapping[str, Any] | str | bytes | os.PathLike[str] | Any
"""The input of ``load``. A string is YAML or JSON text; one line without a colon is a path."""


@showing_fields
def load(source: Source, /, **fields: Unpack[PlanFields]) -> Plan:
    """Read a plan, and set ``fields`` in it (units as in ``PlanFields``).

    Files that a plan names are relative to it. Raises ``MalformedPlan`` with all reasons, which
    have positions if the source is text, and name the keyword that is missing if it is none.
    """
    fields = _numbers(fields)
    if isinstance(source, str | bytes | os.PathLike):
        return _read(source, fields)
    try:
        if isinstance(source, Plan):
            return plan_from(with_fields(as_document(source), **fields)) if fields else source
        plan = _of_document(_document_of(source), fields)
    except MalformedPlan as error:
        raise in_keywords(error) from None
    load_noise_files(plan, Path())
    return plan


def _read(source: str | bytes | os.PathLike[str], fields: PlanFields) -> Plan:
    folder = Path()
    if isinstance(source, bytes):
        raw, syntax = source, syntax_of("", source)
    elif isinstance(source, str) and ("\n" in source or ":" in source.rpartition(os.sep)[2]):
        raw = source.encode()
        syntax = syntax_of("", raw)
    else:
        path = Path(source)
        raw, folder = read_bytes(path), path.parent
        syntax = syntax_of(path.name.lower(), raw)
    name = "" if isinstance(source, bytes) else os.fspath(source)
    document = load_json(raw) if syntax == "json" else load_yaml(raw)
    try:
        plan = _of_document(document.data, fields)
        load_noise_files(plan, folder)
    except MalformedPlan as error:
        reasons = locate_in_document(error.reasons, document)
        raise other_file(name, raw) or MalformedPlan(*reasons) from None
    return plan


def _of_document(document: Any, fields: PlanFields) -> Plan:
    partial = import_document(document)
    if partial is not None:
        document = partial.completed(with_fields({}, **fields), partial.kind)
    elif isinstance(document, Mapping):
        document = with_fields(document, **fields) if fields else dict(document)
    return plan_from(document)


def _document_of(source: Any) -> Any:
    """Return the object of another library as the document that an importer reads."""
    if isinstance(source, Mapping):
        return _numbers(source)
    if hasattr(source, "to_named_tuple"):
        return _plain(source.to_named_tuple())
    if dataclasses.is_dataclass(source) and hasattr(source, "sampling_prob"):
        return _configuration(source)
    source = getattr(source, "accountant", source)
    if hasattr(source, "state_dict") and hasattr(source, "mechanism"):
        return _plain(source.state_dict())
    raise MalformedPlan.with_reason(
        code="wrong_type",
        message=f"{type(source).__name__} cannot be read as a plan.",
        remedy="Give a plan, a document, a text, a path, or an object of dp-accounting, "
        "Opacus or jax-privacy.",
    )


def _configuration(source: Any) -> dict[str, Any]:
    """Return the fields of jax-privacy's configuration, with arrays as lists."""
    document = {}
    for field in dataclasses.fields(source):
        value = getattr(source, field.name)
        if field.name == "accountant" and value is not None:
            value = {"neighboring_relation": str(value.neighboring_relation)}
        document[field.name] = _plain(value)
    return document


def _numbers(value: Any) -> Any:
    """Replace NumPy's numbers and arrays in ``value`` by Python's."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    return value if isinstance(value, str | int | float | bool | None) else str(value)


Answer = TypeVar("Answer")

LARGE_DELTA_REASON = "δ is the result here; do not give delta."
"""Reason to allow a δ of 1/N or more when δ is computed."""


@showing_fields
def certify(
    source: Source,
    /,
    *,
    engine: str | None = None,
    second_opinion: bool = True,
    **fields: Unpack[PlanFields],
) -> Certification:
    """Certify a plan, and solve for its unknowns.

    ``fields`` are set in the plan first. ``engine`` names one accountant. A refused plan does not
    raise: check ``verdict``, or call ``require()``. Raises ``MalformedPlan``, and ``ValueError``
    for an unknown ``engine``.
    """
    plan = load(source, **fields)
    return Certification(plan, assess(plan, engine=engine, second_opinion=second_opinion))


@showing_fields
def check(source: Source, /, **fields: Unpack[PlanFields]) -> Certification:
    """Certify a plan before it runs; raises ``NotCertified`` and ``MalformedPlan``."""
    return certify(source, second_opinion=False, **fields).require()


@showing_fields
def epsilon(source: Source, /, *, engine: str | None = None, **fields: Unpack[PlanFields]) -> Bound:
    """Return the least proved ε in nats at the plan's δ, or at ``delta``.

    Raises ``NotCertified`` if nothing may be claimed, and ``MalformedPlan``.
    """
    plan = load(source, **fields)
    if (at := plan.target.delta) is None:
        plan = load(plan, target={})  # raises, with the remedy
    if not plan.is_open and plan.target.epsilon is not None:
        plan = plan.model_copy(update={"target": Target(delta=at)})
    answer = Certification(plan, assess(plan, engine=engine, second_opinion=False))
    return _answered(answer, answer.epsilon)


@showing_fields
def group_epsilon(
    source: Source,
    /,
    *,
    records: int = 1,
    relation: Adjacency | None = None,
    **fields: Unpack[PlanFields],
) -> Bound:
    """Return ε in nats for data sets that differ in up to ``records`` records, at the plan's δ.

    They differ by ``relation``, by default the plan's adjacency, and the run then has the
    obligations of a plan of that adjacency. If the unit is a user, ``records`` counts users. The
    plan's unknowns are solved for neighbours that differ in one record.

    Raises ``NotCertified`` if nothing may be claimed, ``MalformedPlan``, and ``ValueError`` for
    less than one record.

    >>> plan = {"version": 1, "adjacency": "zero_out", "sampling": {"scheme": "full_batch"},
    ...     "steps": 1, "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 2}],
    ...     "target": {"delta": 1e-6}}
    >>> f"{group_epsilon(plan):.3f}", f"{group_epsilon(plan, records=2):.3f}"
    ('2.255', '4.887')
    >>> group_epsilon(plan, relation="replace_one") == group_epsilon(plan, records=2)
    True
    """
    if records < 1:
        raise ValueError(f"records must be at least 1, got {records!r}")
    plan = load(source, **fields)
    if plan.is_open:
        plan = certify(plan, second_opinion=False).plan
    if plan.target.delta is None:
        raise ValueError("ε needs a δ: give delta.")
    bound = group_bound(plan, plan.target.delta, records, relation or plan.adjacency)
    if bound.epsilon is None:
        refused = replace(assess(plan), verdict="refused", reasons=bound.reasons, epsilon=None)
        raise NotCertified(Certification(plan, refused))
    return bound_of(bound.epsilon, None if bound.confidence is None else bound.confidence.level)


@showing_fields
def delta(source: Source, /, *, engine: str | None = None, **fields: Unpack[PlanFields]) -> Bound:
    """Return the least proved δ at the plan's ε, or at ``epsilon`` nats; it may be 1/N or more.

    Raises ``NotCertified`` if nothing may be claimed, and ``MalformedPlan``.
    """
    plan = load(source, **fields)
    at = plan.target.epsilon
    plan = load(
        plan, target={} if at is None else {"epsilon": at}, allow_large_delta=LARGE_DELTA_REASON
    )
    answer = Certification(plan, assess(plan, engine=engine, second_opinion=False))
    return _answered(answer, answer.delta)


@showing_fields
def noise_multiplier(source: Source, /, **fields: Unpack[PlanFields]) -> float:
    """Return the least noise multiplier, in clip norms, that meets the target (ε in nats).

    The plan's own noise is ignored. Raises ``NotCertified`` if no noise meets the target,
    ``ValueError`` if the releases need different noise, and ``MalformedPlan``.
    """
    plan = load(source, **fields)
    answer = certify(plan, second_opinion=False, noise_multiplier=None, noise_std=None).require()
    if answer.noise_multiplier is None:
        raise ValueError(
            f"the releases need different noise, {answer.noise_multipliers}: "
            "use certify(plan).noise_multipliers."
        )
    return answer.noise_multiplier


@showing_fields
def steps(source: Source, /, **fields: Unpack[PlanFields]) -> int:
    """Return the largest number of steps that meets the target (ε in nats).

    Raises ``NotCertified`` if one step is too many, and ``MalformedPlan``.
    """
    answer = certify(load(source, **fields), second_opinion=False, steps=None).require()
    return _answered(answer, answer.steps)


def compare(first: Source, second: Source, /) -> PlanComparison:
    """Compare two plans field by field, each change alone, and rank their guarantees.

    Raises ``MalformedPlan``.
    """
    return compare_plans(load(first), load(second))


@showing_fields
def diagnose(
    source: Source,
    /,
    *,
    claimed_epsilon: float | str | None = None,
    claimed_noise_multiplier: float | str | None = None,
    **fields: Unpack[PlanFields],
) -> Diagnosis:
    """Find the known mistakes that lead from a plan to a claimed ε (nats) or noise multiplier.

    A string keeps its digits ("7.9800"). The default is the plan's claim. Raises ``ValueError``
    unless there is exactly one claim, and ``MalformedPlan``.
    """
    from affidavit.assessment.diagnose import diagnose as diagnose_claim

    if claimed_epsilon is not None or claimed_noise_multiplier is not None:
        fields["claim"] = {
            "epsilon": claimed_epsilon,
            "noise_multiplier": claimed_noise_multiplier,
        }
    plan = load(source, **fields)
    claim = plan.claim
    if claim is None or (claim.epsilon is None) == (claim.noise_multiplier is None):
        raise ValueError("give claimed_epsilon or claimed_noise_multiplier.")
    return diagnose_claim(plan, claim)


@showing_fields
def curve(source: Source, /, *, engine: str | None = None, **fields: Unpack[PlanFields]) -> Curve:
    """Return the whole guarantee: ε at any δ, attack success and beliefs.

    Raises ``NotCertified`` if nothing may be claimed, and ``MalformedPlan``.
    """
    return curve_of(load(source, **fields), engine=engine)


def verify(
    bundle: bytes | str | os.PathLike[str] | Mapping[str, Any],
    *,
    plan: Source | None = None,
    trusted: TrustedKeys | None = None,
    options: VerificationOptions | None = None,
) -> VerifiedCertificate:
    """Verify a certificate offline; ``predicate["verdict"]`` of the result is its verdict.

    ``bundle`` is its bytes, its document or a path. ``trusted`` are keys and the policy under which
    they are trusted (``affidavit.keys.trusted``), by default the keys of this machine. Raises
    ``VerificationError`` with the failing step, ``KeyFailure`` and ``OSError``.
    """
    if isinstance(bundle, Mapping):
        raw = json.dumps(bundle, ensure_ascii=False).encode()
    else:
        raw = bundle if isinstance(bundle, bytes) else Path(bundle).read_bytes()
    expected: Plan | None = None if plan is None else load(plan)
    return verify_bundle(raw, trusted_or_own(trusted), plan=expected, options=options)


def _answered(certification: Certification, answer: Answer | None) -> Answer:
    if answer is None:
        raise NotCertified(certification)
    return answer
