"""jax-privacy's ``BandMFExecutionPlanConfig`` as JSON: its fields by name.

One band is DP-SGD with Poisson lots; b bands are b groups in turn, each sampled, and noise
correlated over b steps by the strategy's Toeplitz coefficients. Their lots are sampling_prob
times a b-th of the data set, rounded up; without ``num_examples`` their size is asked for.
``accountant`` is written as its neighbouring relation.

Reference: jax_privacy.experimental.execution_plan, release 2.0.
"""

from __future__ import annotations

import math
from typing import Any

from affidavit.gate.checking.importers.partial import Partial, not_taken

KIND = "jax-privacy plan"
RELATIONS = {
    "ADD_OR_REMOVE_ONE": "add_remove",
    "REPLACE_ONE": "replace_one",
    "REPLACE_SPECIAL": "zero_out",
}


def recognises(document: Any) -> bool:
    """Whether this is such a configuration."""
    return (
        isinstance(document, dict)
        and {
            "iterations",
            "strategy",
            "sampling_prob",
        }
        <= document.keys()
    )


def read(document: dict[str, Any]) -> Partial:
    """The plan that it says; raises ``MalformedPlan``."""
    strategy = document["strategy"]
    if not isinstance(strategy, list) or not strategy:
        raise not_taken(KIND, "strategy is not a list of coefficients.", "Write it out.")
    if document.get("column_normalize"):
        raise not_taken(
            KIND, "column_normalize is not read.", "Give the normalised matrix in a plan."
        )
    noise = document.get("noise_multiplier")
    release = {"name": "all", "clip_norm": document.get("l2_clip_norm", 1.0)}
    data: dict[str, Any] = {
        "steps": document["iterations"],
        "releases": [release if noise is None else release | {"noise_multiplier": noise}],
        "sampling": _sampling(document, len(strategy)),
    }
    if len(strategy) > 1:
        data["noise"] = {"kind": "toeplitz", "coefficients": strategy}
    if (relation := _relation(document)) is not None:
        data["adjacency"] = relation
    if document.get("num_examples") is not None:
        data["dataset"] = {"size": document["num_examples"]}
    target = {key: document[key] for key in ("epsilon", "delta") if document.get(key) is not None}
    if target:
        data["target"] = target
    return Partial(
        kind=KIND,
        data=data,
        assumed=("jax-privacy: noise_multiplier is taken as the noise before it is correlated.",),
    )


def _sampling(document: dict[str, Any], bands: int) -> dict[str, Any]:
    rate, most = document["sampling_prob"], document.get("truncated_batch_size")
    if bands > 1 and most is not None:
        raise not_taken(
            KIND, "truncated lots of groups in turn are not certified.", "Leave out the truncation."
        )
    if bands > 1:
        # A plan says how large the lots are; the size of the data set is often left out here.
        size = document.get("num_examples")
        lot = {} if size is None else {"lot_size": math.ceil(rate * size / bands)}
        return {"scheme": "cyclic_poisson", "groups": bands, **lot}
    if most is not None:
        return {"scheme": "truncated_poisson", "probability": rate, "max_lot_size": most}
    return {"scheme": "poisson", "probability": rate}


def _relation(document: dict[str, Any]) -> str | None:
    accountant = document.get("accountant", document.get("neighboring_relation"))
    if isinstance(accountant, dict):
        accountant = accountant.get("neighboring_relation")
    return None if accountant is None else RELATIONS.get(str(accountant).rpartition(".")[2])
