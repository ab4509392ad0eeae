"""Compare the construction of strategies with jax-privacy's, by CPU seconds and loss, in one run.

Prints Markdown tables. The loss is the rms error (or the largest, where stated) times the
sensitivity for the prefix sum, evaluated by this project for both. CPU time is used because cores
may be shared: the least of three runs for ours, one run after a warm-up for jax-privacy's. Without
jax-privacy, only our numbers are shown.

    make bench BENCHES=strategies
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import contextlib
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from jax_client import Oracle

from affidavit.mechanisms.strategies import Dense, Participation, Strategy, Workload, best_lambda
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.optimal.blt import optimal_blt
from affidavit.mechanisms.strategies.optimal.dense import optimal_dense
from affidavit.mechanisms.strategies.optimal.toeplitz import (
    best_gamma,
    optimal_banded_inverse,
    optimal_toeplitz,
)
from affidavit.mechanisms.strategies.toeplitz import (
    Toeplitz,
    banded_inverse_fractional_root,
    banded_inverse_root,
    square_root,
)

ONCE = Participation.single()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One construction: ours, jax-privacy's as a request, and how to read its answer."""

    name: str
    participation: Participation
    ours: Callable[[], Strategy]
    task: str
    arguments: dict[str, Any]
    read: Callable[[Any], Strategy]
    largest: bool = False
    floor: float = 100.0


def toeplitz_row(steps: int, bands: int) -> Row:
    """A banded Toeplitz strategy with one participation."""
    return Row(
        name=f"Toeplitz, {bands} bands, T = {steps}",
        participation=ONCE,
        ours=lambda: Toeplitz.from_strategy(
            optimal_toeplitz(steps, Workload(), ONCE, bands=bands), steps
        ),
        task="optimise_toeplitz",
        arguments={"steps": steps, "bands": bands},
        read=lambda column: Toeplitz.from_strategy(column, steps),
    )


def blt_row(steps: int, buffers: int, participation: Participation, largest: bool) -> Row:
    """A buffered strategy with as many buffers as jax-privacy chooses."""

    def ours() -> Strategy:
        decays, scales = optimal_blt(
            steps, buffers, Workload(), participation, objective="max" if largest else "rms"
        )
        return Blt.of(decays.tolist(), scales.tolist(), steps)

    most = participation.max_participations(steps)
    separated = {"min_sep": participation.separation, "max_participations": most}
    return Row(
        name=f"BLT, {buffers} buffers, T = {steps}, k = {most}" + largest * ", largest error",
        participation=participation,
        ours=ours,
        task="optimise_blt",
        arguments={
            "n": steps,
            "error": "max" if largest else "mean",
            "max_buffers": buffers,
            **(separated if most > 1 else {}),
        },
        read=lambda found: Blt.of(found["decays"], found["scales"], steps),
        largest=largest,
    )


