"""Import dp-accounting's ``DpEvent`` as JSON: named tuples with ``class_name`` and fields.

Only listed kinds are read. Classes that a document names are never imported.

A Poisson sample of several Gaussians is one joint release of a step. Gaussians composed outside a
sample are separate steps, and each random allocation is a phase. An outermost
``RepeatAndSelectDpEvent`` repeats the whole run. An event has no clip norm (noise multipliers are
relative to it), no adjacency, data set size or target. It must have all fields of its kind and no
others.
"""

from __future__ import annotations

import math
from typing import Any

from affidavit.importers.names import load_facts
from affidavit.importers.partial_plan import (
    PartialPlan,
    not_imported,
    require_known_fields,
    require_positive,
    require_positive_integer,
    require_probability,
)

DOCUMENT_KIND = "DpEvent"
_KINDS = load_facts("dp_events.toml")
EVENT_FIELDS: dict[str, list[str]] = _KINDS["fields"]
"""The fields of each supported kind of event."""
DP_EVENT_REMEDIES: dict[str, str] = _KINDS["remedies"]
"""Remedies for the kinds of events that are not supported."""
MAX_PARTS = 1000
MAX_COUNT = 10**9

Phase = dict[str, Any]


def recognises(document: Any) -> bool:
    """Whether a document is a ``DpEvent``."""
    return isinstance(document, dict) and str(document.get("class_name", "")).endswith("DpEvent")


def read(document: dict[str, Any]) -> PartialPlan:
    """Read the phases of the event; raises ``MalformedPlan``."""
    phases: list[Phase] = []
    extra: list[dict[str, Any]] = []
    repeats = _name(document) == "RepeatAndSelectDpEvent"
    _walk(document["event"] if repeats else document, 1, phases, extra, depth=0)
    if repeats:
        extra = [release | {"each_repetition": True} for release in extra]
        extra.append(_selection(document))
    if not phases:
        raise not_imported(
            DOCUMENT_KIND,
            "it has no Gaussian event.",
            "Account for it with affidavit.PrivacyAccountant; plans describe training.",
        )
    assumed = [
        "DpEvent: noise multipliers are taken as noise over the clip norm, and the clip norm as 1.",
        "DpEvent: releases that are composed outside a sample are taken as separate steps.",
    ]
    if any(phase["sampling"]["scheme"] == "fixed_size" for phase in phases):
        assumed.append(
            "DpEvent: noise without replacement is taken over the clip norm too, not over the "
            "distance of a replacement, which is twice that."
        )
    data: dict[str, Any] = {"phases": phases} if len(phases) > 1 else dict(phases[0])
    sizes = {phase.pop("_size") for phase in phases if "_size" in phase}
    data.pop("_size", None)
    if len(sizes) > 1:
        raise not_imported(
            DOCUMENT_KIND, "its samples are of several data sets.", "Write a plan instead."
        )
    if sizes:
        data["dataset"] = {"size": sizes.pop()}
    if extra:
        data["extra"] = extra
    return PartialPlan(kind=DOCUMENT_KIND, data=data, assumed=tuple(assumed))


def _walk(
    event: Any, times: int, phases: list[Phase], extra: list[dict[str, Any]], depth: int
) -> None:
    name = _name(event)
    if depth > 16 or len(phases) + len(extra) > MAX_PARTS:
        raise not_imported(
            DOCUMENT_KIND, "it is nested too deeply, or too long.", "Write a plan instead."
        )
    match name:
        case "NoOpDpEvent":
            return
        case "ComposedDpEvent":
            for part in _list(event):
                _walk(part, times, phases, extra, depth + 1)
        case "SelfComposedDpEvent":
            _walk(event["event"], times * _iterations(event), phases, extra, depth + 1)
        case "GaussianDpEvent":
            phases.append(_phase({"scheme": "full_batch"}, times, [_release(event, 1, 0)]))
        case "LaplaceDpEvent":
            number = f"laplace-{len(extra)}"
            extra.append(
                {
                    "kind": "laplace",
                    "name": number,
                    "noise_multiplier": _noise(event),
                    "count": times,
                }
            )
        case "PoissonSampledDpEvent":
            sampling = {"scheme": "poisson", "probability": _probability(event)}
            phases.append(_phase(sampling, times, _releases(event["event"], 1)))
        case "SampledWithoutReplacementDpEvent":
            sampling = {"scheme": "fixed_size", "lot_size": _count(event, "sample_size")}
            phase = _phase(sampling, times, _releases(event["event"], 1))
            phases.append(phase | {"_size": _count(event, "source_dataset_size")})
        case "RandomAllocationDpEvent":
            sampling = {
                "scheme": "random_allocation",
                "participations": _count(event, "num_selected"),
            }
            phase = _phase(sampling, _count(event, "num_steps"), _releases(event["event"], 1))
            phases.extend(dict(phase) for _ in range(min(times, MAX_PARTS + 1)))  # drawn each time
        case "TruncatedSubsampledGaussianDpEvent":
            sampling = {
                "scheme": "truncated_poisson",
                "probability": _probability(event),
                "max_lot_size": _count(event, "truncated_batch_size"),
            }
            phase = _phase(sampling, times, [_release(event, 1, 0)])
            phases.append(phase | {"_size": _count(event, "dataset_size")})
        case _:
            raise not_imported(
                DOCUMENT_KIND,
                f"{name} is not a supported kind.",
                DP_EVENT_REMEDIES.get(
                    name, "Write a plan instead; `affidavit schema` lists its fields."
                ),
            )


