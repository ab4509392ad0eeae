"""Run all benches that this machine can run, and write their results into the documents.

Each bench is a program that prints Markdown. Its output replaces the text between its markers in
its document (``sections``), with the date, commit, machine and versions. A bench that fails,
prints no table or exceeds its time limit changes nothing, and this program then exits with 1. The
output is also stored in ``build/bench``. Ratios that grew beyond the spread that the document had
are printed as slower.

    python -m bench.all [NAME ...]

Run it on an idle machine. The load before each bench is written beside its figures.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.sections import ROOT, provenance, section, slower, with_section
from tests.support import postgresql_server

KEPT = ROOT / "build" / "bench"
LINE = 10.0
"""Seconds after which it is said again that a bench runs."""


def _nothing() -> str:
    return ""


def _wrk() -> str:
    return "" if shutil.which("wrk") else "wrk is not here (apt-get install wrk)"


def _postgresql() -> str:
    return "" if postgresql_server.binaries() else "PostgreSQL is not here"


def _torch() -> str:
    return "" if find_spec("torch") else "PyTorch is not here (make install-trainer)"


def _cuda() -> str:
    if _torch():
        return _torch()
    import torch

    return "" if torch.cuda.is_available() else "there is no CUDA device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A bench program: its arguments, its time limit in minutes, and its document.

    ``lacks`` says what the machine lacks to run it, and is empty if nothing.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    document: Path = ROOT / "contributing/benchmarks.md"
    lacks: Callable[[], str] = _nothing


USERS = ROOT / "docs/explanation/benchmarks.md"
"""The page of benchmarks that users read."""
BENCHES = (
    Bench(name="gate", command=("bench/gate.py",), minutes=10),
    Bench(
        name="accounting",
        command=(
            "bench/accounting.py",
            "--prv",
            "--prv-seconds",
            "240",
            "--repeats",
            "1",
            "--opacus",
            sys.executable,
        ),
        minutes=60,
        document=USERS,
    ),
    Bench(
        name="sweeps",
        command=("bench/accounting_sweeps.py", "--svg", "contributing/benchmarks-steps.svg"),
        minutes=20,
    ),
    Bench(name="proofs", command=("-m", "bench.proofs"), minutes=3),
    Bench(name="truncated-lots", command=("bench/truncated_lots.py",), minutes=5),
    Bench(
        name="loose-corners",
        command=("bench/loose_corners.py", "--realistic", "--minutes", "25"),
        minutes=30,
        document=USERS,
    ),
    Bench(name="fresh-lots", command=("bench/fresh_lots.py",), minutes=20),
    Bench(name="schedules", command=("bench/schedules.py",), minutes=3),
    Bench(name="strategies", command=("bench/strategies.py",), minutes=45),
    Bench(name="monte-carlo", command=("bench/monte_carlo.py",), minutes=20),
    Bench(
        name="sampling-schemes", command=("bench/sampling_schemes.py",), minutes=10, lacks=_torch
    ),
    Bench(name="random-allocation", command=("bench/random_allocation.py",), minutes=15),
    Bench(name="diagnosis", command=("bench/diagnosis.py",), minutes=30),
    Bench(
        name="trainer",
        command=("-m", "bench.trainer"),
        minutes=30,
        lacks=_torch,
    ),
    Bench(name="exact-noise", command=("bench/exact_noise.py",), minutes=5, lacks=_torch),
    Bench(
        name="gpu",
        command=("bench/gpu/run.py", "--markdown"),
        minutes=15,
        lacks=_cuda,
        document=USERS,
    ),
    Bench(
        name="service",
        command=("-m", "bench.service"),
        minutes=20,
        lacks=_wrk,
    ),
    Bench(name="fair-share", command=("-m", "bench.fair_share"), minutes=12),
    Bench(name="pages", command=("-m", "bench.pages"), minutes=45, lacks=_postgresql),
)


def chosen(names: Sequence[str]) -> list[Bench]:
    """Return the benches with these names, or all; raises ``SystemExit`` for an unknown name."""
    known = {bench.name: bench for bench in BENCHES}
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"no bench is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [bench for name, bench in known.items() if name in names or not names]


def measure(bench: Bench) -> str:
    """Run a bench and write its output into its document; return why not, if it failed.

    What became slower than the document had it, by more than both spreads, is printed.
    """
    before = section(bench.document.read_text(encoding="utf-8"), bench.name)
    KEPT.mkdir(parents=True, exist_ok=True)
    stored, load, began = KEPT / f"{bench.name}.md", os.getloadavg()[0], time.monotonic()
    with stored.open("wb") as out:
        status = _within(60 * bench.minutes, bench, out.fileno())
    took, printed = time.monotonic() - began, stored.read_text(encoding="utf-8")
    if status is None:
        return f"stopped after {bench.minutes:g} minutes; {stored} has what it printed"
    if status:
        return f"ended with {status}; {stored} has what it printed"
    if "\n|---" not in printed:
        return f"printed no table; {stored} has what it printed"
    # Read anew: hours may have gone by, and another part of the page may have been written.
    text = bench.document.read_text(encoding="utf-8")
    for line in slower(before, printed):
        _say(f"slower: {line}")
    whole = f"{provenance(took, load, text)}\n\n{printed}"
    bench.document.write_text(with_section(text, bench.name, whole), encoding="utf-8")
    return ""


def _within(seconds: float, bench: Bench, out: int) -> int | None:
    """Return the exit status, or None if the bench and its processes had to be stopped."""
    # Another package that benches use installs an "examples" of its own.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, *bench.command],
        cwd=ROOT,
        env=environment,
        stdout=out,
        start_new_session=True,
    )
    try:
        return _awaited(process, seconds, bench.name)
    finally:
        if process.poll() is None:
            # First by the interrupt that lets it end the servers that it began.
            for item in (signal.SIGINT, signal.SIGKILL):
                os.killpg(process.pid, item)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    continue
                break


def _awaited(process: subprocess.Popen[bytes], seconds: float, name: str) -> int | None:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        try:
            return process.wait(min(LINE, seconds - passed))
        except subprocess.TimeoutExpired:
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{name}: {time.monotonic() - began:.0f} s")
    return None


def main(names: Sequence[str]) -> int:
    """Run the benches; return 1 if one that can run here failed."""
    failed, benches = 0, chosen(names)
    for number, bench in enumerate(benches, 1):
        place = f"[{number}/{len(benches)}] {bench.name}"
        if lacking := bench.lacks():
            failed += bool(names)  # who names a bench wants it
            _say(f"{place}: left out, {lacking}")
            continue
        _say(f"{place}: at most {bench.minutes:g} minutes")
        began = time.monotonic()
        why = measure(bench)
        failed += bool(why)
        _say(f"{place}: {why or f'{time.monotonic() - began:.0f} s, in {bench.document.name}'}")
    return min(failed, 1)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
