"""Bracket truncated Poisson sampling at several caps, with times, beside dp-accounting.

    python bench/truncated_lots.py

The plans are VaultGemma's (N = 1.27e10) and a small one. The smallest cap cuts every other lot.
"""

from __future__ import annotations

import sys
import time

from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from dp_accounting.pld import PLDAccountant

from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.plan import events

PLANS = (
    (
        12_700_000_000,
        517_989,
        0.614,
        100_000,
        1.1e-10,
        (525_000, 523_000, 522_000, 521_000, 520_000),
    ),
    (50_000, 500, 1.0, 2000, 1e-6, (700, 600, 550, 500)),
)
"""Records, expected lot, σ, steps, δ and caps."""


def main() -> None:
    """Print a row for each cap."""
    sys.stdout.write("| N | B | cap | ours: ε | ms | dp-accounting: ε | ms |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for size, lot, sigma, steps, delta, caps in PLANS:
        for cap in caps:
            leaf = events.TruncatedPoissonGaussian(
                dataset_size=size,
                sampling_probability=lot / size,
                max_lot_size=cap,
                noise_multiplier=sigma,
                neighbours="zero_out",
            )
            start = time.perf_counter()
            ours = (
                FourierAccountant().curve(events.Repeated(event=leaf, count=steps)).epsilon(delta)
            )
            between = time.perf_counter()
            peer = PLDAccountant()
            event = TruncatedSubsampledGaussianDpEvent(size, lot / size, cap, sigma)
            theirs = peer.compose(event, steps).get_epsilon(delta)
            end = time.perf_counter()
            sys.stdout.write(
                f"| {size:g} | {lot} | {cap} | [{ours.lower:.5g}, {ours.upper:.5g}] "
                f"| {1e3 * (between - start):.0f} | {theirs:.5g} | {1e3 * (end - between):.0f} |\n"
            )


if __name__ == "__main__":
    main()
