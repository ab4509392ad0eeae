"""Measure the cost of an answer by number of steps, by sampling rate, and in a batch.

Prints two tables (processor time, traced peak of memory, counted points, width), the cost of
a thousand plans of a sweep against single ones, and writes a picture of the first table:

    python bench/accounting_sweeps.py [--svg contributing/benchmarks-steps.svg]

A single plan is answered by a fresh accountant with empty caches.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import math
import sys
import time
import tracemalloc
from pathlib import Path

from affidavit.accountants import Bracket, FourierAccountant, OutOfReach
from affidavit.plan import events

STEPS = tuple(10**power for power in range(2, 8))
LINES = ((0.01, 2.0), (1e-3, 1.0), (1e-4, 0.8))
RATES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5)


def plan(q: float, sigma: float, steps: int) -> events.Repeated:
    """Return one leaf event, repeated."""
    leaf = events.PoissonSubsampledGaussian(sampling_probability=q, noise_multiplier=sigma)
    return events.Repeated(event=leaf, count=steps)


def timed(event: events.Repeated, delta: float, repeats: int = 3) -> tuple[Bracket, float]:
    """Return the bracket and its least processor time in seconds."""
    best = math.inf
    for _ in range(repeats):
        started = time.process_time()
        bracket = FourierAccountant().curve(event).epsilon(delta)
        best = min(best, time.process_time() - started)
    return bracket, best


def row(q: float, sigma: float, steps: int, delta: float = 1e-6) -> float | None:
    """Print a table row, and return the time in seconds, or None if the plan is refused."""
    event = plan(q, sigma, steps)
    try:
        bracket, seconds = timed(event, delta)
    except OutOfReach as refusal:
        _print(f"| {q:g} | {sigma:g} | {steps} | refused: {refusal.message} | | | |")
        return None
    tracemalloc.start()
    FourierAccountant().curve(event).epsilon(delta)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    width = bracket.width / bracket.upper if bracket.upper else 0.0
    _print(
        f"| {q:g} | {sigma:g} | {steps} | [{bracket.lower:.6g}, {bracket.upper:.6g}] "
        f"| {width:.1e} | {seconds * 1e3:.1f} | {peak / 2**20:.1f} |"
    )
    return seconds


def batch() -> None:
    """Time a thousand plans of each of three sweeps with one accountant, and singly."""
    sweeps = {
        "100 numbers of steps, 10 δ": [
            (plan(0.01, 1.0, 500 + 50 * index), 10.0**-power)
            for index in range(100)
            for power in range(4, 14)
        ],
        "10 rates, 10 noise multipliers, 10 numbers of steps": [
            (plan(0.002 * rate, 0.8 + 0.2 * index, 500 * epochs), 1e-6)
            for rate in range(1, 11)
            for index in range(10)
            for epochs in range(1, 11)
        ],
        "10 rates, 100 noise multipliers": [
            (plan(0.002 * rate, 0.8 + 0.02 * index, 2000), 1e-6)
            for rate in range(1, 11)
            for index in range(100)
        ],
    }
    for name, plans in sweeps.items():
        # Of every inner loop above another place each time.
        sample = plans[::37]
        single = sum(timed(event, delta, 1)[1] for event, delta in sample) / len(sample)
        started = time.process_time()
        accountant = FourierAccountant()
        for event, delta in plans:
            accountant.curve(event).epsilon(delta)
        together = time.process_time() - started
        _print(
            f"{name}: {len(plans)} plans cost {together:.1f} s, as much as "
            f"{together / single:.0f} single ones."
        )


def picture(lines: dict[str, list[tuple[int, float]]]) -> str:
    """Draw time against steps as SVG, both logarithmic."""
    width, height, left, bottom = 560, 320, 60, 40

    def x(steps: float) -> float:
        return left + (width - left - 120) * (math.log10(steps) - 2) / 5

    def y(seconds: float) -> float:
        return height - bottom - (height - bottom - 20) * (math.log10(seconds) + 3) / 3

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for power in range(2, 8):
        parts.append(f'<text x="{x(10**power):.0f}" y="{height - 20}">1e{power}</text>')
    for power in range(-3, 1):
        at = y(10.0**power)
        parts.append(
            f'<path d="M{left} {at:.1f}H{width - 120}" stroke="#ddd"/>'
            f'<text x="6" y="{at + 4:.1f}">{10.0**power:g} s</text>'
        )
    colours = ("#1b6ca8", "#c1440e", "#2e7d32")
    for (name, points), colour in zip(lines.items(), colours, strict=True):
        way = " L".join(f"{x(steps):.1f} {y(seconds):.1f}" for steps, seconds in points)
        steps, seconds = points[-1]
        parts.append(f'<path d="M{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{x(steps) + 6:.1f}" y="{y(seconds) + 4:.1f}" fill="{colour}">{name}</text>'
        )
    parts.append(
        f'<text x="{left}" y="{height - 5}">steps; processor seconds an answer</text></svg>'
    )
    return "\n".join(parts)


def main(arguments: list[str]) -> None:
    """Print the tables, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args(arguments)
    timed(plan(0.01, 1.0, 100), 1e-6)
    _print("| q | σ | T | ε at δ = 1e-6 | width | ms | MiB |", "|" + "---|" * 7)
    lines: dict[str, list[tuple[int, float]]] = {}
    for q, sigma in LINES:
        result = [(steps, row(q, sigma, steps)) for steps in STEPS]
        lines[f"q={q:g}, σ={sigma:g}"] = [(t, s) for t, s in result if s is not None]
    for q in RATES:
        row(q, 1.5, 10_000)
    _print("")
    batch()
    if options.svg:
        options.svg.write_text(picture(lines))


def _print(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
