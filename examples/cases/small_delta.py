"""What dp-accounting's privacy-loss accountant reports at small δ, beside a proved bracket.

Reads ``small-delta.yaml`` beside it, asks for ε at several δ, and prints a row for each:
dp-accounting's PLD value (default grid), the lower and the upper end of our bracket, and
dp-accounting's own Rényi bound, which is an upper bound at every δ.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

from dp_accounting import dp_event, pld, rdp

from affidavit.assessment import certify
from affidavit.plan import parse_plan

PLAN = Path(__file__).with_name("small-delta.yaml")
DELTAS = ("1.0e-5", "1.0e-9", "1.0e-13", "1.0e-14")


def main() -> None:
    text = PLAN.read_text()
    plan = parse_plan(text.encode(), "yaml")
    lot, size = plan.phases[0].sampling.lot_size, plan.dataset.size
    sigma = plan.phases[0].releases[0].noise_multiplier
    step = dp_event.PoissonSampledDpEvent(lot / size, dp_event.GaussianDpEvent(sigma))
    run = dp_event.SelfComposedDpEvent(step, plan.phases[0].steps)
    losses, renyi = pld.PLDAccountant().compose(run), rdp.RdpAccountant().compose(run)
    sys.stdout.write(f"dp-accounting {version('dp-accounting')}\n")
    sys.stdout.write("delta    its PLD  proved lower  proved upper  its RDP\n")
    for delta in DELTAS:
        requested = parse_plan(text.replace("1.0e-14", delta).encode(), "yaml")
        proved = certify(requested, second_opinion=False).epsilon
        values = (losses.get_epsilon(float(delta)), proved.lower, proved.upper)
        told = "  ".join(f"{value:.4f}" for value in (*values, renyi.get_epsilon(float(delta))))
        sys.stdout.write(
            f"{delta}  {told}{'  below the truth' if values[0] < proved.lower else ''}\n"
        )


if __name__ == "__main__":
    main()
