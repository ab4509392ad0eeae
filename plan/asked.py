"""What a plan asks for by writing null: its steps, its lot size or its sampling probability.

A quantity that is left out is a mistake; one that is written as null is a question, the
most of it that fits the target. Noise is asked for by leaving it out. One question is
asked at a time, of a plan with one phase, and needs a full target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from affidavit.plan.diagnostics import Reason

if TYPE_CHECKING:
    from affidavit.plan.document import Phase, Plan

LOT_SIZES = frozenset({"poisson", "fixed_size"})
"""Schemes of which the largest lot size that fits can be asked: fresh lots, drawn alike."""


def asks_for_lot_size(phase: Phase) -> bool:
    """Whether the phase says ``lot_size: null`` and no probability."""
    return phase.sampling.scheme in LOT_SIZES and _left_null(phase, "lot_size")


def asks_for_probability(phase: Phase) -> bool:
    """Whether the phase says ``probability: null`` and no lot size."""
    return phase.sampling.scheme == "poisson" and _left_null(phase, "probability")


def _left_null(phase: Phase, name: str) -> bool:
    sampling = phase.sampling
    given = sampling.lot_size is not None or sampling.probability is not None
    return not given and name in sampling.model_fields_set


def contradictions(plan: Plan) -> Iterator[Reason]:
    """What stands in the way of answering for a lot size or a sampling probability."""
    for index, phase in enumerate(plan.phases):
        for name, asks, words in (
            ("lot_size", asks_for_lot_size(phase), "lot size"),
            ("probability", asks_for_probability(phase), "sampling probability"),
        ):
            if asks:
                yield from _in_the_way(plan, index, name, words)


def _in_the_way(plan: Plan, index: int, name: str, words: str) -> Iterator[Reason]:
    phase, pointer = plan.phases[index], plan.pointer(index, "sampling", name)
    if len(plan.phases) > 1:
        yield _reason(
            "conflict",
            pointer,
            f"{name}: null is asked of one phase among several.",
            f"Give the {words} of every phase.",
        )
    elif asks_for_lot_size(phase) and asks_for_probability(phase):
        if name == "probability":
            yield _reason(
                "conflict",
                pointer,
                "both the lot size and the probability are asked for.",
                "Remove one of the two.",
            )
    elif plan.asks_for_noise or plan.asks_for_steps:
        other = "noise" if plan.asks_for_noise else "steps"
        yield _reason(
            "conflict",
            pointer,
            f"both the {words} and the {other} are left open.",
            "Give one of the two.",
        )
    if phase.epochs is not None and name == "probability":
        yield _reason(
            "conflict",
            plan.pointer(index, "epochs"),
            "epochs become steps by the probability, which is asked for.",
            "Give steps instead.",
        )
    if name == "lot_size" and plan.dataset.size is None:
        yield _reason(
            "missing_field",
            "/dataset/size",
            "the largest lot size needs the size of the data set.",
            "Give dataset.size, or ask for probability: null.",
        )
    for field in ("epsilon", "delta"):
        if getattr(plan.target, field) is None and not _no_target(plan):
            yield _reason(
                "missing_field",
                f"/target/{field}",
                f"solving for the {words} needs both epsilon and delta.",
                f"Give target.{field}, or the {words}.",
            )


def _no_target(plan: Plan) -> bool:
    return plan.target.epsilon is None and plan.target.delta is None


def _reason(code: str, pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code=code, pointer=pointer, message=message, remedy=remedy)