def dense_row(steps: int, epochs: int) -> Row:
    """The optimal strategy for a fixed order of several epochs."""
    participation = (
        Participation.fixed_epoch(participations=epochs, separation=steps // epochs)
        if epochs > 1
        else ONCE
    )
    return Row(
        name=f"dense, T = {steps}, k = {epochs}",
        participation=participation,
        ours=lambda: Dense.from_strategy(optimal_dense(np.tri(steps), participation)[0]),
        task="optimise_dense",
        arguments={"steps": steps, "epochs": epochs},
        read=lambda matrix: Dense.from_strategy(np.tril(np.array(matrix))),
        floor=3.0,
    )


ROWS = [
    toeplitz_row(10_000, 16),
    toeplitz_row(10_000, 64),
    toeplitz_row(10_000, 128),
    blt_row(10_000, 4, ONCE, largest=True),
    blt_row(
        10_000,
        3,
        Participation.min_separation(participations=10, separation=1000),
        largest=False,
    ),
    dense_row(500, 1),
    dense_row(500, 5),
]


def loss_of(strategy: Strategy, row: Row) -> float:
    """Return error times sensitivity."""
    errors = strategy.errors(Workload())
    size = errors.max if row.largest else errors.rms
    return size * strategy.sensitivity(row.participation).value


def timed(call: Callable[[], Any], repeats: int = 3) -> tuple[Any, float]:
    """Return the result and the least CPU seconds."""
    best, result = float("inf"), None
    for _ in range(repeats):
        started = time.process_time()
        result = call()
        best = min(best, time.process_time() - started)
    return result, best


def comparison(oracle: Oracle | None) -> None:
    """Print the comparison with jax-privacy."""
    _print(
        "| strategy | our loss | CPU s | jax-privacy's loss | CPU s | their loss / ours | ratio |",
        "|" + "---|" * 7,
    )
    for row in ROWS:
        strategy, seconds = timed(row.ours)
        loss = loss_of(strategy, row)
        cells = [row.name, f"{loss:.6f}", f"{seconds:.3f}", "", "", "", ""]
        if oracle is not None:
            answer = oracle.ask(row.task, **row.arguments)
            other = loss_of(row.read(answer.result), row)
            cells[3:] = [
                f"{other:.6f}",
                f"{answer.seconds:.1f}",
                f"{other / loss:.9f}",
                f"{answer.seconds / seconds:.0f} (floor {row.floor:.0f})",
            ]
        _print("| " + " | ".join(cells) + " |")


def thousand_steps() -> None:
    """Print every family at T = 1000, b = 100, k = 10."""
    steps, epochs = 1000, Participation.fixed_epoch(participations=10, separation=100)
    workload = Workload()
    families: dict[str, Callable[[], Strategy]] = {
        "bidiagonal, best λ": lambda: Bidiagonal.of(best_lambda(steps, workload, epochs), steps),
        "BISR, 64 bands": lambda: banded_inverse_root(steps, bands=64),
        "BIFR, 64 bands": lambda: banded_inverse_fractional_root(
            steps, bands=64, gamma=best_gamma(steps, workload, epochs, bands=64)
        ),
        "banded inverse, 4": lambda: Toeplitz.from_noise(
            optimal_banded_inverse(steps, workload, epochs, bands=4), steps
        ),
        "banded Toeplitz, 100": lambda: Toeplitz.from_strategy(
            optimal_toeplitz(steps, workload, epochs, bands=100), steps
        ),
        "BLT, 2 buffers": lambda: Blt.of(
            *(result.tolist() for result in optimal_blt(steps, 2, workload, epochs)), steps
        ),
        "dense": lambda: Dense.from_strategy(optimal_dense(np.tri(steps), epochs)[0]),
    }
    _print("", "| T = 1000, b = 100, k = 10 | rms at μ = 1 | CPU ms |", "|---|---|---|")
    for name, construct in families.items():
        strategy, seconds = timed(construct)
        rms = strategy.errors(workload).rms * strategy.sensitivity(epochs).value
        _print(f"| {name} | {rms:.3f} | {seconds * 1e3:.1f} |")
    _, gap = optimal_dense(np.tri(steps), epochs)
    _print("", f"Dense, proved relative gap of the squared loss: {gap:.1e}.")


def many_steps() -> None:
    """Print times that must hardly grow with the number of steps."""
    _print("", "| at T steps | 1e3 | 1e6 | 1e9 |", "|---|---|---|---|")
    apart = [
        Participation.min_separation(participations=10, separation=steps // 10)
        for steps in (10**3, 10**6, 10**9)
    ]
    cells: dict[str, list[str]] = {"bidiagonal: sensitivity, ms": [], "BLT, 4 buffers, ms": []}
    for participation in apart:
        steps = participation.separation * 10
        strategy = Bidiagonal.of(0.9, steps)
        _, seconds = timed(lambda one=strategy, at=participation: one.sensitivity(at), 20)
        cells["bidiagonal: sensitivity, ms"].append(f"{seconds * 1e3:.3f}")
        _, seconds = timed(
            lambda at=participation, steps=steps: optimal_blt(steps, 4, Workload(), at)
        )
        cells["BLT, 4 buffers, ms"].append(f"{seconds * 1e3:.0f}")
    column = square_root(10**6).strategy_coefficients
    full = Toeplitz.from_strategy(column, 10**6)
    _, seconds = timed(lambda: full.sensitivity(apart[1]), 5)
    cells["full Toeplitz: sensitivity, ms (floor 50)"] = ["", f"{seconds * 1e3:.1f}", ""]
    for name, values in cells.items():
        _print(f"| {name} | " + " | ".join(values) + " |")


def main() -> None:
    """Run and print."""
    optimal_toeplitz(100, Workload(), ONCE, bands=4)
    with contextlib.ExitStack() as stack:
        comparison(stack.enter_context(Oracle()) if Oracle.available() else None)
    thousand_steps()
    many_steps()
    _print(
        "",
        f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, "
        f"scipy {scipy.__version__}, one thread.",
    )


def _print(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
