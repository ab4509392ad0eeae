"""Time our accountant against other accountants, on fourteen plans, in one run on one thread.

Prints a markdown table: the two-sided bracket and its time, dp-accounting's default PLD
(pessimistic only) and its time, both calibrations, and the ratios. Imports and one
warm-up of each engine are excluded. Each time is the least processor time of several runs, so
that other load on the machine matters less:

    python bench/accounting.py [--prv] [--opacus PYTHON] [--repeats 3]

``--opacus`` adds the calibration of Opacus (``get_noise_multiplier`` with PRV), run by a Python
that has Opacus installed. Without it the bench says that it was left out.

``--prv`` adds prv-accountant at error 0.01, in a separate process that is stopped after
``--prv-seconds``, since it can take a minute and gigabytes.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import math
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant

from affidavit.accountants import Bracket, FourierAccountant, find_min_noise
from affidavit.plan import events


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One plan: q, σ, T, δ."""

    q: float
    sigma: float
    steps: int
    delta: float


ROWS = [
    Row(q=q, sigma=sigma, steps=steps, delta=delta)
    for q, sigma, steps, delta in (
        (0.004267, 1.1, 14062, 1e-5),
        (0.08192, 3.0, 875, 1e-5),
        (0.024, 0.72, 1000, 1e-6),
        (0.001, 1.0, 10_000, 1e-6),
        (1e-4, 0.5, 100_000, 1e-8),
        (0.1, 5.0, 1000, 1e-5),
        (0.1, 20.0, 100_000, 1e-10),
        (1.0, 20.0, 100, 1e-6),
        (0.01, 0.5, 1000, 1e-5),
        (0.024, 2.0, 10_000, 1e-10),
        (0.001, 0.72, 100_000, 1e-10),
        (0.1, 1.0, 10_000, 1e-5),
        (1e-4, 1.0, 1000, 1e-6),
        (0.002, 0.5, 10_000, 1e-9),
    )
]


def random_rows(count: int) -> list[Row]:
    """Return plans whose q, σ, T and δ are log-uniform in the ranges of real training."""
    draws = np.random.default_rng(24)

    def drawn(low: float, high: float) -> float:
        return math.exp(draws.uniform(math.log(low), math.log(high)))

    return [
        Row(
            q=drawn(1e-5, 0.3),
            sigma=drawn(0.4, 10.0),
            steps=int(drawn(10, 1e6)),
            delta=drawn(1e-10, 1e-4),
        )
        for _ in range(count)
    ]


def ours(row: Row, sigma: float) -> events.Event:
    """Return the plan as our event."""
    leaf: events.Event = (
        events.Gaussian(noise_multiplier=sigma)
        if row.q == 1
        else events.PoissonSubsampledGaussian(sampling_probability=row.q, noise_multiplier=sigma)
    )
    return events.Repeated(event=leaf, count=row.steps)


def theirs(row: Row, sigma: float) -> dp_accounting.DpEvent:
    """Return the plan as dp-accounting's event."""
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    leaf = gaussian if row.q == 1 else dp_accounting.PoissonSampledDpEvent(row.q, gaussian)
    return dp_accounting.SelfComposedDpEvent(leaf, row.steps)


Result = TypeVar("Result")


def timed(call: Callable[[], Result], repeats: int) -> tuple[Result, float]:
    """Return the result of a call, and its least processor time in seconds."""
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        result = call()
        best = min(best, time.process_time() - started)
    return result, best


def bracket_of(row: Row) -> Bracket:
    """Return our bracket of ε at the default width."""
    return FourierAccountant().curve(ours(row, row.sigma)).epsilon(row.delta)


def our_noise_of(row: Row, epsilon: float) -> float:
    """Return our calibrated noise, at the default slack of 1e-4."""
    engine = FourierAccountant()
    return find_min_noise(
        lambda sigma: engine.curve(ours(row, sigma)).epsilon(row.delta).upper,
        epsilon,
        guess=lambda sigma: engine.approximate_epsilon(ours(row, sigma), row.delta),
    )


def pld_of(row: Row) -> float:
    """Return ε by dp-accounting's default, pessimistic PLD accountant."""
    accountant = PLDAccountant()
    accountant.compose(theirs(row, row.sigma))
    return float(accountant.get_epsilon(row.delta))


def pld_noise(row: Row, epsilon: float) -> float:
    """Return dp-accounting's calibrated noise with PLD, at its default tolerance."""
    return float(
        dp_accounting.calibrate_dp_mechanism(
            PLDAccountant,
            lambda sigma: theirs(row, sigma),
            epsilon,
            row.delta,
            dp_accounting.LowerEndpointAndGuess(0.2, 2.0),
        )
    )


def prv_of(row: Row, answer: multiprocessing.Queue[tuple[float, float, float]]) -> None:
    """Return prv-accountant's interval at error 0.01, and its time."""
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    started = time.process_time()
    mechanism = PoissonSubsampledGaussianMechanism(
        sampling_probability=row.q, noise_multiplier=row.sigma
    )
    accountant = PRVAccountant(
        prvs=mechanism,
        max_self_compositions=row.steps,
        eps_error=0.01,
        delta_error=row.delta / 1000,
    )
    low, _, high = accountant.compute_epsilon(row.delta, row.steps)
    answer.put((float(low), float(high), time.process_time() - started))


def prv_within(row: Row, seconds: float) -> float | None:
    """Return prv-accountant's time, or None if it fails or takes longer than ``seconds``."""
    answer: multiprocessing.Queue[tuple[float, float, float]] = multiprocessing.Queue()
    process = multiprocessing.Process(target=prv_of, args=(row, answer))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.terminate()
        process.join()
        return None
    return None if answer.empty() else answer.get()[2]


