"""Import jax-privacy's ``BandMFExecutionPlanConfig`` or ``BandMFConfig`` as JSON.

One band is DP-SGD with Poisson lots; b bands are b groups in turn, each sampled, with noise
correlated over b steps by the strategy's Toeplitz coefficients. The lot size is sampling_prob
times a b-th of the data set, rounded up; without ``num_examples`` it must be given.
``accountant`` is given as its neighbouring relation.

The library scales noise by noise_multiplier times the norm of the coefficients, so their scale
has no effect. A plan's noise_multiplier applies before correlation, which is the same number for
coefficients of norm 1.

``BandMFConfig`` is the later form: expected_participations stand for the sampling probability, and
num_examples decides the partition and the neighbouring relation, and sub_strategy may say that each
record is in exactly so many steps. Without noise_multiplier it makes no plan, so that it is refused
here.

Reference: jax_privacy.experimental.execution_plan, release 2.0, and its development version.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import (
    NoiseCalibration,
    PartialPlan,
    is_number,
    not_imported,
    require_known_fields,
    require_positive,
    require_positive_integer,
    require_probability,
    unchanged,
)
from affidavit.plan import schedule

DOCUMENT_KIND = "jax-privacy plan"
RELATIONS = {
    "ADD_OR_REMOVE_ONE": "add_remove",
    "REPLACE_ONE": "replace_one",
    "REPLACE_SPECIAL": "zero_out",
}


def recognises(document: Any) -> bool:
    """Whether a document is a ``BandMFExecutionPlanConfig``."""
    required = {"iterations", "strategy", "sampling_prob"}
    return isinstance(document, dict) and required <= document.keys()


def recognises_participations(document: Any) -> bool:
    """Whether a document is a ``BandMFConfig``."""
    required = {"iterations", "strategy", "expected_participations"}
    return isinstance(document, dict) and required <= document.keys()


def read_participations(document: dict[str, Any]) -> PartialPlan:
    """Read the plan fields of a ``BandMFConfig``; raises ``MalformedPlan``."""
    require_known_fields(DOCUMENT_KIND, document, NAMES["jax_participations_fields"])
    steps = require_positive_integer(DOCUMENT_KIND, "iterations", document["iterations"])
    bands = len(_normalised(document["strategy"]))
    require_positive(DOCUMENT_KIND, "noise_multiplier", document.get("noise_multiplier"))
    field = "expected_participations"
    rate = Fraction(require_positive(DOCUMENT_KIND, field, document[field])) * bands / steps
    public = document.get("num_examples") is not None
    rest = {key: value for key, value in document.items() if key not in (field, "sub_strategy")}
    partial_plan = read(
        {
            **rest,
            "sampling_prob": require_probability(
                DOCUMENT_KIND, "the sampling probability", schedule.double_up(rate)
            ),
            "partition_type": "EQUAL_SPLIT" if public else "INDEPENDENT",
            "neighboring_relation": "REPLACE_SPECIAL" if public else "ADD_OR_REMOVE_ONE",
        }
    )
    return _with_allocation(partial_plan, document, bands)


def _with_allocation(
    partial_plan: PartialPlan, document: dict[str, Any], bands: int
) -> PartialPlan:
    """Return the plan with the lots of ``sub_strategy``; raises ``MalformedPlan``."""
    drawn = str(document.get("sub_strategy") or "POISSON").rpartition(".")[2].upper()
    if drawn == "POISSON":
        return partial_plan
    if drawn != "RANDOM_ALLOCATION" or bands > 1:
        raise not_imported(
            DOCUMENT_KIND,
            f"sub_strategy {drawn} is not supported with {bands} bands.",
            "Use POISSON, or RANDOM_ALLOCATION with one band.",
        )
    field = "expected_participations"
    taken = require_positive(DOCUMENT_KIND, field, document[field])
    taken = require_positive_integer(DOCUMENT_KIND, field, int(taken) if taken % 1 == 0 else taken)
    sampling = {"scheme": "random_allocation", "participations": taken}
    return replace(partial_plan, data=partial_plan.data | {"sampling": sampling})


def read(document: dict[str, Any]) -> PartialPlan:
    """Read the plan fields of the configuration; raises ``MalformedPlan``."""
    require_known_fields(
        DOCUMENT_KIND, document, (*NAMES["jax_plan_fields"], *NAMES["jax_ignored_fields"])
    )
    if document.get("column_normalize", False) is not False:
        raise not_imported(
            DOCUMENT_KIND,
            "column_normalize is not supported.",
            "Give the normalised matrix in a plan.",
        )
    steps = require_positive_integer(DOCUMENT_KIND, "iterations", document["iterations"])
    strategy = _normalised(document["strategy"])
    bands = len(strategy)
    if bands > steps:
        raise not_imported(
            DOCUMENT_KIND, "strategy is longer than iterations.", "Give the value that was used."
        )
    release = {
        "name": "all",
        "clip_norm": require_positive(
            DOCUMENT_KIND, "l2_clip_norm", document.get("l2_clip_norm", 1.0)
        ),
    }
    noise = document.get("noise_multiplier")
    if noise is not None:
        release["noise_multiplier"] = require_positive(DOCUMENT_KIND, "noise_multiplier", noise)
    data: dict[str, Any] = {
        "steps": steps,
        "releases": [release],
        "sampling": _sampling(document, bands),
    }
    if bands > 1:
        data["noise"] = {"kind": "toeplitz", "coefficients": strategy}
    relation = _relation(document)
    in_turn = _splits_equally(document) and bands > 1
    if in_turn and relation == "add_remove":
        raise not_imported(
            DOCUMENT_KIND,
            "partition_type is EQUAL_SPLIT, which is incompatible with ADD_OR_REMOVE_ONE.",
            "Use INDEPENDENT, or REPLACE_SPECIAL.",
        )
    if relation is not None:
        data["adjacency"] = relation
    if (size := _size(document)) is not None:
        data["dataset"] = {"size": size}
    if target := _target(document):
        data["target"] = target
    return PartialPlan(
        kind=DOCUMENT_KIND,
        data=data,
        assumed=_assumed(document),
        excluded=(("adjacency", ("add_remove",)),) if in_turn else (),
        finish=partial(_with_lots, rate=document["sampling_prob"]) if bands > 1 else unchanged,
    )


def _normalised(strategy: Any) -> list[float]:
    """Divide the coefficients by their norm, rounding away from zero so that the norm is >= 1."""
    if not isinstance(strategy, list) or not strategy or not all(map(is_number, strategy)):
        raise not_imported(
            DOCUMENT_KIND, "strategy is not a list of coefficients.", "Write it out."
        )
    norm = math.hypot(*strategy)
    if strategy[0] == 0 or not math.isfinite(norm):
        raise not_imported(
            DOCUMENT_KIND,
            "strategy has no inverse, or is out of range.",
            "Give the value that was used.",
        )
    least = math.nextafter(norm, 0)
    return [math.nextafter(c / least, math.copysign(math.inf, c)) if c else 0.0 for c in strategy]


def _sampling(document: dict[str, Any], bands: int) -> dict[str, Any]:
    rate = require_probability(DOCUMENT_KIND, "sampling_prob", document["sampling_prob"])
    most = document.get("truncated_batch_size")
    if bands > 1 and most is not None:
        raise not_imported(
            DOCUMENT_KIND,
            "truncated lots of cyclic groups are not supported.",
            "Remove the truncation.",
        )
    if bands > 1:
        return {"scheme": "cyclic_poisson", "groups": bands}
    if most is not None:
        lots = require_positive_integer(DOCUMENT_KIND, "truncated_batch_size", most)
        return {"scheme": "truncated_poisson", "probability": rate, "max_lot_size": lots}
    return {"scheme": "poisson", "probability": rate}


def _with_lots(plan: dict[str, Any], _: NoiseCalibration | None, rate: float) -> dict[str, Any]:
    """Set the lot size of a cyclic plan from ``rate`` and the size of the data set."""
    size, sampling = plan.get("dataset", {}).get("size"), plan["sampling"]
    if not isinstance(size, int):
        return plan  # which is refused for it
    least = rate * size / sampling["groups"] * (1 - 1e-12)
    lots = sampling.get("lot_size", math.ceil(least))
    if isinstance(lots, int) and lots < least:
        raise not_imported(
            DOCUMENT_KIND,
            f"lot_size is given as {lots}, but sampling_prob makes lots of {least:.6g}.",
            "Leave lot_size out: it follows from dataset.size.",
        )
    return plan | {"sampling": sampling | {"lot_size": lots}}


def _size(document: dict[str, Any]) -> int | None:
    size = document.get("num_examples")
    return None if size is None else require_positive_integer(DOCUMENT_KIND, "num_examples", size)


def _target(document: dict[str, Any]) -> dict[str, float]:
    target = {}
    if (epsilon := document.get("epsilon")) is not None:
        target["epsilon"] = require_positive(DOCUMENT_KIND, "epsilon", epsilon)
    if (delta := document.get("delta")) is not None:
        target["delta"] = require_probability(DOCUMENT_KIND, "delta", delta)
    return target


def _relation(document: dict[str, Any]) -> str | None:
    relations = (document.get(key) for key in ("accountant", "neighboring_relation"))
    adjacencies = {_adjacency(relation) for relation in relations if relation is not None}
    if len(adjacencies) > 1:
        raise not_imported(
            DOCUMENT_KIND, "accountant and neighboring_relation differ.", "Keep one of them."
        )
    return adjacencies.pop() if adjacencies else None


def _splits_equally(document: dict[str, Any]) -> bool:
    """Whether groups have equal size, so that adding a record moves others."""
    partition = str(document.get("partition_type", "EQUAL_SPLIT")).rpartition(".")[2]
    if partition not in ("EQUAL_SPLIT", "INDEPENDENT"):
        raise not_imported(
            DOCUMENT_KIND, "partition_type is unknown.", "Use EQUAL_SPLIT or INDEPENDENT."
        )
    return partition == "EQUAL_SPLIT"


def _adjacency(accountant: Any) -> str:
    if isinstance(accountant, dict):
        accountant = accountant.get("neighboring_relation")
    relation = RELATIONS.get(str(accountant).rpartition(".")[2])
    if relation is None:
        raise not_imported(
            DOCUMENT_KIND,
            "accountant is not a neighbouring relation.",
            f"Use one of {', '.join(RELATIONS)}.",
        )
    return relation


def _assumed(document: dict[str, Any]) -> tuple[str, ...]:
    notes = [
        "jax-privacy: noise_multiplier is taken as the noise over the clip norm and the norm of "
        "the strategy, whose coefficients are read divided by that norm."
    ]
    if document.get("noise_multiplier") is None:
        notes.append(
            "jax-privacy: without noise_multiplier the library calibrates its own, which is not "
            "checked; the noise calculated here is certified instead."
        )
    if document.get("noise_seed") is not None:
        notes.append(
            "jax-privacy: noise_seed is assumed to be secret, although it is in this file."
        )
    return tuple(notes)
