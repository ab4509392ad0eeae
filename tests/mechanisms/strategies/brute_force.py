"""Brute force over all patterns of a few steps; shares no code with the bounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from affidavit.mechanisms.strategies.participation import Participation

Array = NDArray[np.float64]


def every_pattern(steps: int, turns: Participation) -> Iterator[tuple[int, ...]]:
    """All sets of steps that the schema's own words allow."""
    for size in range(1, turns.participations + 1):
        for pattern in combinations(range(steps), size):
            gaps = np.diff(pattern)
            if turns.schema == "fixed_epoch" and not np.all(gaps == turns.separation):
                continue
            if turns.schema == "min_separation" and not np.all(gaps >= turns.separation):
                continue
            yield pattern


def patterns(turns: Participation, steps: int) -> Iterator[tuple[int, ...]]:
    """Every maximal pattern, steps counted from 0; exponentially many for large T."""
    match turns.schema:
        case "single":
            yield from ((step,) for step in range(steps))
        case "fixed_epoch":
            for first in range(steps):
                later = range(first, steps, turns.separation)[: turns.participations]
                if first < turns.separation or len(later) == turns.participations:
                    yield tuple(later)
        case "min_separation":
            yield from _separated(turns, (), 0, steps)


def _separated(
    turns: Participation, taken: tuple[int, ...], first: int, steps: int
) -> Iterator[tuple[int, ...]]:
    if len(taken) == turns.participations or first >= steps:
        yield taken
        return
    # A gap of 2b or more leaves room for another step, so it is not maximal; but a
    # pattern of fewer gaps may be one of k steps, hence every gap is tried.
    for step in range(first, steps):
        yield from _separated(turns, (*taken, step), step + turns.separation, steps)


def bound(strategy: Array, turns: Participation) -> float:
    """√ of the largest Σ |X_ij|: attained where X is not negative, never passed."""
    size = np.abs(strategy.T @ strategy)
    return max(
        float(np.sum(size[np.ix_(pattern, pattern)])) ** 0.5
        for pattern in every_pattern(strategy.shape[1], turns)
    )


def signed(strategy: Array, turns: Participation) -> float:
    """√ of the largest Σ s_i s_j X_ij over patterns and signs, which one record attains."""
    gram = strategy.T @ strategy
    best = 0.0
    for pattern in every_pattern(strategy.shape[1], turns):
        signs = np.array(list(product([1.0, -1.0], repeat=len(pattern))))
        best = max(best, float(np.max((signs @ gram[np.ix_(pattern, pattern)] * signs).sum(1))))
    return best**0.5


def attained(strategy: Array, turns: Participation, rng: np.random.Generator) -> float:
    """√ of the largest Σ X_ij ⟨x_i, x_j⟩ found over unit vectors, by ascent from random ones."""
    gram = strategy.T @ strategy
    return max(
        _ascent(gram[np.ix_(pattern, pattern)], rng) ** 0.5
        for pattern in every_pattern(strategy.shape[1], turns)
    )


def _ascent(block: Array, rng: np.random.Generator) -> float:
    """Each x_i in turn along Σ_{j≠i} X_ij x_j, which never lowers the sum."""
    best = 0.0
    for _ in range(3):
        vectors = rng.normal(size=(len(block), len(block)))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        for _ in range(60):
            for place in range(len(block)):
                pull = block[place] @ vectors - block[place, place] * vectors[place]
                if (length := float(np.linalg.norm(pull))) > 0:
                    vectors[place] = pull / length
        best = max(best, float(np.sum(block * (vectors @ vectors.T))))
    return best
