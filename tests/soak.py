"""The random tests without end, with new seeds: ``make soak``, or ``make soak MINUTES=60``.

Goes round its parts, each for a minute or so at a time, until the time is over or it is
interrupted. What was drawn stands in ``build/soak-report.md``, which is written anew after
each slice; a failure is there with the command that repeats it. Ends with 1 if there was one.

python -m tests.soak [--minutes M] [--seed SEED] [--only PART]
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPORT = Path("build/soak-report.md")
NO_END = 1800.0
"""Seconds after which a slice that has not ended has failed."""
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-m", "")
"""With the tests that are marked ``soak``, which ``make test`` leaves out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One kind of random test, run in slices; ``{seed}`` stands for the slice's seed.

    ``draws`` is how many a slice makes; ``None`` where Hypothesis counts them.
    """

    name: str
    of: str
    module: tuple[str, ...]
    draws: int | None
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, seed: int) -> tuple[list[str], dict[str, str]]:
        """What to run after ``python -m``, and with which variables."""
        variables = {"AFFIDAVIT_SEED": str(seed), **self.environment}
        return [word.format(seed=seed) for word in self.module], variables


ROOMS = (
    *("accountants", "assessment", "browser", "certificate", "checker", "conformance", "docs"),
    *("evidence", "gate", "guard", "library", "mechanisms", "packaging", "plan", "release"),
    *("replay", "service", "trainer", "trust", "worker"),
)
"""Whose slow tests are a slice each: all together would not end in time."""
PARTS = (
    *(
        Part(
            name=f"slow tests, {room}",
            of="every test that is too slow for make test",
            module=(*PYTEST, "-m", "soak", f"tests/{room}"),
            draws=1,
        )
        for room in ROOMS
    ),
    Part(
        name="soundness",
        of="plans held to every law of a bracket",
        module=("tests.accountants.soundness", "{seed}", "20"),
        draws=20,
    ),
    Part(
        name="theorems",
        of="pairs of data sets against each row of dominating pairs",
        module=(*PYTEST, "tests/accountants/falsifier"),
        draws=60,
        environment={"AFFIDAVIT_DATA_SETS": "60"},
    ),
    Part(
        name="closed forms",
        of="pairs of steps integrated, budgets held to tight compositions",
        module=(
            *PYTEST,
            "tests/accountants/test_two_steps.py",
            "tests/accountants/privacy_filter/test_rule.py",
        ),
        draws=11,
    ),
    Part(
        name="laws",
        of="examples of every Hypothesis test",
        module=(
            *PYTEST,
            "--hypothesis-seed={seed}",
            "--hypothesis-show-statistics",
            "-m",
            "hypothesis",
            *(f"tests/{room}" for room in ("accountants", "certificate", "conformance")),
            *(f"tests/{room}" for room in ("mechanisms", "plan", "service/identity")),
            *(
                f"tests/{room}"
                for room in ("service/web/pages", "trainer/data", "trainer/optimizers")
            ),
        ),
        draws=None,
        environment={"HYPOTHESIS_PROFILE": "searching"},
    ),
    Part(
        name="gate",
        of="mutated plans that the gate must not let through",
        module=("tests.gate.checking.mutations", "{seed}", "300"),
        draws=300,
    ),
    Part(
        name="diagnosis",
        of="right claims that must not be accused, and mistakes that must be found",
        module=(*PYTEST, "tests/assessment/diagnosis/test_random.py"),
        draws=123,
        environment={"AFFIDAVIT_DIAGNOSES": "60"},
    ),
    Part(
        name="trainer's crashes",
        of="trainings killed at random, or left without power, until they end",
        module=(
            *PYTEST,
            "tests/trainer/loop/test_crash.py",
            "tests/trainer/loop/test_power_cut.py",
            "-k",
            "killed or again_and_again",
        ),
        draws=4,
    ),
    Part(
        name="API",
        of="requests by each role to each operation",
        module=(*PYTEST, "tests/service/whole/test_every_answer.py", "-k", "every_role"),
        draws=20,
        environment={"AFFIDAVIT_REQUESTS": "20"},
    ),
    Part(
        name="service's crashes",
        of="series of work in a service killed at random statements, in each database",
        module=(*PYTEST, "tests/service/whole/test_killed.py", "-k", "random_statements"),
        draws=2,
    ),
    Part(
        name="hand-over",
        of="histories of a run between workers, in each database",
        module=(*PYTEST, "tests/service/runs/test_lease_recovery.py", "-k", "whatever_happens"),
        draws=20,
        environment={"AFFIDAVIT_HANDOVERS": "20"},
    ),
    Part(
        name="worker's crashes",
        of="kills of the workers of one run",
        module=(*PYTEST, "tests/worker/test_faults.py", "-k", "outlives"),
        draws=10,
        environment={"AFFIDAVIT_KILLS": "10"},
    ),
)


@dataclass(slots=True)
class Tally:
    """What was done of a part."""

    slices: int = 0
    draws: int = 0
    seconds: float = 0.0
    seeds: list[int] = field(default_factory=list)
    failures: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A slice that failed: how to run it again, and the end of what it said."""

    part: str
    again: str
    said: str


