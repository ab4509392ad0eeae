"""Time ``affidavit check`` against importing dp_accounting, as whole processes in one run.

Reports medians of the ratios of processor time (user and system), with the smallest and largest.
Cold: an empty cache. Warm: the same plan again.

    python bench/gate.py [TURNS]
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PLAN = Path(__file__).parents[1] / "examples" / "cifar10-wrn16-4-dp-sgd.yaml"
CHECK = (sys.executable, "-m", "affidavit", "check", str(PLAN))


def seconds(command: tuple[str, ...], cache: str) -> float:
    """Return the processor time of a process, which must exit with 0."""
    before = os.times()
    environment = {**os.environ, "AFFIDAVIT_CACHE": cache, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def main() -> None:
    """Measure and print a table."""
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    peer = (sys.executable, "-c", "import dp_accounting")
    ratios: dict[str, list[float]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(turns + 1):
            cold = seconds((*CHECK, "--no-cache"), cache)
            imported = seconds(peer, cache)
            warm = seconds(CHECK, cache)
            if turn:  # the first turn reads the files and fills the cache
                ratios["cold"].append(cold / imported)
                ratios["warm"].append(warm / imported)
    sys.stdout.write(f"Python {platform.python_version()}, {turns} turns\n\n")
    sys.stdout.write("| `affidavit check` / `import dp_accounting` | median | least | most |\n")
    sys.stdout.write("|---|---:|---:|---:|\n")
    for name, times in ratios.items():
        sys.stdout.write(
            f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |\n"
        )


if __name__ == "__main__":
    main()
