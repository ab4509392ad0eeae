"""The saved state of an Opacus accountant, as JSON: its history of noise, rate and steps.

``json.dump(privacy_engine.accountant.state_dict(), file)`` writes it. The history says with
which rate lots were accounted for, and not how they were drawn: the sampler is asked for.
Every entry is a record of steps that were taken; one with a null in it is refused.
"""

from __future__ import annotations

from typing import Any

from affidavit.gate.checking.importers.fields import only, positive, share, whole
from affidavit.gate.checking.importers.partial import Partial, not_taken

KIND = "Opacus accountant state"
ENTRY = 3


def recognises(document: Any) -> bool:
    """Whether this is such a state."""
    return isinstance(document, dict) and {"history", "mechanism"} <= document.keys()


def read(document: dict[str, Any]) -> Partial:
    """A phase for each entry of the history; raises ``MalformedPlan``."""
    only(KIND, document, ("history", "mechanism"))
    if not isinstance(document["mechanism"], str):
        raise not_taken(KIND, "mechanism is not a name.", "Save it with Opacus.")
    history = document["history"]
    if not isinstance(history, list) or not history:
        raise not_taken(KIND, "its history is empty.", "Save it after training.")
    if not all(isinstance(item, list) and len(item) == ENTRY for item in history):
        raise not_taken(
            KIND, "its history is not a list of [noise, rate, steps].", "Save it with Opacus."
        )
    phases = [_phase(f"history {index}", *each) for index, each in enumerate(history)]
    return Partial(
        kind=KIND,
        data=dict(phases[0]) if len(phases) == 1 else {"phases": phases},
        assumed=(
            "Opacus: all parameters are taken as one release with one clip norm; with per-layer "
            "clipping that is right if max_grad_norm was the norm of all layers together.",
        ),
    )


def _phase(where: str, noise: Any, rate: Any, steps: Any) -> dict[str, Any]:
    multiplier = positive(KIND, f"{where}: noise_multiplier", noise)
    return {
        "sampling": {"probability": share(KIND, f"{where}: sample_rate", rate)},
        "steps": whole(KIND, f"{where}: num_steps", steps),
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": multiplier}],
    }
