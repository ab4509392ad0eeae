"""Time commands against importing dp_accounting, as whole processes in one run.

Then times a check of a folder: 3,000 Python files, 40 of them training scripts, and 40 MB of JSON.

Reports medians of the ratios of processor time (user and system), with the smallest and largest.
Cold: an empty cache. Warm: the same plan again.

    python bench/gate.py [TURNS]
"""

from __future__ import annotations

import json
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
    "`check --help`": (*AFFIDAVIT, "check", "--help"),
    "`serve --help`": (*AFFIDAVIT, "serve", "--help"),
    "`train --help`": (*AFFIDAVIT, "train", "--help"),
    "`audit --help`": (*AFFIDAVIT, "audit", "--help"),
    "`explain under_noised`": (*AFFIDAVIT, "explain", "under_noised"),
    "`schema`": (*AFFIDAVIT, "schema"),
    "`keys list`": (*AFFIDAVIT, "keys", "list"),
    "`tokens list`": (*AFFIDAVIT, "tokens", "list"),
}


def seconds(
    command: tuple[str, ...], cache: str, folder: str | None = None, code: int = 0
) -> float:
    """Return the processor time of a process in ``folder``, which must exit with ``code``."""
    before = os.times()
    homes = {"AFFIDAVIT_CACHE": cache, "AFFIDAVIT_HOME": cache, "OMP_NUM_THREADS": "1"}
    written = {"PYTHONDONTWRITEBYTECODE": ""}  # installed modules are compiled once
    environment = {**os.environ, **homes, **written}
    done = subprocess.run(
        command,
        check=False,
        env=environment,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    after = os.times()
    if done.returncode != code:
        raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stderr[-2_000:])
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


FOLDER = "`check` of a folder: 3,000 scripts and 40 MB of JSON"
SCRIPT = """\
import argparse
import torch
from opacus import PrivacyEngine
from package.module_{number} import build
parser = argparse.ArgumentParser()
parser.add_argument("--noise", type=float, default=1.0)
args = parser.parse_args()
loader = torch.utils.data.DataLoader(data, batch_size=500)
model, optimizer, loader = PrivacyEngine().make_private(
    module=build(), optimizer=optimizer, data_loader=loader,
    noise_multiplier=args.noise, max_grad_norm=1.0)
for epoch in range(3):
    for batch in loader:
        loss(batch).backward()
        optimizer.step()
# affidavit: adjacency=zero_out target_delta=1e-5 dataset_size=50000
"""


def write_folder(folder: Path) -> None:
    """Write the files of a repository that a team may have."""
    for place in ("package", "scripts", "data"):
        (folder / place).mkdir()
    function = "def build_{n}(size, depth=2):\n    return [size * i for i in range(depth)]\n\n\n"
    for number in range(2_960):
        text = f"import os\nfrom package.module_{number // 2} import build\n\n\n"
        text += "".join(function.format(n=n) for n in range(30))
        (folder / "package" / f"module_{number}.py").write_text(text)
    for number in range(40):
        (folder / "scripts" / f"train_{number}.py").write_text(SCRIPT.format(number=number))
        command = f"python scripts/train_{number}.py --noise $SIGMA\n"
        (folder / "scripts" / f"run_{number}.sh").write_text("SIGMA=1.0\n" + command)
    row = {"epochs": 3, "steps": 10, "dataset": "x", "text": "a word " * 40, "values": [0.5] * 30}
    for number in range(40):
        rows = [row | {"id": number * 3_000 + n} for n in range(2_000)]
        (folder / "data" / f"rows_{number}.json").write_text(json.dumps({"rows": rows}))
        values = [{"id": n, "words": "a word " * 10} for n in range(10)]
        (folder / "data" / f"values_{number}.json").write_text(json.dumps(values))


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
    spent = []
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        for _ in range(min(turns, 3)):
            # So many files may set the noise that it stays open, which is malformed input.
            spent.append(seconds((*AFFIDAVIT, "check", "."), cache, folder, code=2))
            ratios.setdefault(FOLDER, []).append(spent[-1] / seconds(peer, cache))
    sys.stdout.write(f"Python {platform.python_version()}, {turns} turns; the folder takes ")
    sys.stdout.write(f"{statistics.median(spent):.1f} s.\n\n")
    sys.stdout.write("| `affidavit` … / `import dp_accounting` | median | least | most |\n")
    sys.stdout.write("|---|---:|---:|---:|\n")
    for name, times in ratios.items():
        sys.stdout.write(
            f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |\n"
        )


if __name__ == "__main__":
    main()
