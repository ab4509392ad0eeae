"""Compare a sweep on two nodes of a Ray cluster with the same sweep on local processors.

    .venv-ray/bin/python -m bench.sweeps [PLANS] [poisson|full_batch]

Plans of full batches cost half as much as Poisson samples, so Ray's overhead weighs twice as much.
Both sweeps certify the same plans at the same time, under the same load. Processor seconds are
those of all processes of a batch; for Ray, of all processes of its nodes between the first line
and the last, without the start of the cluster. Halfway through a second batch on Ray, one node is
killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.ray_cluster import RayCluster, program, ray_cluster

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
COMMAND = "from affidavit.gate.entry import main; main()"
PLAN = {
    "version": 1,
    "dataset": {"size": 60_000},
    "adjacency": "add_remove",
    "target": {"delta": 1e-5},
}


SAMPLING = {
    "poisson": ({"scheme": "poisson", "lot_size": 600}, 0.8),
    "full_batch": ({"scheme": "full_batch"}, 20.0),
}
"""How lots are drawn, and the least noise multiplier."""


def plans(count: int, scheme: str) -> Iterable[str]:
    """Return plans with a hundred noise multipliers, each with many numbers of steps."""
    sampling, least = SAMPLING[scheme]
    for index in range(count):
        release = {"name": "all", "clip_norm": 1, "noise_multiplier": least + 0.01 * (index % 100)}
        plan = {"sampling": sampling, "releases": [release], "steps": 100 + index // 100}
        yield json.dumps(PLAN | plan)


class Processor:
    """Processor seconds of all processes in some sessions."""

    def __init__(self, leaders: Iterable[int]) -> None:
        self.leaders = set(leaders)
        self.ticks: dict[int, int] = {}
        self.start = self.look()

    def look(self) -> float:
        """Return the seconds so far; ended processes count as they were last seen."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (fields := _stat(entry)) and int(fields[3]) in self.leaders:
                self.ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
        return sum(self.ticks.values()) / TICKS

    def used(self) -> float:
        """Return the seconds since the start."""
        return self.look() - self.start


def _stat(process: Path) -> list[str]:
    try:
        return (process / "stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def run(
    source: Path, output: Path, *options: str, cluster: RayCluster | None = None, kill_at: int = 0
) -> tuple[float, float]:
    """Return processor and wall seconds of a batch; kill the last node at line ``kill_at``."""
    nodes = [] if cluster is None else [node.pid for node in cluster.nodes]
    used, began = Processor(nodes), time.monotonic()
    command = [sys.executable, "-c", COMMAND, "batch", str(source), "--output", str(output)]
    process = subprocess.Popen([*command, *options], start_new_session=True)
    used.leaders.add(process.pid)
    while process.poll() is None:
        used.look()
        if cluster is not None and kill_at and _lines(output) >= kill_at:
            cluster.kill(cluster.nodes[-1])
            kill_at = 0
        time.sleep(0.1)
    if process.returncode not in (0, 1):
        raise SystemExit(f"batch ended with {process.returncode}")
    return used.used(), time.monotonic() - began


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def tell(line: str) -> None:
    """Print and flush a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print a table of both, and whether the killed sweep printed the same lines."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    scheme = sys.argv[2] if len(sys.argv) > 2 else "poisson"
    ray = program()
    if ray is None:
        raise SystemExit("Ray is not here: make install-ray")
    with tempfile.TemporaryDirectory() as folder:
        source, alone = Path(folder, "plans.jsonl"), Path(folder, "alone.jsonl")
        over, killed = Path(folder, "over.jsonl"), Path(folder, "killed.jsonl")
        source.write_text("".join(f"{plan}\n" for plan in plans(count, scheme)))
        jobs = str(os.cpu_count() or 1)
        with (
            ray_cluster(ray, 2, PYTHONPATH=str(ROOT / "src")) as cluster,
            ThreadPoolExecutor(1) as beside,
        ):
            address = ("--ray", cluster.address)
            first = beside.submit(run, source, alone, "--jobs", jobs)
            results = {"over two Ray nodes": run(source, over, *address, cluster=cluster)}
            used = first.result()[0]
            results = {f"`batch --jobs {jobs}`": first.result(), **results}
            tell("| sweep | processor s | wall s | plans a processor second | against batch |")
            tell("|---|---|---|---|---|")
            for name, (seconds, wall) in results.items():
                rate, ratio = count / seconds, seconds / used
                tell(f"| {name} | {seconds:.0f} | {wall:.0f} | {rate:.0f} | {ratio:.2f} |")
            run(source, killed, *address, cluster=cluster, kill_at=count // 2)
        same = alone.read_bytes() == over.read_bytes() == killed.read_bytes()
        tell(f"\n{count:,} lines of all, of a node killed halfway too, are the same: {same}")


if __name__ == "__main__":
    main()
