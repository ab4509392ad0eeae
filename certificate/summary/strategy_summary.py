"""What noise that is correlated across steps means for a result: its strategy, in words.

Errors are those of the plan's workload at noise z of standard deviation 1 on a clip norm of
1, before any scaling: at Gaussian-DP parameter μ they are to be multiplied by the
sensitivity over μ. They are null where they are too costly to compute. ``coefficients`` are
those of the recurrence, where they are few; ``noise_sha256`` is the digest of N, row by row in
little-endian doubles, where the strategy is a matrix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from affidavit.certificate.assessment import Caveat
from affidavit.mechanisms import Lowered, LoweredPhase, Streamed
from affidavit.mechanisms.strategies import (
    MAX_DENSE,
    Dense,
    Strategy,
    TooLarge,
    Tree,
    Workload,
    coefficients_digest,
)

MAX_COEFFICIENTS = 64
"""Coefficients of a recurrence that a result spells out."""


def streamed(part: LoweredPhase) -> Streamed | None:
    """The strategy of a phase whose noise is correlated and whose steps are known."""
    if part.correlation is None or part.steps is None:
        return None
    return part.correlation.at(part.steps)


def strategies_of(lowered: Lowered) -> tuple[dict[str, Any], ...]:
    """One entry for each phase with correlated noise."""
    result = []
    for phase, part in zip(lowered.plan.phases, lowered.phases, strict=True):
        at = streamed(part)
        if at is None or part.correlation is None or phase.noise.kind == "independent":
            continue
        rms, largest = _errors(at, part.correlation.workload)
        result.append(
            {
                "kind": phase.noise.kind,
                "sensitivity": at.sensitivity.value,
                "exact": at.sensitivity.exact,
                "rms_error": rms,
                "max_error": largest,
                "participation": {
                    "schema": at.participation.schema,
                    "participations": at.participation.most(at.strategy.steps),
                    "separation": at.participation.separation,
                },
                "buffers": at.strategy.streaming.buffers,
                "recurrence": at.strategy.streaming.recurrence,
                **_noise_of(at.strategy),
                **_constructed(at.strategy),
            }
        )
    return tuple(result)


def _constructed(strategy: Strategy) -> dict[str, Any]:
    """The digest of the very numbers that were judged, and how far from the optimum they are."""
    coefficients = strategy.coefficients
    result: dict[str, Any] = {"digest": coefficients_digest(coefficients)} if coefficients else {}
    if isinstance(strategy, Dense) and strategy.gap is not None and math.isfinite(strategy.gap):
        result["gap"] = strategy.gap
    return result


def _noise_of(strategy: Strategy) -> dict[str, Any]:
    """Which noise was certified, where the plan only says how to find it."""
    coefficients = strategy.streaming.coefficients
    if 0 < len(coefficients) <= MAX_COEFFICIENTS:
        return {"coefficients": list(coefficients)}
    if strategy.streaming.form == "rows" and strategy.steps <= MAX_DENSE:
        doubles = strategy.noise_matrix().astype("<f8").tobytes(order="C")
        return {"noise_sha256": hashlib.sha256(doubles).hexdigest()}
    return {}


_OR_CHAIN = ", or ε is that of a chain of neighbours if that is less"


def caveats(lowered: Lowered) -> Iterator[Caveat]:
    """What a reader should know of the strategies; it changes no number."""
    last, incomplete = lowered.plan.phases[-1], False
    for phase, part in zip(lowered.plan.phases, lowered.phases, strict=True):
        at = streamed(part)
        if at is None:
            continue
        random = ("cyclic_poisson", "b_min_sep", "balls_in_bins")
        if phase.sampling.scheme in random and at.route == "gaussian":
            yield Caveat(
                code="no_amplification",
                message=f"no theorem of {phase.sampling.scheme} sampling covers this run: each "
                f"record is taken to be in all of its {at.participation.most(at.strategy.steps)} "
                f"turns{'' if lowered.of_one_record is None else _OR_CHAIN}.",
            )
        if not at.sensitivity.exact:
            yield Caveat(
                code="sensitivity_is_a_bound",
                message="the sensitivity of the strategy is an upper bound that need not be "
                "attained; the lower end of ε is that of a pattern that is.",
            )
        incomplete |= isinstance(at.strategy, Tree) and _cut_short(at.strategy, last=phase is last)
    if incomplete:
        yield Caveat(
            code="tree_not_completed",
            message="a new tree begins before the previous one is complete. A run that completes "
            "its trees (DP-FTRL's tree completion) releases more than is certified: make the "
            "length of each tree a power of two, with additional steps in which no record takes "
            "part.",
        )


def _cut_short(tree: Tree, *, last: bool) -> bool:
    """Whether a new tree begins after one that has no root over all of its steps."""
    begins = tree.steps > tree.period or not last
    return begins and tree.period & (tree.period - 1) != 0


def _errors(at: Streamed, workload: Workload) -> tuple[float | None, float | None]:
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            errors = at.strategy.errors(workload)
            result = errors.rms, errors.max
    except TooLarge:
        return None, None
    return result if all(map(math.isfinite, result)) else (None, None)
