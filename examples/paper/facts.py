"""``python -m examples.paper.facts``: what two sentences of papers amount to.

The DP-Muon paper covers ``replace_one`` by σ/2 with the curve of ``add_remove``. That is an upper
bound; the tight pair costs much less. The denoising paper counts wins of its tables 4 and 5, whose
scores are below: BLEU, ROUGE-L, METEOR, NIST and CIDEr, of the baseline and denoised.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path

from ruamel.yaml import YAML

from affidavit.assessment import certify
from affidavit.plan import plan_from

EXAMPLES = Path(__file__).parents[1]
SCORES_AT_50_STEPS = """
23.17 46.78 0.509 2.34 0.67  37.35 53.52 0.628 4.60 1.11
36.01 53.57 0.609 4.64 1.08  36.95 54.42 0.624 4.71 1.14
40.00 55.19 0.659 4.83 1.27  40.88 55.74 0.663 5.03 1.36
22.15 44.24 0.476 2.59 0.47  36.33 52.86 0.626 4.62 1.13
10.96 25.22 0.268 0.93 0.22  26.33 44.36 0.516 3.48 0.64
14.66 33.44 0.323 0.91 0.59  23.58 46.46 0.462 2.87 0.84
21.77 46.98 0.483 4.23 0.86  33.29 51.95 0.579 5.26 1.26
21.74 44.47 0.522 3.84 0.86  21.78 46.98 0.484 4.22 0.86
 8.88 37.38 0.368 2.86 0.41  13.81 43.12 0.454 3.68 0.73
 6.12 30.08 0.319 2.13 0.26   9.47 37.33 0.375 2.95 0.47
"""
SCORES_AT_400_STEPS = """
38.77 53.57 0.661 4.83 1.17  38.94 55.07 0.668 4.87 1.20
40.00 55.70 0.661 4.91 1.22  40.05 55.73 0.670 4.92 1.23
40.58 56.47 0.678 5.00 1.32  40.44 56.33 0.676 4.99 1.28
37.06 54.94 0.629 4.65 1.21  39.70 55.29 0.662 4.93 1.30
39.02 54.68 0.659 4.89 1.25  39.64 54.83 0.682 4.91 1.29
25.99 50.44 0.595 3.38 1.01  25.43 50.23 0.510 3.37 1.02
31.07 52.63 0.572 4.77 1.26  30.98 52.89 0.581 4.93 1.26
29.70 52.22 0.571 4.63 1.22  34.82 54.71 0.594 5.29 1.38
20.03 46.40 0.466 3.91 0.79  19.41 46.85 0.479 3.95 0.81
23.56 48.01 0.512 4.60 1.00  21.51 44.25 0.461 3.80 0.87
"""
"""Five models on E2E, then on DART, a line each."""


def replaced(row: str, *, halved: bool) -> float:
    """ε of the row's DP-SGD if a record is replaced: tight, or by σ/2 under ``add_remove``."""
    document = YAML(typ="safe").load(EXAMPLES / f"{row}-dp-sgd-published.yaml")
    document["adjacency"] = "add_remove" if halved else "replace_one"
    document["releases"][0]["noise_multiplier"] /= 1 + halved
    result = certify(plan_from(document), second_opinion=False)
    assert result.epsilon is not None  # Poisson lots are covered
    return result.epsilon.upper


def wins(table: str) -> tuple[int, int, int]:
    """How often the denoised score is higher, equal and lower."""
    lines = [[float(score) for score in line.split()] for line in table.strip().splitlines()]
    pairs = [pair for line in lines for pair in zip(line[:5], line[5:], strict=True)]
    higher, equal = sum(b > a for a, b in pairs), sum(a == b for a, b in pairs)
    return higher, equal, len(pairs) - higher - equal


def facts() -> Iterable[str]:
    """Every fact, a line each."""
    for row in ("e2e", "dart"):
        bounds = (replaced(row, halved=halved) for halved in (False, True))
        tight, halved = (f"{math.ceil(bound * 1e4) / 1e4:.4f}" for bound in bounds)
        yield f"{row}, one record replaced: ε ≤ {tight}; by σ/2, ε ≤ {halved}"
    for steps, table in ((50, SCORES_AT_50_STEPS), (400, SCORES_AT_400_STEPS)):
        higher, equal, lower = wins(table)
        yield f"denoising after {steps} steps: wins: {higher}, ties: {equal}, losses: {lower}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in facts())