_OPACUS = """
import sys, time, warnings
warnings.simplefilter("ignore")
from opacus.accountants.utils import get_noise_multiplier
q, steps, delta, epsilon = (float(text) for text in sys.argv[1:])
started = time.process_time()
noise = get_noise_multiplier(
    target_epsilon=epsilon, target_delta=delta, sample_rate=q, steps=int(steps), accountant="prv"
)
print(noise, time.process_time() - started)
"""


def opacus_noise_multiplier(python: str, row: Row, epsilon: float, seconds: float) -> float | None:
    """Return the processor time of Opacus' PRV calibration, or None if it fails."""
    numbers = [repr(value) for value in (row.q, row.steps, row.delta, epsilon)]
    try:
        result = subprocess.run(
            [python, "-c", _OPACUS, *numbers],
            capture_output=True, check=True, text=True, timeout=seconds,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError):
        return None
    return float(result.stdout.split()[-1])


def main(arguments: list[str]) -> None:
    """Run the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prv", action="store_true")
    parser.add_argument("--prv-seconds", type=float, default=60.0)
    parser.add_argument("--opacus", metavar="PYTHON")
    parser.add_argument("--no-calibration", action="store_true")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    bracket_of(ROWS[1])
    pld_of(ROWS[1])
    header = [
        "| q | σ | T | δ | ours: ε | width | ms | PLD ε | ms | ratio "
        "| calibration ours: σ | ms | PLD: σ | ms | ratio | Opacus ms | PRV ms |",
        "|" + "---|" * 17,
    ]
    _print(*header)
    ratios, calibration_ratios, opacus_ratios, prv_ratios = [], [], [], []
    for row in ROWS:
        bracket, our_time = timed(lambda row=row: bracket_of(row), max(3, options.repeats))
        their_epsilon, their_time = timed(lambda row=row: pld_of(row), options.repeats)
        ratios.append(their_time / our_time)
        cells = [
            f"{row.q:g}",
            f"{row.sigma:g}",
            f"{row.steps}",
            f"{row.delta:g}",
            f"[{bracket.lower:.6g}, {bracket.upper:.6g}]",
            f"{bracket.width / bracket.upper:.1e}",
            f"{our_time * 1e3:.1f}",
            f"{their_epsilon:.6g}",
            f"{their_time * 1e3:.0f}",
            f"{ratios[-1]:.1f}",
        ]
        if options.no_calibration:
            cells += [""] * 6
        else:
            target = bracket.upper
            our_noise, our_time_noise = timed(
                lambda row=row, target=target: our_noise_of(row, target),
                options.repeats,
            )
            their_noise, their_time_noise = timed(
                lambda row=row, target=target: pld_noise(row, target), 1
            )
            calibration_ratios.append(their_time_noise / our_time_noise)
            cells += [
                f"{our_noise:.6g}",
                f"{our_time_noise * 1e3:.0f}",
                f"{their_noise:.6g}",
                f"{their_time_noise * 1e3:.0f}",
                f"{calibration_ratios[-1]:.0f}",
            ]
            opacus = None
            if options.opacus and row.q < 1:
                opacus = opacus_noise_multiplier(options.opacus, row, target, options.prv_seconds)
            if opacus is not None:
                opacus_ratios.append(opacus / our_time_noise)
            cells.append("" if opacus is None else f"{opacus * 1e3:.0f}")
        prv_time = prv_within(row, options.prv_seconds) if options.prv and row.q < 1 else None
        if prv_time is not None:
            prv_ratios.append(prv_time / our_time)
        cells.append("" if prv_time is None else f"{prv_time * 1e3:.0f}")
        _print("| " + " | ".join(cells) + " |")
    summary = [
        f"PLD: median {statistics.median(ratios):.1f}x, least {min(ratios):.1f}x, "
        f"most {max(ratios):.1f}x."
    ]
    if calibration_ratios:
        summary.append(
            f"Calibration: median {statistics.median(calibration_ratios):.0f}x, "
            f"least {min(calibration_ratios):.0f}x."
        )
    if opacus_ratios:
        summary.append(
            f"Opacus' calibration with PRV, where it ended in time: median "
            f"{statistics.median(opacus_ratios):.0f}x, least {min(opacus_ratios):.0f}x."
        )
    elif calibration_ratios:
        summary.append("Opacus was left out: no Python that has it was given.")
    if prv_ratios:
        summary.append(
            f"PRV at error 0.01, where it ended in time: median "
            f"{statistics.median(prv_ratios):.0f}x, least {min(prv_ratios):.0f}x."
        )
    summary.append(random_plans(24))
    machine = (
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, dp-accounting {version('dp-accounting')}, one thread."
    )
    _print("", *summary, machine)


def random_plans(count: int) -> str:
    """Describe the ratios to dp-accounting's PLD on ``count`` random plans, and our times."""
    ratios, times, noise_times = [], [], []
    for row in random_rows(count):
        bracket, our_time = timed(lambda row=row: bracket_of(row), 3)
        _, their_time = timed(lambda row=row: pld_of(row), 1)
        _, noise_time = timed(lambda row=row, to=bracket.upper: our_noise_of(row, to), 1)
        ratios.append(their_time / our_time)
        times.append(our_time * 1e3)
        noise_times.append(noise_time * 1e3)
    return (
        f"{count} random plans (q 1e-5 to 0.3, σ 0.4 to 10, T 10 to 1e6, δ 1e-10 to 1e-4): PLD "
        f"median {statistics.median(ratios):.1f}x, least {min(ratios):.1f}x; ours median "
        f"{statistics.median(times):.1f} ms, most {max(times):.0f} ms; calibration median "
        f"{statistics.median(noise_times):.0f} ms, most {max(noise_times):.0f} ms."
    )


def _print(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