def _selection(event: dict[str, Any]) -> dict[str, Any]:
    shape = event["shape"]
    names = {math.inf: "poisson", 1: "geometric", 0: "logarithmic"}
    selection = {
        "kind": "repeat_and_select",
        "name": "selection",
        "distribution": names.get(shape, "truncated_negative_binomial"),
        "mean": require_positive(DOCUMENT_KIND, "RepeatAndSelectDpEvent: mean", event["mean"]),
    }
    if shape not in names:
        selection["shape"] = require_positive(DOCUMENT_KIND, "RepeatAndSelectDpEvent: shape", shape)
    return selection


def _releases(event: Any, times: int) -> list[dict[str, Any]]:
    """Return the blocks of one sample: Gaussians, composed or not."""
    match _name(event):
        case "GaussianDpEvent":
            return [_release(event, times, 0)]
        case "SelfComposedDpEvent":
            return _releases(event["event"], times * _iterations(event))
        case "ComposedDpEvent":
            releases = [release for part in _list(event) for release in _releases(part, times)]
            return [release | {"name": f"block-{index}"} for index, release in enumerate(releases)]
        case other:
            raise not_imported(
                DOCUMENT_KIND, f"{other} inside a sample is not supported.", "Write a plan instead."
            )


def _release(event: dict[str, Any], count: int, index: int) -> dict[str, Any]:
    return {
        "name": f"block-{index}",
        "count": count,
        "clip_norm": 1,
        "noise_multiplier": _noise(event),
    }


def _phase(sampling: dict[str, Any], steps: int, releases: list[dict[str, Any]]) -> Phase:
    return {"sampling": sampling, "steps": steps, "releases": releases}


def _name(event: Any) -> str:
    """Return the kind of an event, after checking that it has exactly the fields of that kind."""
    if not isinstance(event, dict) or not isinstance(event.get("class_name"), str):
        raise not_imported(
            DOCUMENT_KIND, "a part of it has no class_name.", "Write the whole named tuple."
        )
    name: str = event["class_name"]
    if not str(event.get("module_name", "dp_accounting")).startswith("dp_accounting"):
        raise not_imported(
            DOCUMENT_KIND, f"{name[:80]} is not a dp-accounting event.", "Write a plan instead."
        )
    if name not in EVENT_FIELDS:
        return name[:80]
    require_known_fields(
        f"{DOCUMENT_KIND}: {name}", event, ("module_name", "class_name", *EVENT_FIELDS[name])
    )
    for field in EVENT_FIELDS[name]:
        if event.get(field) is None:
            raise not_imported(
                DOCUMENT_KIND, f"{name}: {field} is missing.", "Write the whole named tuple."
            )
    return name


def _list(event: dict[str, Any]) -> list[Any]:
    events = event["events"]
    if not isinstance(events, list):
        raise not_imported(DOCUMENT_KIND, "events is not a list.", "Write the whole named tuple.")
    return events


def _noise(event: dict[str, Any]) -> float:
    return require_positive(
        DOCUMENT_KIND, f"{event['class_name']}: noise_multiplier", event["noise_multiplier"]
    )


def _probability(event: dict[str, Any]) -> float:
    field = "sampling_probability"
    return require_probability(DOCUMENT_KIND, f"{event['class_name']}: {field}", event[field])


def _count(event: dict[str, Any], field: str) -> int:
    return require_positive_integer(DOCUMENT_KIND, f"{event['class_name']}: {field}", event[field])


def _iterations(event: dict[str, Any]) -> int:
    return require_positive_integer(
        DOCUMENT_KIND, f"{event['class_name']}: count", event["count"], MAX_COUNT
    )
