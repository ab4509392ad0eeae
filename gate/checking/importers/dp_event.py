"""dp-accounting's ``DpEvent`` as JSON: its named tuples, with ``class_name`` and their fields.

Only the kinds below are read, by name; nothing that the document names is ever imported.

A Poisson sample of several Gaussians is one joint release of a step. Gaussians that are
composed outside a sample are steps of their own. An event knows neither the clip norm (noise
multipliers are relative to it) nor the adjacency, the size of the data set, or a target.
"""

from __future__ import annotations

from typing import Any

from affidavit.gate.checking.importers.partial import Partial, not_taken

KIND = "DpEvent"
COMPOSED = ("ComposedDpEvent", "SelfComposedDpEvent")
SAMPLED = (
    "PoissonSampledDpEvent",
    "SampledWithoutReplacementDpEvent",
    "TruncatedSubsampledGaussianDpEvent",
)
MOST_PARTS = 1000

Phase = dict[str, Any]


def recognises(document: Any) -> bool:
    """Whether this is a ``DpEvent``."""
    return isinstance(document, dict) and str(document.get("class_name", "")).endswith("DpEvent")


def read(document: dict[str, Any]) -> Partial:
    """The plan's phases that the event says; raises ``MalformedPlan``."""
    phases: list[Phase] = []
    extra: list[dict[str, Any]] = []
    _walk(document, 1, phases, extra, depth=0)
    if not phases:
        raise not_taken(KIND, "it has no Gaussian event.", "Write a plan instead.")
    assumed = [
        "DpEvent: noise multipliers are taken as noise over the clip norm, and the clip norm as 1.",
        "DpEvent: releases that are composed outside a sample are taken as steps of their own.",
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
        raise not_taken(KIND, "its samples are of several data sets.", "Write a plan instead.")
    if sizes:
        data["dataset"] = {"size": sizes.pop()}
    if extra:
        data["extra"] = extra
    return Partial(kind=KIND, data=data, assumed=tuple(assumed))


def _walk(
    event: Any, times: int, phases: list[Phase], extra: list[dict[str, Any]], depth: int
) -> None:
    name = _name(event)
    if depth > 16 or len(phases) + len(extra) > MOST_PARTS:
        raise not_taken(KIND, "it is nested too deep, or too long.", "Write a plan instead.")
    match name:
        case "NoOpDpEvent":
            return
        case "ComposedDpEvent":
            for each in _list(event, "events"):
                _walk(each, times, phases, extra, depth + 1)
        case "SelfComposedDpEvent":
            _walk(event.get("event"), times * _count(event, "count"), phases, extra, depth + 1)
        case "GaussianDpEvent":
            phases.append(_phase({"scheme": "full_batch"}, times, [_release(event, 1, 0)]))
        case "LaplaceDpEvent":
            number = f"laplace-{len(extra)}"
            extra.append(
                {
                    "kind": "laplace",
                    "name": number,
                    "noise_multiplier": event.get("noise_multiplier"),
                    "count": times,
                }
            )
        case "PoissonSampledDpEvent":
            sampling = {"scheme": "poisson", "probability": event.get("sampling_probability")}
            phases.append(_phase(sampling, times, _releases(event.get("event"), 1)))
        case "SampledWithoutReplacementDpEvent":
            sampling = {"scheme": "fixed_size", "lot_size": event.get("sample_size")}
            found = _phase(sampling, times, _releases(event.get("event"), 1))
            phases.append(found | {"_size": event.get("source_dataset_size")})
        case "TruncatedSubsampledGaussianDpEvent":
            sampling = {
                "scheme": "truncated_poisson",
                "probability": event.get("sampling_probability"),
                "max_lot_size": event.get("truncated_batch_size"),
            }
            found = _phase(sampling, times, [_release(event, 1, 0)])
            phases.append(found | {"_size": event.get("dataset_size")})
        case _:
            raise not_taken(
                KIND,
                f"{name} is not among the kinds that are read.",
                "Write a plan instead; docs/plan.md lists what it can say.",
            )


def _releases(event: Any, times: int) -> list[dict[str, Any]]:
    """The blocks of one sample: Gaussians, composed or not."""
    match _name(event):
        case "GaussianDpEvent":
            return [_release(event, times, 0)]
        case "SelfComposedDpEvent":
            return _releases(event.get("event"), times * _count(event, "count"))
        case "ComposedDpEvent":
            found = [one for each in _list(event, "events") for one in _releases(each, times)]
            return [one | {"name": f"block-{index}"} for index, one in enumerate(found)]
        case other:
            raise not_taken(KIND, f"{other} inside a sample is not read.", "Write a plan instead.")


def _release(event: dict[str, Any], count: int, index: int) -> dict[str, Any]:
    return {
        "name": f"block-{index}",
        "count": count,
        "clip_norm": 1,
        "noise_multiplier": event.get("noise_multiplier"),
    }


def _phase(sampling: dict[str, Any], steps: int, releases: list[dict[str, Any]]) -> Phase:
    return {"sampling": sampling, "steps": steps, "releases": releases}


def _name(event: Any) -> str:
    if not isinstance(event, dict) or not isinstance(event.get("class_name"), str):
        raise not_taken(KIND, "a part of it has no class_name.", "Write the whole named tuple.")
    return str(event["class_name"])[:80]


def _list(event: dict[str, Any], field: str) -> list[Any]:
    found = event.get(field)
    if not isinstance(found, list):
        raise not_taken(KIND, f"{field} is not a list.", "Write the whole named tuple.")
    return found


def _count(event: dict[str, Any], field: str) -> int:
    found = event.get(field)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 < found <= 10**9:
        raise not_taken(KIND, f"{field} is not a positive whole number.", "Correct it.")
    return found
