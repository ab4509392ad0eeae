"""Recurrences: compute w_t = (N z)_t from z_t and a few stored tensors, for each streaming form.

A recurrence defines which past values of a tensor are stored, as a list, and computes w_t from z_t
and that list. It is public and the same for all tensors; only z is secret. The forms
are those of ``affidavit.mechanisms.strategies.strategy.Streaming``. Zero coefficients are skipped,
so that noise without correlation equals z bit for bit.

>>> from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
>>> past: list[Tensor] = []
>>> step = recurrence_of(Bidiagonal.of(0.5, steps=3))
>>> [float(step(t, torch.tensor(8.0), past)) for t in range(3)]
[8.0, 4.0, 4.0]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import torch
from torch import Tensor

from affidavit.mechanisms.strategies import Strategy

Recurrence = Callable[[int, Tensor, list[Tensor]], Tensor]
"""Computes w from a step (from 0), z, which is not changed, and the stored values, which are."""

Coefficients = Callable[[int], Sequence[float]]
"""Returns a_0, a_1, ... of a step: the coefficient of the current value, then of past values."""


def recurrence_of(strategy: Strategy) -> Recurrence | None:
    """Return the recurrence of ``strategy.streaming``, or None if w_t equals z_t bit for bit.

    A clip schedule does not change the recurrence. Raises ``TooLarge`` if a matrix is needed and
    has too many rows.
    """
    strategy = strategy.injected
    streaming = strategy.streaming
    coefficients = streaming.coefficients
    column = _trim_zeros(coefficients) if coefficients else ()
    match streaming.form:
        case "independent":
            return None
        case "moving_average" | "autoregressive" if column == (1.0,) and not streaming.scaled:
            return None
        case "moving_average":
            average = _moving_average(lambda _: column, len(column) - 1)
            return _scale_rows(average, strategy, column[0]) if streaming.scaled else average
        case "autoregressive":
            return _autoregressive(lambda _: column, len(column) - 1)
        case "buffered":
            half = len(coefficients) // 2
            return _buffered(coefficients[:half], coefficients[half:])
        case "tree":
            assert streaming.period is not None
            return _tree(streaming.period)
        case "rows":
            return _rows(strategy)
        case form:
            assert_never(form)


def _moving_average(coefficients: Coefficients, max_past: int) -> Recurrence:
    """``state`` holds z_{t-1}, z_{t-2}, ..., at most ``max_past``."""

    def step(at: int, z: Tensor, state: list[Tensor]) -> Tensor:
        now, *past = coefficients(at)
        result = z if now == 1 else z * now
        for factor, before in zip(past, state, strict=False):
            if factor:
                result = torch.add(result, before, alpha=factor)
        state.insert(0, z)
        del state[max_past:]
        return result

    return step


def _autoregressive(coefficients: Coefficients, max_past: int) -> Recurrence:
    """``state`` holds w_{t-1}, w_{t-2}, ..., at most ``max_past``."""

    def step(at: int, z: Tensor, state: list[Tensor]) -> Tensor:
        now, *past = coefficients(at)
        result = z
        for factor, before in zip(past, state, strict=False):
            if factor:
                result = torch.add(result, before, alpha=-factor)
        result = result if now == 1 else result / now
        state.insert(0, result)
        del state[max_past:]
        return result

    return step


def _buffered(decays: Sequence[float], scales: Sequence[float]) -> Recurrence:
    """``state`` holds s_1, ..., s_d."""

    def step(at: int, z: Tensor, state: list[Tensor]) -> Tensor:
        if not at:
            state[:] = [torch.zeros_like(z) for _ in decays]
        result = z
        for scale, buffer in zip(scales, state, strict=True):
            result = torch.add(result, buffer, alpha=-scale)
        for place, decay in enumerate(decays):
            state[place] = torch.add(result, state[place], alpha=decay)
        return result

    return step


def _tree(period: int) -> Recurrence:
    """``state`` holds the nodes that make up the tree so far, the smallest last.

    The n-th step of a tree completes the node of 2^l steps, where n ends with l zeros. In the sum,
    this node replaces the l nodes below it. A node that is completed and replaced in the same step
    is never released, so one z per step is enough.
    """

    def step(at: int, z: Tensor, state: list[Tensor]) -> Tensor:
        inside = at % period + 1
        if inside == 1:
            state.clear()
        result = z
        for _ in range((inside & -inside).bit_length() - 1):
            result = result - state.pop()
        state.append(z)
        return result

    return step


def _rows(strategy: Strategy) -> Recurrence:
    """Use row t of C as an autoregression if C is banded, otherwise row t of N."""
    max_past = strategy.streaming.buffers
    by_strategy = strategy.bands <= min(max_past + 1, strategy.steps - 1)
    matrix = strategy.strategy_matrix() if by_strategy else strategy.noise_matrix()

    def coefficients(at: int) -> Sequence[float]:
        row: list[float] = matrix[at, max(0, at - max_past) : at + 1][::-1].tolist()
        return row

    return (_autoregressive if by_strategy else _moving_average)(coefficients, max_past)


def _scale_rows(run: Recurrence, strategy: Strategy, first: float) -> Recurrence:
    """Multiply the recurrence by d_t = N[t, t] / a_0, which is public."""

    def step(at: int, z: Tensor, state: list[Tensor]) -> Tensor:
        factor = float(strategy.noise_columns(at, at + 1)[at, 0]) / first
        return run(at, z, state) * factor

    return step


def _trim_zeros(coefficients: Sequence[float]) -> Sequence[float]:
    last = max(place for place, item in enumerate(coefficients) if item or not place)
    return coefficients[: last + 1]
