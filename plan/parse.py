"""From text to a plan, or to reasons that name the field, the line and the remedy.

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

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Unpack

from pydantic import ValidationError, model_validator

from affidavit.plan.diagnostics import Kind, MalformedPlan, Reason, pointer_to
from affidavit.plan.document import PHASE_FIELDS, PlanDocument
from affidavit.plan.fields import PlanFields, with_fields
from affidavit.plan.strict_parsing import Document, Path, load_json, load_yaml
from affidavit.plan.validators import contradictions

Syntax = Literal["json", "yaml"]


class Plan(PlanDocument):
    """A training plan; a document with its phase's fields at the top has one phase."""

    @classmethod
    def dp_sgd(cls, **fields: Unpack[PlanFields]) -> Plan:
        """A plan of DP-SGD with one release a step, clipped to 1 unless ``clip_norm`` is given.

        The fields are those of ``PlanFields``, in its units. The sampling scheme and the
        adjacency have no default, because every number rests on them. Raises ``MalformedPlan``.

        >>> plan = Plan.dp_sgd(adjacency="add_remove", sampling="poisson", size=60000,
        ...     lot_size=256, epochs=15, noise_multiplier=1.1, delta=1e-5)
        >>> plan.phases[0].releases[0].clip_norm
        1.0
        """
        return _built("dp_sgd", {"all": 1}, fields)

    @classmethod
    def dp_adam(cls, **fields: Unpack[PlanFields]) -> Plan:
        """A plan of DP-Adam, as ``dp_sgd``; raises ``MalformedPlan``."""
        return _built("dp_adam", {"all": 1}, fields)

    @classmethod
    def dp_muon(cls, *, blocks: int | Mapping[str, int], **fields: Unpack[PlanFields]) -> Plan:
        """A plan of DP-Muon, whose ``blocks`` of a step are clipped and noised each by itself.

        ``blocks`` is their number, or a number for each name. Other fields as in ``dp_sgd``;
        ``clip_norm`` and ``noise_multiplier`` are those of every block. Raises ``MalformedPlan``.
        """
        return _built("dp_muon", {"all": blocks} if isinstance(blocks, int) else blocks, fields)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Plan:
        if reasons := contradictions(self):
            raise MalformedPlan(*reasons)
        return self


def _built(optimizer: str, counts: Mapping[str, int], fields: PlanFields) -> Plan:
    releases = [{"name": name, "count": count, "clip_norm": 1.0} for name, count in counts.items()]
    start = {"version": 1, "optimizer": {"name": optimizer}, "releases": releases}
    return plan_from(with_fields(start, **fields))


def syntax_of(name: str, raw: bytes) -> Syntax:
    """The syntax of a file by its suffix, or by its first character when it has none."""
    if name.endswith((".yaml", ".yml")):
        return "yaml"
    return "json" if name.endswith(".json") or raw.lstrip()[:1] in (b"{", b"[") else "yaml"


def parse_plan(raw: bytes, syntax: Syntax) -> Plan:
    """The plan that ``raw`` says; raises ``MalformedPlan`` with every reason found."""
    document = load_yaml(raw) if syntax == "yaml" else load_json(raw)
    try:
        return plan_from(document.data)
    except MalformedPlan as error:
        raise MalformedPlan(*locate_in_document(error.reasons, document)) from None


def locate_in_text(reasons: tuple[Reason, ...], raw: bytes, syntax: Syntax) -> tuple[Reason, ...]:
    """``reasons`` about an accepted plan, with line and column in the text it came from."""
    return locate_in_document(reasons, load_yaml(raw) if syntax == "yaml" else load_json(raw))


def plan_from(data: Any) -> Plan:
    """The plan of an already loaded tree; raises ``MalformedPlan`` without positions."""
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


def locate_in_document(reasons: tuple[Reason, ...], places: Document) -> tuple[Reason, ...]:
    """``reasons`` with the line and column of their pointers in ``places``."""
    return tuple(
        reason if reason.line is not None else places.locate(reason, _path_of(reason.pointer))
        for reason in reasons
    )


def _path_of(pointer: str) -> Path:
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])


@cache
def _places() -> dict[str, str]:
    """Where each field of a plan stands: ``sampling.scheme``; the outermost where several do."""
    schema = Plan.model_json_schema(ref_template="{model}")
    parts: dict[str, Any] = schema["$defs"]
    places: dict[str, str] = {}
    level = [("", parts["Phase"]), ("", schema)]
    while level:
        deeper: list[tuple[str, Any]] = []
        for prefix, part in level:
            for name, field in part.get("properties", {}).items():
                if name not in places:
                    places[name] = prefix + name
                    below = referenced_models(field)
                    deeper += [(f"{prefix}{name}.", parts[reference]) for reference in below]
        level = deeper
    return places


def referenced_models(schema: Any) -> list[str]:
    """The names of the models that a part of a schema refers to, however deep."""
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
        return own + [name for part in schema.values() for name in referenced_models(part)]
    parts = schema if isinstance(schema, list) else []
    return [name for part in parts for name in referenced_models(part)]


_PLAN = Kind("a plan", _places, "`affidavit schema`")
