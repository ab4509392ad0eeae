"""Time commands against importing dp_accounting, as whole processes in one run.

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
AFFIDAVIT = (sys.executable, "-m", "affidavit")
CHECK = (*AFFIDAVIT, "check", str(PLAN))
COMMANDS = {
    "`check`, cold": (*CHECK, "--no-cache"),
    "`check`, warm": CHECK,
    "`certify`": (*AFFIDAVIT, "certify", str(PLAN)),
    "`--help`": (*AFFIDAVIT, "--help"),
    "`certify --help`": (*AFFIDAVIT, "certify", "--help"),
    "`explain under_noised`": (*AFFIDAVIT, "explain", "under_noised"),
    "`schema`": (*AFFIDAVIT, "schema"),
    "`keys list`": (*AFFIDAVIT, "keys", "list"),
    "`tokens list`": (*AFFIDAVIT, "tokens", "list"),
}


def seconds(command: tuple[str, ...], cache: str) -> float:
    """Return the processor time of a process, which must exit with 0."""
    before = os.times()
    homes = {"AFFIDAVIT_CACHE": cache, "AFFIDAVIT_HOME": cache, "OMP_NUM_THREADS": "1"}
    written = {"PYTHONDONTWRITEBYTECODE": ""}  # installed modules are compiled once
    environment = {**os.environ, **homes, **written}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def main() -> None:
    """Measure and print a table."""
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    peer = (sys.executable, "-c", "import dp_accounting")
    ratios: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as cache:
        seconds((*AFFIDAVIT, "migrate"), cache)
        for turn in range(turns + 1):
            imported = seconds(peer, cache)
            measured = {name: seconds(command, cache) for name, command in COMMANDS.items()}
            if turn:  # the first turn reads the files and fills the cache
                for name, time in measured.items():
                    ratios[name].append(time / imported)
    sys.stdout.write(f"Python {platform.python_version()}, {turns} turns\n\n")
    sys.stdout.write("| `affidavit` … / `import dp_accounting` | median | least | most |\n")
    sys.stdout.write("|---|---:|---:|---:|\n")
    for name, times in ratios.items():
        sys.stdout.write(
            f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |\n"
        )


if __name__ == "__main__":
    main()
