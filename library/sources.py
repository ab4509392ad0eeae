"""Plans from what an engineer has at hand.

``load`` reads a plan, its document, YAML or JSON text, a file, an event of dp-accounting, an
accountant or ``PrivacyEngine`` of Opacus, and a configuration of jax-privacy. What the objects of
other libraries do not say (the adjacency, the sampling, the target) must be given, and what they
say cannot be contradicted.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from affidavit.gate import read_bytes
from affidavit.importers import Partial, imported_document
from affidavit.mechanisms import attach
from affidavit.plan import (
    MalformedPlan,
    Plan,
    PlanFields,
    Reason,
    Syntax,
    as_document,
    load_json,
    load_yaml,
    locate_in_json,
    located,
    plan_from,
    syntax_of,
    with_fields,
)

Source = Plan | Mapping[str, Any] | str | bytes | os.PathLike[str] | Any
"""What ``load`` reads; text is YAML or JSON, and a text of one line without a colon is a path."""


def load(source: Source, /, **fields: Unpack[PlanFields]) -> Plan:
    """The plan that ``source`` says, with ``fields`` set (units as in ``PlanFields``).

    Files that a plan names are read relative to it. Raises ``MalformedPlan`` with every reason,
    and with positions where there is a text.
    """
    fields = _numbers(fields)
    if isinstance(source, Plan):
        return plan_from(with_fields(as_document(source), **fields)) if fields else source
    if isinstance(source, str | bytes | os.PathLike):
        return _read(source, fields)
    plan = _of_document(_document_of(source), fields)
    attach(plan, Path())
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
    document = load_json(raw) if syntax == "json" else load_yaml(raw)
    try:
        plan = _of_document(document.data, fields)
        attach(plan, folder)
    except MalformedPlan as error:
        raise MalformedPlan(*_placed(error, raw, syntax)) from None
    return plan


def _placed(error: MalformedPlan, raw: bytes, syntax: Syntax) -> tuple[Reason, ...]:
    places = load_yaml(raw) if syntax == "yaml" else locate_in_json(raw)
    return located(error.reasons, places)


def _of_document(document: Any, fields: PlanFields) -> Plan:
    partial = imported_document(document)
    if partial is None:
        if isinstance(document, Mapping):
            document = with_fields(document, **fields) if fields else dict(document)
        return plan_from(document)
    return plan_from(_completed(partial, fields))


def _completed(partial: Partial, fields: PlanFields) -> dict[str, Any]:
    """The document of another library with ``fields``, which cannot contradict it."""
    return partial.completed(with_fields({}, **fields), partial.kind)


def _document_of(source: Any) -> Any:
    """Another library's object as the document that an importer reads."""
    if isinstance(source, Mapping):
        return _numbers(source)
    if hasattr(source, "to_named_tuple"):
        return _plain(source.to_named_tuple())
    if dataclasses.is_dataclass(source) and hasattr(source, "sampling_prob"):
        return _configuration(source)
    source = getattr(source, "accountant", source)
    if hasattr(source, "state_dict") and hasattr(source, "mechanism"):
        return _plain(source.state_dict())
    raise MalformedPlan(
        Reason(
            code="wrong_type",
            pointer="",
            message=f"{type(source).__name__} cannot be read as a plan.",
            remedy="Give a plan, a document, a text, a path, or an object of dp-accounting, "
            "Opacus or jax-privacy.",
        )
    )


def _configuration(source: Any) -> dict[str, Any]:
    """The fields of jax-privacy's configuration; arrays as lists, objects by their relation."""
    document = {}
    for field in dataclasses.fields(source):
        value = getattr(source, field.name)
        if field.name == "accountant" and value is not None:
            value = {"neighboring_relation": str(value.neighboring_relation)}
        document[field.name] = _plain(value)
    return document


def _numbers(value: Any) -> Any:
    """``value`` with Python's own numbers and lists in place of NumPy's."""
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
