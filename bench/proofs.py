"""What it costs to prove a bound in ball arithmetic: the plans of ``accounting.py`` and DP-Muon's.

    python -m bench.proofs

Seconds are of one processor: the search for a witness, which runs the checker at least once, and
the checker alone. "Above" is how far the proved ε lies above the engine's, relative to it.
"""

from __future__ import annotations

import statistics
import sys
import time

from affidavit.accountants import Bracket, FourierAccountant, prove, search_witness
from bench.accounting import ROWS, Row, ours

MUON = [
    Row(q=1024 / 42043, sigma=2.3395 / 7, steps=410, delta=8e-6),
    Row(q=1024 / 60591, sigma=2.3614 / 7, steps=885, delta=1e-5),
]


def main() -> None:
    """Print one row a plan, and the medians."""
    sys.stdout.write("| q | σ | T | δ | ε proved | above | search, s | check, s |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|---|\n")
    checks = []
    for row in (*ROWS, *MUON):
        event = ours(row, row.sigma)
        upper = FourierAccountant().curve(event).epsilon(row.delta).upper
        start = time.process_time()
        above = Bracket(lower=upper, upper=upper * (1 + 0.99e-4))
        witness, _ = search_witness(event, above, row.delta)
        between = time.process_time()
        proof = prove(witness, event)
        end = time.process_time()
        checks.append(end - between)
        above = float(proof.epsilon) / upper - 1
        sys.stdout.write(
            f"| {row.q:.6g} | {row.sigma:.6g} | {row.steps} | {row.delta:g} "
            f"| {float(proof.epsilon):.6g} | {above:.1e} "
            f"| {between - start:.2f} | {end - between:.2f} |\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"\nMedian of the first 14: {statistics.median(checks[:14]):.2f} s.\n")


if __name__ == "__main__":
    main()
