"""Plans from keywords: each field of a plan by its own name.

>>> document = with_fields({"version": 1}, sampling="poisson", lot_size=256, delta=1e-5)
>>> document["sampling"], document["target"]
({'scheme': 'poisson', 'lot_size': 256}, {'delta': 1e-05})

A field that occurs in several places is set in all of them: ``noise_multiplier`` in every release,
``steps`` in every phase. Fields that exclude each other replace each other.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, TypeVar

from affidavit.plan.diagnostics import FIELD_SYNONYMS, MalformedPlan, Reason, pointer_to
from affidavit.plan.document import PHASE_FIELDS, Dataset, PlanDocument, Release, Sampling, Target
from affidavit.plan.optimizer import Optimizer
from affidavit.plan.types import StrictModel
from affidavit.plan.vocabulary import Adjacency, Allocation, PrivacyUnit, Scheme

F = TypeVar("F", bound=Callable[..., Any])


class PlanFields(TypedDict, total=False):
    """The fields of a plan that have a unique name.

    ``epsilon`` is in nats, ``delta`` and ``probability`` are probabilities, ``clip_norm`` is in
    l2, ``noise_multiplier`` is the noise standard deviation over the clip norm and ``noise_std``
    that standard deviation, both on the sum. ``size`` and ``lot_size`` are in records. None solves
    for ``steps``, ``lot_size`` or ``probability``; noise is solved for where it is left out.
    """

    name: str
    notes: str
    dataset: str
    size: int
    unit: PrivacyUnit
    contributions_per_user: int
    users_per_record: int
    adjacency: Adjacency
    sampling: Scheme | Mapping[str, Any]
    lot_size: int | None
    probability: float | None
    max_lot_size: int
    groups: int
    separation: int
    participations: int
    bins_drawn: str
    drop_last: bool
    steps: int | None
    epochs: float
    phases: Sequence[Mapping[str, Any]]
    releases: Sequence[Mapping[str, Any]]
    clip_norm: float
    noise_multiplier: float | None
    noise_std: float | None
    dimension: int
    weight: float
    clipping: str
    noise: Mapping[str, Any]
    participation: Mapping[str, Any]
    clip_schedule: Sequence[float]
    allocation: Allocation
    workload: Mapping[str, Any]
    trajectory: str
    canaries: Mapping[str, Any]
    extra: Sequence[Mapping[str, Any]]
    optimizer: str | Mapping[str, Any]
    momentum: float
    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    auxiliary_learning_rate: float
    floor: float
    smoothing: float
    newton_schulz_steps: int
    newton_schulz_degree: int
    newton_schulz_start: str
    probes: int
    kappa: float
    gamma: float
    combine: str
    noise_divisor: str
    error_clip_norm: float
    pre_clip_norm: float
    denoise: bool | Mapping[str, Any]
    epsilon: float | None
    delta: float | None
    target: Mapping[str, Any]
    allow_large_delta: str
    claim: Mapping[str, Any] | float | str


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


def showing_fields(function: F) -> F:
    """Give a function with ``**fields`` a signature that names them, for ``help`` and editors.

    A function of a plan has the adjacency and the sampling from it; others must be given both.
    """
    signature = inspect.signature(function)
    *first, _ = signature.parameters.values()
    needed = () if "source" in signature.parameters else ("adjacency", "sampling")
    named = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind.__forward_arg__,
            default=inspect.Parameter.empty if name in needed else _NotGiven(),
        )
        for name, kind in PlanFields.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*first, *named])  # type: ignore[attr-defined]
    return function


_LIST = "help(affidavit.load)"
Scope = Literal["plan", "phase", "release"]


def _part_fields(
    scope: Scope, part: str, model: type[StrictModel], main: str
) -> dict[str, tuple[Scope, str, str]]:
    """Return the fields of a part, whose ``main`` field is set by the name of the part."""
    return {part: (scope, part, main)} | {
        name: (scope, part, name) for name in model.model_fields if name != main
    }


_PLACES: dict[str, tuple[Scope, str, str]] = {
    **{name: ("plan", "", name) for name in PlanDocument.model_fields if name != "version"},
    **{name: ("release", "", name) for name in Release.model_fields.keys() - {"name", "count"}},
    **{name: ("phase", "", name) for name in PHASE_FIELDS - {"sampling"}},
    **_part_fields("phase", "sampling", Sampling, "scheme"),
    **_part_fields("plan", "target", Target, ""),
    **_part_fields("plan", "optimizer", Optimizer, "name"),
    **_part_fields("plan", "dataset", Dataset, "name"),
}
"""For each field: whether it belongs to the plan, a phase or a release, its part, and its name."""
_OWNERS = {"plan": "plan", "phase": "plan.phases[0]", "release": "plan.phases[0].releases[0]"}


def hint_for_attribute(name: str) -> str:
    """Return where a plan has a field by the name of its keyword, or "".

    >>> hint_for_attribute("lot_size"), hint_for_attribute("sigma")
    (' See plan.phases[0].sampling.lot_size.', ' See plan.phases[0].releases[0].noise_multiplier.')
    """
    field = FIELD_SYNONYMS.get(name, name)
    if field not in _PLACES:
        near = difflib.get_close_matches(name, _PLACES, n=1)
        return hint_for_attribute(near[0]) if near else ""
    scope, *parts = _PLACES[field]
    return f" See {'.'.join([_OWNERS[scope], *filter(None, parts)])}."


_REPLACES = {
    "steps": "epochs",
    "epochs": "steps",
    "lot_size": "probability",
    "probability": "lot_size",
    "noise_multiplier": "noise_std",
    "noise_std": "noise_multiplier",
}


def with_fields(document: Mapping[str, Any], /, **fields: Any) -> dict[str, Any]:
    """Return a copy of the plan ``document`` with ``fields`` set; None unsets noise or a target.

    Raises ``MalformedPlan`` for an unknown name.
    """
    result = copy.deepcopy(dict(document))
    phases: list[dict[str, Any]] = result.get("phases", [result])
    for name, value in fields.items():
        if name not in _PLACES:
            raise _unknown(name)
        scope, part, field = _PLACES[name]
        owners = {
            "plan": [result],
            "phase": phases,
            "release": [release for phase in phases for release in phase.get("releases", ())],
        }
        for owner in owners[scope]:
            if part:
                _set_part(owner, part, field, value)
            else:
                _set(owner, field, value)
    return result


def _set_part(whole: dict[str, Any], part: str, field: str, value: Any) -> None:
    """Set a field of a part of the document, or the whole part if ``value`` is a mapping."""
    if isinstance(value, Mapping) and field in ("name", "scheme", ""):
        whole[part] = dict(value)
    else:
        whole[part] = dict(whole.get(part) or {})
        _set(whole[part], field, value)


def _set(part: dict[str, Any], field: str, value: Any) -> None:
    part.pop(_REPLACES.get(field, ""), None)
    if value is None and field not in ("steps", "lot_size", "probability"):
        part.pop(field, None)
    else:
        part[field] = value


def in_keywords(error: MalformedPlan) -> MalformedPlan:
    """Return ``error`` in the words of a call: fields as keywords, and no command.

    >>> reason = Reason(code="missing_field", pointer="/target", message="", remedy="")
    >>> in_keywords(MalformedPlan(reason)).reasons[0].message
    'delta= is missing.'
    """
    return MalformedPlan(*map(_in_keywords, error.reasons))


_KEYWORDS = {"/target": "delta", "/sampling/scheme": "sampling", "/dataset/name": "dataset"}
"""The keyword of a field whose name in a plan is another."""


def _in_keywords(reason: Reason) -> Reason:
    name = _KEYWORDS.get(reason.pointer) or reason.pointer.rpartition("/")[2]
    if reason.code == "missing_field" and name in PlanFields.__annotations__:
        return replace(
            reason,
            message=f"{name}= is missing.",
            remedy=f"Give it, as a keyword; {_LIST} lists the fields.",
        )
    if reason.pointer == "/noise" and reason.code == "wrong_type":
        return replace(reason, remedy="Did you mean noise_multiplier=? noise= is its kind.")
    shown = r"`affidavit schema[^`]*` (shows what it may be|lists the values of each field)"
    return replace(reason, remedy=re.sub(shown, f"{_LIST} lists the fields", reason.remedy))


def _unknown(name: str) -> MalformedPlan:
    names = sorted(PlanFields.__annotations__)
    near = (
        [FIELD_SYNONYMS[name]]
        if name in FIELD_SYNONYMS
        else difflib.get_close_matches(name, names, n=1)
    )
    return MalformedPlan.with_reason(
        code="unknown_field",
        pointer=pointer_to(name),
        message=f"{name[:80]} is not a field of a plan.",
        remedy=f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(names)}.",
    )
