"""Time proofs in ball arithmetic, for the plans of ``accounting.py`` and DP-Muon's.

    python -m bench.proofs

Times are processor seconds of the search for a witness, which runs the checker at least once, and
of the checker alone. "Above" is the relative distance of the proved ε above the engine's. The last
two columns time a certificate's second opinion: the checker's, and that of the first other library
that supports the run.
"""

from __future__ import annotations

import statistics
import sys
import time

from affidavit.accountants import (
    QUICK_NODES,
    SECOND_OPINIONS,
    AccountantError,
    Bracket,
    FourierAccountant,
    accountant,
    search_witness,
)
from affidavit.assessment.certification import AGREEMENT_TOLERANCE
from affidavit.checker import prove
from affidavit.plan import events
from bench.accounting import ROWS, Row, ours

MUON = [
    Row(q=1024 / 42043, sigma=2.3395 / 7, steps=410, delta=8e-6),
    Row(q=1024 / 60591, sigma=2.3614 / 7, steps=885, delta=1e-5),
]


KINDS = events.Composed(
    events=tuple(
        events.Repeated(
            event=events.PoissonSubsampledGaussian(
                sampling_probability=0.01 + 0.001 * kind, noise_multiplier=1 + 0.05 * kind
            ),
            count=300,
        )
        for kind in range(10)
    )
)
"""A run of ten kinds of release."""


def opinions_of(event: events.Event, bracket: Bracket, delta: float) -> tuple[float, float]:
    """Return the seconds of the checker's second opinion, and of another library's."""
    begun = time.process_time()
    search_witness(event, bracket, delta, AGREEMENT_TOLERANCE, QUICK_NODES)
    quick = time.process_time()
    library_opinion(event, delta)
    return quick - begun, time.process_time() - quick


def library_opinion(event: events.Event, delta: float) -> None:
    """Return the opinion of the first other library that supports ``event``."""
    for name in SECOND_OPINIONS:
        try:
            accountant(name).curve(event).epsilon(delta)
        except AccountantError:
            continue
        return


def main() -> None:
    """Print a row for each plan, and the medians."""
    sys.stdout.write("| q | σ | T | δ | ε proved | above | search, s | check, s ")
    sys.stdout.write("| second opinion: checker, s | library, s |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|---|---|---|\n")
    checks: list[float] = []
    opinions: list[tuple[float, float]] = []
    library_opinion(ours(ROWS[0], 1.0), 1e-5)  # the libraries are imported once
    for row in (*ROWS, *MUON):
        event = ours(row, row.sigma)
        bracket = FourierAccountant().curve(event).epsilon(row.delta)
        upper = bracket.upper
        start = time.process_time()
        witness, _ = search_witness(event, bracket, row.delta, 0.99e-4)
        between = time.process_time()
        proof = prove(witness, event)
        end = time.process_time()
        checks.append(end - between)
        opinions.append(opinions_of(event, bracket, row.delta))
        above = float(proof.epsilon) / upper - 1
        sys.stdout.write(
            f"| {row.q:.6g} | {row.sigma:.6g} | {row.steps} | {row.delta:g} "
            f"| {float(proof.epsilon):.6g} | {above:.1e} "
            f"| {between - start:.2f} | {end - between:.2f} "
            f"| {opinions[-1][0]:.2f} | {opinions[-1][1]:.2f} |\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"\nMedian of the first 14: {statistics.median(checks[:14]):.2f} s.\n")
    checker, library = (sum(column) for column in zip(*opinions, strict=True))
    sys.stdout.write(f"All second opinions: {checker:.1f} s, {library:.1f} s by the libraries.\n")
    bracket = FourierAccountant().curve(KINDS).epsilon(1e-6)
    checker, library = opinions_of(KINDS, bracket, 1e-6)
    sys.stdout.write(f"Ten kinds of release, δ = 1e-06: {checker:.2f} s, {library:.2f} s.\n")


if __name__ == "__main__":
    main()
