"""Time a diagnosis against certifying the same plan, in one run on one thread.

Every vector of a known mistake is diagnosed, then as many claims that nothing explains. The latter
cost most, because every pair of mistakes is tried. Imports and one warm-up are excluded, and caches
are emptied between plans. Prints a Markdown table; run it alone:

    python bench/diagnosis.py
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from affidavit.assessment import certify
from affidavit.assessment.diagnose import diagnose
from affidavit.assessment.diagnosis import readings
from affidavit.plan import Claim, Plan, plan_from

VECTORS = Path(__file__).parents[1] / "tests" / "vectors" / "mistakes.json"
CACHES = [found for found in vars(readings).values() if hasattr(found, "cache_clear")]
UNEXPLAINED = 0.3719
"""A share of a claim that no mistake of the catalogue takes."""


def seconds(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of one run with empty caches."""
    for cache in CACHES:
        cache.cache_clear()
    start = time.process_time()
    work()
    return time.process_time() - start


def quantiles(name: str, times: list[float]) -> str:
    """Return a row of the table."""
    ordered = sorted(times)
    nine = ordered[int(0.9 * len(ordered))]
    return f"| {name} | {statistics.median(times):.2f} | {nine:.2f} | {ordered[-1]:.2f} |"


def main() -> None:
    """Print the table."""
    questions: list[tuple[Plan, Claim, Claim]] = [
        (
            plan_from(load["plan"]),
            Claim(epsilon=load["claim"]),
            Claim(epsilon=f"{UNEXPLAINED * float(load['claim']):.4g}"),
        )
        for load in json.loads(VECTORS.read_text())
    ]
    diagnose(*questions[0][:2])
    alone = [seconds(lambda plan=p: certify(plan, second_opinion=False)) for p, _, _ in questions]
    named = [seconds(lambda plan=p, claim=c: diagnose(plan, claim)) for p, c, _ in questions]
    lost = [seconds(lambda plan=p, claim=c: diagnose(plan, claim)) for p, _, c in questions]
    ratios = [mine / max(1e-9, base) for mine, base in zip(named, alone, strict=True)]
    lines = (
        f"Python {platform.python_version()}, {platform.machine()}, one thread",
        f"{len(questions)} plans, seconds of CPU",
        "",
        "| | median | 90th percentile | most |",
        "|---|---|---|---|",
        quantiles("certify", alone),
        quantiles("diagnose, a known mistake", named),
        quantiles("diagnose, another claim", lost),
        "",
        f"diagnosis over certification, median of the ratios: {statistics.median(ratios):.0f}",
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
