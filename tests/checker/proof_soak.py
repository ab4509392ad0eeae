"""Random runs of every kind that the checker covers: ``python -m tests.checker.proof_soak``.

``python -m tests.checker.proof_soak FILE [SEED [NUMBER]]`` writes a line for each run to FILE,
and goes on after the last one if it was stopped. Each run is proved within 1e-4 of the engine's
upper end, and nothing below its lower end is proved.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from affidavit.accountants import search_witness
from affidavit.accountants.registry import accountant
from affidavit.checker import Unproved, Witness, prove
from affidavit.plan import events

MAX_ABOVE = 1e-4
LOOSENESS = 0.99 * MAX_ABOVE
"""Of a search, so that decimals that are rounded up stay below ``MAX_ABOVE``."""


def random_run(draw: random.Random) -> events.Event:
    """A run of one to three kinds of release, of all kinds that have a row."""

    def release() -> events.Event:
        q, sigma = 10 ** draw.uniform(-4, -0.5), 10 ** draw.uniform(-0.25, 1)
        steps = int(10 ** draw.uniform(0, 3))
        match draw.randrange(5):
            case 0 | 1 as replaced:
                leaf: events.Event = events.PoissonSubsampledGaussian(
                    sampling_probability=q,
                    noise_multiplier=sigma,
                    pair="replace_one" if replaced else "add_remove",
                )
            case 2:
                leaf = events.WithoutReplacementGaussian(
                    dataset_size=10_000,
                    sample_size=max(1, round(q * 10_000)),
                    noise_multiplier=2 * sigma,
                )
            case 3:
                lot = max(1, round(2000 * q + draw.uniform(0, 5) * (2000 * q) ** 0.5))
                leaf = events.TruncatedPoissonGaussian(
                    dataset_size=2000,
                    sampling_probability=q,
                    max_lot_size=min(2000, lot),
                    noise_multiplier=sigma,
                    neighbours=draw.choice(("add_remove", "zero_out", "replace_one")),
                )
            case _:
                leaf = events.Gaussian(noise_multiplier=sigma * steps**0.5)
        return events.Repeated(event=leaf, count=steps)

    if draw.random() < 0.1:
        return events.RandomAllocationGaussian(
            bins=draw.randrange(2, 200), noise_multiplier=draw.uniform(0.6, 5)
        )
    return events.Composed(events=tuple(release() for _ in range(draw.choice((1, 1, 1, 1, 2, 3)))))


def proved_above(event: events.Event, delta: float) -> float | None:
    """How far above the engine's upper end a bound is proved, relative to it; None for ε = 0.

    Raises ``Unproved`` where none is, and ``AssertionError`` where one below the truth is.
    """
    name = "allocation" if isinstance(event, events.RandomAllocationGaussian) else "fourier"
    bracket = accountant(name).curve(event).epsilon(delta)
    if bracket.upper == 0:
        return None
    witness, proof = search_witness(event, bracket, delta, LOOSENESS)
    # The tight value is at least the engine's lower end.
    below = bracket.lower * (1 - 1e-9)
    claim = Witness(epsilon=repr(below), delta=witness.delta, runs=witness.runs)
    try:
        prove(claim, event)
    except Unproved:
        return float(proof.epsilon) / bracket.upper - 1
    raise AssertionError(f"ε ≤ {below} is proved of {event} at δ = {delta}")


def numbered_run(seed: int, index: int) -> tuple[events.Event, float]:
    """A run and its δ, the same whatever was drawn before."""
    draw = random.Random(f"{seed}/{index}")
    return random_run(draw), 10 ** draw.uniform(-10, -4)


def outcome(event: events.Event, delta: float) -> str:
    """What came of one run, as a line."""
    try:
        ratio = proved_above(event, delta)
    except (AssertionError, Unproved) as failure:
        return f"failed: {failure} {event} δ = {delta!r}"
    if ratio is None:
        return "ε is zero"
    return f"proved {ratio:.2e} above" if ratio <= MAX_ABOVE else f"failed: {ratio} above {event}"


def main(arguments: list[str]) -> int:
    """Draw and prove; 1 if a run was not proved, or too little was."""
    path = Path(arguments[0])
    seed, number = (int(text) for text in (*arguments[1:], *("1", "1000")[len(arguments) - 1 :]))
    path.touch()
    for index in range(len(path.read_text().splitlines()), number):
        with path.open("a") as lines:
            lines.write(outcome(*numbered_run(seed, index)) + "\n")
    outcomes = path.read_text().splitlines()
    failures = [line for line in outcomes if line.startswith("failed")]
    sys.stdout.write(f"{len(outcomes)} runs, {len(failures)} failures\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
