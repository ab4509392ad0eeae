"""Import the saved state of an Opacus accountant.

``json.dump(privacy_engine.accountant.state_dict(), file)`` writes it. Its history has the noise,
rate and number of the steps taken. It lacks the sampling scheme, which must be given.
"""

from __future__ import annotations

from typing import Any

from affidavit.importers.partial_plan import (
    PartialPlan,
    not_imported,
    require_known_fields,
    require_positive,
    require_positive_integer,
    require_probability,
)

DOCUMENT_KIND = "Opacus accountant state"
HISTORY_FIELDS = 3
"""Length of a history entry: noise, rate and steps."""


def recognises(document: Any) -> bool:
    """Whether a document is the state of an Opacus accountant."""
    return isinstance(document, dict) and {"history", "mechanism"} <= document.keys()


def read(document: dict[str, Any]) -> PartialPlan:
    """Read one phase from each entry of the history; raises ``MalformedPlan``."""
    require_known_fields(DOCUMENT_KIND, document, ("history", "mechanism"))
    if not isinstance(document["mechanism"], str):
        raise not_imported(DOCUMENT_KIND, "mechanism is not a name.", "Save it with Opacus.")
    history = document["history"]
    if not isinstance(history, list) or not history:
        raise not_imported(DOCUMENT_KIND, "its history is empty.", "Save it after training.")
    if not all(isinstance(entry, list) and len(entry) == HISTORY_FIELDS for entry in history):
        raise not_imported(
            DOCUMENT_KIND,
            "its history is not a list of [noise, rate, steps].",
            "Save it with Opacus.",
        )
    phases = [_phase(f"history {index}", *entry) for index, entry in enumerate(history)]
    return PartialPlan(
        kind=DOCUMENT_KIND,
        data=dict(phases[0]) if len(phases) == 1 else {"phases": phases},
        assumed=(
            "Opacus: all parameters are taken as one release with one clip norm; with per-layer "
            "clipping that is right if max_grad_norm was the norm of all layers together.",
        ),
    )


def _phase(where: str, noise: Any, rate: Any, steps: Any) -> dict[str, Any]:
    multiplier = require_positive(DOCUMENT_KIND, f"{where}: noise_multiplier", noise)
    return {
        "sampling": {
            "probability": require_probability(DOCUMENT_KIND, f"{where}: sample_rate", rate)
        },
        "steps": require_positive_integer(DOCUMENT_KIND, f"{where}: num_steps", steps),
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": multiplier}],
    }
