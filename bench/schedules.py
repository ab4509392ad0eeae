"""Bracket a noise schedule, beside dp-accounting's Rényi bound.

    python bench/schedules.py

1,000 noise multipliers from 0.7 to 1.4 for 100 steps each, q = 0.01, δ = 1e-6.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.plan import events

KINDS, STEPS, Q, DELTA = 1000, 100, 0.01, 1e-6


def main() -> None:
    """Print a row for each accountant, with processor times."""
    sigmas = [float(sigma) for sigma in np.linspace(0.7, 1.4, KINDS)]
    leaves = [
        events.PoissonSubsampledGaussian(sampling_probability=Q, noise_multiplier=sigma)
        for sigma in sigmas
    ]
    start = time.process_time()
    run = events.Composed(events=tuple(events.Repeated(event=leaf, count=STEPS) for leaf in leaves))
    ours = FourierAccountant().curve(run).epsilon(DELTA)
    between = time.process_time()
    peer = RdpAccountant()
    for sigma in sigmas:
        peer.compose(PoissonSampledDpEvent(Q, GaussianDpEvent(sigma)), STEPS)
    theirs = peer.get_epsilon(DELTA)
    end = time.process_time()
    sys.stdout.write("| | ε | s |\n|---|---|---|\n")
    sys.stdout.write(f"| ours | [{ours.lower:.6g}, {ours.upper:.6g}] | {between - start:.1f} |\n")
    sys.stdout.write(f"| dp-accounting's RDP | at most {theirs:.6g} | {end - between:.1f} |\n")


if __name__ == "__main__":
    main()