def soak(parts: Sequence[Part], minutes: float, seed: int, report: Path) -> bool:
    """Go round ``parts`` until the time is over; whether nothing failed."""
    until = time.monotonic() + 60 * minutes
    tallies = {part.name: Tally() for part in parts}
    failures: list[Failure] = []
    try:
        for number, part in enumerate(itertools.cycle(parts)):
            if number and time.monotonic() > until:
                break
            result = _slice(part, seed + number, tallies[part.name])
            failures += [result] if result else []
            _write(parts, tallies, failures, seed, report)
            sys.stdout.write(f"{part.name}, seed {seed + number}: {'FAILED' if result else 'ok'}\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    return not failures


def _slice(part: Part, seed: int, tally: Tally) -> Failure | None:
    words, variables = part.command(seed)
    begin = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", *words],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=NO_END,
        )
        code, stated = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as late:
        code, stated = -1, f"{late.output or ''}\nit did not end within {NO_END:g} seconds"
    tally.slices += 1
    tally.draws += _examples(stated) if part.draws is None else part.draws
    tally.seconds += time.monotonic() - begin
    tally.seeds.append(seed)
    if code == 0:
        return None
    tally.failures += 1
    set_ = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    again = f"{set_} .venv/bin/python -m {shlex.join(words)}"
    return Failure(part=part.name, again=again, said="\n".join(stated.splitlines()[-60:]))


def _examples(said: str) -> int:
    """How many examples Hypothesis says that it tried.

    >>> _examples("- 100 passing, 0 failing, and 3 invalid test cases")
    100
    """
    return sum(map(int, re.findall(r"(\d+) passing", said)))


def _write(
    parts: Sequence[Part],
    tallies: Mapping[str, Tally],
    failures: Sequence[Failure],
    seed: int,
    report: Path,
) -> None:
    lines = ["# Soak", "", f"First seed {seed}; {len(failures)} failures.", ""]
    lines += ["| part | drawn | slices | minutes | seeds | failed |", "|---|---|---|---|---|---|"]
    for part in parts:
        done = tallies[part.name]
        minutes, seeds = f"{done.seconds / 60:.1f}", ", ".join(map(str, done.seeds))
        drawn = f"{done.draws:,} {part.of}"
        cells = [part.name, drawn, str(done.slices), minutes, seeds, str(done.failures)]
        lines.append(f"| {' | '.join(cells)} |")
    for failure in failures:
        lines += ["", f"## {failure.part}", "", "```sh", failure.again, "```"]
        lines += ["", "```text", failure.said, "```"]
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Soak as the command line says."""
    parser = argparse.ArgumentParser(description="Random tests with new seeds, without end.")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="until then")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="the first seed")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", choices=names, help="one part, again and again")
    requested = parser.parse_args(arguments)
    parts = [part for part in PARTS if requested.only in (None, part.name)]
    return 0 if soak(parts, requested.minutes, requested.seed, REPORT) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
