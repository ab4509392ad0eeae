"""A sweep for ``affidavit batch``: one plan a line, over lot sizes and noise multipliers."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Write the plans to standard output."""
    for lot_size in (256, 1024, 4096):
        for noise_multiplier in (0.7, 1.0, 1.4):
            plan = {
                "version": 1,
                "name": f"lot-{lot_size}-noise-{noise_multiplier}",
                "dataset": {"name": "e2e-nlg", "size": 42043},
                "adjacency": "add_remove",
                "sampling": {"scheme": "poisson", "lot_size": lot_size},
                "epochs": 10,
                "releases": [
                    {"name": "all", "clip_norm": 0.1, "noise_multiplier": noise_multiplier}
                ],
                "target": {"delta": 8e-6},
            }
            sys.stdout.write(json.dumps(plan) + "\n")


if __name__ == "__main__":
    main()
