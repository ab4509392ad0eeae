"""Every option of a run matters: another value has another answer, a warning or a refusal.

The fields are those of the models of a plan, so that a new one is tried as soon as it is there.
Random plans of every scheme and every kind of noise get other values in one field at a time. An
option is ignored if every other value of it is accepted and none of them changes anything.
"""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from affidavit.assessment.plan_summary import assumptions_of, caveats_of
from affidavit.mechanisms import obligations_of
from affidavit.mechanisms.lowering import lower
from affidavit.plan import MalformedPlan, Plan, RefusedPlan, plan_from
from affidavit.plan.document import Dataset, Phase, Release, Sampling
from affidavit.plan.strategies import FORMS, Participation
from tests.mechanisms.plan_meaning import REFUSED, Document, meaning_of, rounded
from tests.support.random_seeds import examples, seeded

FREE = {
    "dataset.name": "a name",
    "dataset.size": "a fact, which bounds under full_batch and by probability do not need",
    "releases.name": "a name",
    "releases.clip_norm": "the unit of noise_multiplier",
    "releases.dimension": "shares noise that is solved for",
    "releases.weight": "shares noise that is solved for",
    "noise.sha256": "of a file, which no plan here has",
    "noise.file": "no plan here has one",
}
"""Fields that may change nothing, and why."""
SCHEMES: tuple[Document, ...] = (
    {"scheme": "poisson", "lot_size": 6},
    {"scheme": "poisson", "probability": 0.1},
    {"scheme": "truncated_poisson", "lot_size": 6, "max_lot_size": 9},
    {"scheme": "fixed_size", "lot_size": 6},
    {"scheme": "balls_in_bins", "lot_size": 15},
    {"scheme": "shuffled", "lot_size": 15},
    {"scheme": "cyclic", "lot_size": 15},
    {"scheme": "cyclic_poisson", "lot_size": 6, "groups": 3},
    {"scheme": "b_min_sep", "lot_size": 6, "separation": 3},
    {"scheme": "random_allocation", "participations": 3},
    {"scheme": "full_batch"},
)
NOISE = [dict(example) for form in FORMS for example in form.examples] + [
    {
        "kind": "matrix",
        "rows": [
            [1.0 if row == at else -0.3 * (row == at + 1) for at in range(8)] for row in range(8)
        ],
    },
]
PARTICIPATIONS: list[Document | None] = [
    None,
    {"schema": "min_separation", "participations": 8, "separation": 1},
    {"schema": "fixed_epoch", "separation": 4},
    {"schema": "single"},
]


def a_plan(draw: random.Random, sampling: Document, noise: Document) -> Document:
    result: Document = {
        "version": 1,
        "dataset": {"name": "toy", "size": 60},
        "adjacency": draw.choice(["add_remove", "replace_one", "zero_out"]),
        "sampling": dict(sampling),
        "steps": 8,
        "noise": copy.deepcopy(noise),
        "releases": [
            {"name": "one", "clip_norm": 1, "count": 2, "noise_multiplier": 4},
            {"name": "other", "clip_norm": 1, "noise_std": 3},
        ],
        "target": {"delta": 1e-5},
    }
    if draw.random() < 0.3:
        result["dataset"] |= {"unit": "user", "contributions_per_user": 3}
    if (participation := draw.choice(PARTICIPATIONS)) is not None:
        result["participation"] = dict(participation)
    return result


def outcome(document: Document) -> Any:
    """What a plan is lowered to, what it injects, and what is said of it, or ``REFUSED``."""
    try:
        lowered = lower(plan_from(document))
        strategies = [
            rounded(part.correlation.at(part.steps).strategy.noise_matrix().tolist())
            for part in lowered.phases
            if part.correlation is not None and part.steps is not None
        ]
        said = (assumptions_of(lowered), obligations_of(lowered), caveats_of(lowered))
        return repr((said, strategies)), meaning_of(lowered)
    except (RefusedPlan, MalformedPlan):
        return REFUSED


def values_of(annotation: Any) -> list[Any]:
    """Some values of a type of a plan."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(parts[0])
    if origin in (Union, types.UnionType):
        return [value for part in parts for value in values_of(part)]
    if origin is Literal:
        return list(parts)
    if origin is tuple:
        match values_of(parts[0]):
            case [float(), *_]:
                return [[1.0, 0.2], [1.0, 0.2, 0.1], [0.7] * 8]
            case [list(), *_]:
                lower = [
                    [float(row == at) + 0.1 * (row > at) for at in range(8)] for row in range(8)
                ]
                return [lower]
        return []
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return []  # its own fields are tried
    some: dict[Any, list[Any]] = {
        bool: [True, False],
        int: [1, 2, 3, 7, 16],
        float: [0.1, 0.3, 0.9, 2.0],
        str: ["other"],
    }
    return some.get(annotation, [])


def changes(document: Document) -> Iterator[tuple[str, list[Document]]]:
    """Each field that is not free, with the plan once for each other value."""
    kind = document["noise"]["kind"]
    form = next(form for form in FORMS if kind in form.kinds())
    parts: list[tuple[str, type[BaseModel], Document | None]] = [
        ("sampling", Sampling, document["sampling"]),
        ("noise", form, document["noise"]),
        ("dataset", Dataset, document["dataset"]),
        ("participation", Participation, document.get("participation")),
        ("releases", Release, document["releases"][0]),
        ("", Phase, document),
    ]
    for part, model, given in parts:
        for name, field in model.model_fields.items():
            key = field.alias or name
            path = f"{part}.{name}".strip(".")
            if path in FREE or given is None:
                continue
            current = given.get(key, field.default)
            others = [value for value in values_of(field.annotation) if value != current]
            if others:
                yield path, [_with(document, part, key, value) for value in others]
    others = values_of(Plan.model_fields["adjacency"].annotation)
    yield (
        "adjacency",
        [
            _with(document, "", "adjacency", value)
            for value in others
            if value != document["adjacency"]
        ],
    )


def _with(document: Document, part: str, key: str, value: Any) -> Document:
    result = copy.deepcopy(document)
    place = result[part] if part else result
    if isinstance(place, list):
        place = place[0]
    place[key] = value
    return result


def ignored(document: Document) -> list[str]:
    """The options of a plan that change nothing."""
    before = outcome(document)
    if before == REFUSED:
        return []
    return [
        path
        for path, changed in changes(document)
        if all(outcome(other) == before for other in changed)
    ]


@pytest.mark.by_turns
@pytest.mark.parametrize("sampling", SCHEMES, ids=lambda words: "-".join(map(str, words.values())))
def test_no_option_of_a_plan_is_ignored(sampling: Document) -> None:
    draw = random.Random(seeded(f"options of {sampling}"))
    for noise in draw.sample(NOISE, min(len(NOISE), examples(5 * 8))):
        plan = a_plan(draw, sampling, noise)
        assert not ignored(plan), plan


def test_free_fields_are_fields() -> None:
    names = {
        f"{part}.{name}"
        for part, models in {
            "dataset": [Dataset],
            "releases": [Release],
            "noise": FORMS,
        }.items()
        for model in models
        for name in model.model_fields
    }
    assert FREE.keys() <= names
