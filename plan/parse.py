"""Parsing: from text to a plan, or to reasons with the field, the line and the remedy.

>>> plan = parse_plan(b'''
... version: 1
... dataset: {size: 60000}
... adjacency: add_remove
... sampling: {scheme: poisson, lot_size: 256}
... epochs: 15
... releases: [{name: all, clip_norm: 1, noise_multiplier: 1.1}]
... target: {delta: 1.0e-5}
... ''', "yaml")
>>> plan.phases[0].sampling.lot_size
256
"""

from __future__ import annotations

import difflib
import html
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Unpack

from pydantic import ValidationError, model_validator

from affidavit.plan.diagnostics import DocumentSchema, MalformedPlan, Reason, pointer_to
from affidavit.plan.document import PHASE_FIELDS, PlanDocument
from affidavit.plan.fields import (
    PlanFields,
    hint_for_attribute,
    in_keywords,
    showing_fields,
    with_fields,
)
from affidavit.plan.published_schema import referenced_models
from affidavit.plan.strict_parsing import Document, Path, Syntax, load_json, load_yaml
from affidavit.plan.validators import find_conflicts

_KEYWORDS = PlanFields.__annotations__


def _suggestion(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]}?" if near else ""


class _PlanClass(type(PlanDocument)):  # type: ignore[misc]  # pydantic's own class is private
    """The class of ``Plan``, which suggests a name for one that it does not have."""

    def __getattr__(cls, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):  # Python and pydantic ask for many that are not there
                raise
            names = [known for known in vars(cls) if not known.startswith("_")]
            field = next(iter(difflib.get_close_matches(name, [*_KEYWORDS, *names], n=1)), "")
            hint = f" Give {field}= to Plan.dp_sgd, for example." if field in _KEYWORDS else ""
            message = f"Plan has no attribute {name!r}.{hint or _suggestion(name, names)}"
            raise AttributeError(message, name=name, obj=None) from None


class Plan(PlanDocument, metaclass=_PlanClass):
    """A training plan. A document with the fields of a phase at the top has one phase."""

    def __repr__(self) -> str:
        return f"<Plan {', '.join(self._summary())}>"

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]  # pydantic shows it at run time
        except AttributeError:
            hint = hint_for_attribute(name)
            message = f"a plan has no attribute {name!r}.{hint}"
            raise AttributeError(message, name=name, obj=None) from None

    def _repr_html_(self) -> str:
        """Return the summary and the whole plan, folded, for a notebook."""
        document = self.model_dump_json(indent=2, exclude_unset=True)
        summary = html.escape(", ".join(self._summary()))
        return (
            f"<details><summary>Plan: {summary}</summary>"
            f"<pre>{html.escape(document)}</pre></details>"
        )

    def _summary(self) -> Iterator[str]:
        if self.name is not None:
            yield repr(self.name)
        for phase in self.phases:
            length = "steps solved for" if phase.steps is None else f"{phase.steps} steps"
            if phase.epochs is not None:
                length = f"{phase.epochs:g} epochs"
            yield f"{phase.sampling.scheme}, {length}"
        target = {"ε": self.target.epsilon, "δ": self.target.delta}
        for name, value in target.items():
            if value is not None:
                yield f"{name} = {value:g}".replace("e-0", "e-")

    @classmethod
    @showing_fields
    def dp_sgd(cls, **fields: Unpack[PlanFields]) -> Plan:
        """Return a plan of DP-SGD with one release per step, clipped to 1 by default.

        The fields are those of ``PlanFields``, in its units. The sampling scheme and the adjacency
        have no default, because every number depends on them. Raises ``MalformedPlan``.

        >>> plan = Plan.dp_sgd(adjacency="add_remove", sampling="poisson", size=60000,
        ...     lot_size=256, epochs=15, noise_multiplier=1.1, delta=1e-5)
        >>> plan.phases[0].releases[0].clip_norm
        1.0
        """
        return _build("dp_sgd", {"all": 1}, fields)

    @classmethod
    @showing_fields
    def dp_adam(cls, **fields: Unpack[PlanFields]) -> Plan:
        """Return a plan of DP-Adam, like ``dp_sgd``; raises ``MalformedPlan``."""
        return _build("dp_adam", {"all": 1}, fields)

    @classmethod
    @showing_fields
    def dp_muon(cls, *, blocks: int | Mapping[str, int], **fields: Unpack[PlanFields]) -> Plan:
        """Return a plan of DP-Muon, which clips and noises each block of a step by itself.

        ``blocks`` is their number, or a number for each name. Other fields are as in ``dp_sgd``;
        ``clip_norm`` and ``noise_multiplier`` apply to every block. Raises ``MalformedPlan``.
        """
        return _build("dp_muon", {"all": blocks} if isinstance(blocks, int) else blocks, fields)

    @model_validator(mode="after")
    def _validate_consistency(self) -> Plan:
        if reasons := find_conflicts(self):
            raise MalformedPlan(*reasons)
        return self


def _build(optimizer: str, counts: Mapping[str, int], fields: PlanFields) -> Plan:
    releases = [{"name": name, "count": count, "clip_norm": 1.0} for name, count in counts.items()]
    start = {"version": 1, "optimizer": {"name": optimizer}, "releases": releases}
    try:
        return plan_from(with_fields(start, **fields))
    except MalformedPlan as error:
        raise in_keywords(error) from None


def parse_plan(raw: bytes, syntax: Syntax) -> Plan:
    """Parse a plan; raises ``MalformedPlan`` with every reason."""
    document = load_yaml(raw) if syntax == "yaml" else load_json(raw)
    try:
        return plan_from(document.data)
    except MalformedPlan as error:
        raise MalformedPlan(*locate_in_document(error.reasons, document)) from None


def locate_in_text(reasons: tuple[Reason, ...], raw: bytes, syntax: Syntax) -> tuple[Reason, ...]:
    """Return ``reasons`` about an accepted plan with their line and column in its text."""
    return locate_in_document(reasons, load_yaml(raw) if syntax == "yaml" else load_json(raw))


def plan_from(data: Any) -> Plan:
    """Return the plan of parsed ``data``; raises ``MalformedPlan`` without positions."""
    if not isinstance(data, dict):
        raise MalformedPlan.with_reason(
            code="wrong_type",
            message="a plan must be a mapping of fields.",
            remedy="Write a first plan with `affidavit init`.",
        )
    if "phases" in data and (both := sorted(PHASE_FIELDS & data.keys())):
        raise MalformedPlan.with_reason(
            code="conflict",
            pointer=pointer_to(both[0]),
            message=f"{both[0]} and phases are both given.",
            remedy="Move it into each phase, or remove phases.",
        )
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        raise MalformedPlan(*_PLAN.reasons(error, data)) from None


def locate_in_document(reasons: tuple[Reason, ...], document: Document) -> tuple[Reason, ...]:
    """Return ``reasons`` with the line and column of their pointers in ``document``."""
    return tuple(
        reason
        if reason.line is not None
        else document.locate(reason, _split_pointer(reason.pointer))
        for reason in reasons
    )


def _split_pointer(pointer: str) -> Path:
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])


@cache
def _field_paths() -> dict[str, str]:
    """Return the path of each field of a plan, such as ``sampling.scheme``, the outermost first."""
    schema = Plan.model_json_schema(ref_template="{model}")
    parts: dict[str, Any] = schema["$defs"]
    paths: dict[str, str] = {}
    level = [("", parts["Phase"]), ("", schema)]
    while level:
        deeper: list[tuple[str, Any]] = []
        for prefix, part in level:
            for name, field in part.get("properties", {}).items():
                if name not in paths:
                    paths[name] = prefix + name
                    below = referenced_models(field)
                    deeper += [(f"{prefix}{name}.", parts[reference]) for reference in below]
        level = deeper
    return paths


_PLAN = DocumentSchema("a plan", _field_paths, "`affidavit schema`")
