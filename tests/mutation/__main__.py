"""Mutation testing of the rooms that a guarantee rests on, by a random sample.

python -m tests.mutation [--seed SEED] [--number N] [--minutes M] [--files PATTERN] [--again]

Each mutant of the sample is run against the tests that execute what it changed, the quickest
first, until one fails. The sample is drawn with a fixed seed and stratified by file; results are
kept in ``build/mutation`` as they come, and a second call goes on where the first one ended.
Which tests run what is kept there too, as ``reach.json``: remove it where tests have changed.
``contributing/mutation.md`` is written from them at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant, Mutations
from tests.mutation.reach import Reach, collect
from tests.mutation.report import is_open, write
from tests.mutation.trial import Outcome, attempt, load

ROOMS = ("accountants", "certificate")
TESTS = (
    "tests/accountants",
    "tests/certificate",
    "tests/conformance",
    "tests/gate",
    "tests/release",
    "src/affidavit/accountants",
    "src/affidavit/certificate",
)
KEPT = Path("build/mutation")
SEED, NUMBER = 11, 500
FIRST, AT_MOST = 8, 45.0
"""The quickest tests go first, alone; all together are chosen to take this many seconds."""
IMPORTS = 12.0
"""Seconds of processor time to import the project and the tests; for these, three times theirs."""


def sample(seed: int, number: int, pattern: str) -> tuple[list[Mutant], dict[str, int]]:
    """``number`` mutants, each file's share in proportion to how many it has, and those totals."""
    files = [
        Mutations(path)
        for room in ROOMS
        for path in sorted(Path(room).rglob("*.py"))
        if fnmatch(path.as_posix(), pattern)
    ]
    totals = {file.file: len(file.changes) for file in files}
    shares = _shares(totals, number)
    result: list[Mutant] = []
    for file in files:
        drawn = list(file.changes)
        random.Random(f"{seed} {file.file}").shuffle(drawn)
        created = (mutant for change in drawn if (mutant := file.mutant(change)) is not None)
        result += [mutant for mutant, _ in zip(created, range(shares[file.file]), strict=False)]
    random.Random(seed).shuffle(result)
    return result, {file: total for file, total in totals.items() if total}


def _shares(totals: dict[str, int], number: int) -> dict[str, int]:
    """Whole numbers with the sum ``number`` in proportion to ``totals``, by largest remainders."""
    every = sum(totals.values())
    exact = {file: min(number, every) * total / every for file, total in totals.items()}
    shares = {file: int(share) for file, share in exact.items()}
    by_remainder = sorted(exact, key=lambda file: shares[file] - exact[file])
    for file in by_remainder[: min(number, every) - sum(shares.values())]:
        shares[file] += 1
    return shares


def judge(mutant: Mutant, reach: Reach) -> tuple[Outcome, int]:
    """What became of ``mutant``, and how many tests it was held against at most."""
    lines = range(mutant.line, mutant.last_line + 1)
    tests = reach.tests_of(mutant.file, lines, AT_MOST)
    if not tests:
        return Outcome(killed_by=None, seconds=0.0), 0
    parts = [
        (part, IMPORTS + 3 * sum(reach.seconds[test] for test in part))
        for part in (tests[:FIRST], tests[FIRST:])
        if part
    ]
    return attempt(mutant.file, mutant.source, parts), len(tests)


def control(reach: Reach) -> None:
    """A file as it is must survive: one test of each file, the quickest."""
    quickest: dict[str, str] = {}
    for name in sorted(reach.seconds, key=lambda test: -reach.seconds[test]):
        quickest[name.partition("::")[0]] = name
    file = next(iter(reach.tests))
    result = attempt(file, Path(file).read_text(), [(list(quickest.values()), 600.0)])
    if result.killed_by is not None:
        raise SystemExit(f"without any mutant {result.killed_by} fails in a fork")


def results(
    mutants: Sequence[Mutant], reach: Reach, kept: Path, until: float, *, again: bool
) -> Iterator[Any]:
    """The record of each mutant, made now or read from ``kept``, while there is time.

    ``again`` tries those that survived once more, and notes which test kills them since.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.touch()
    known = {
        (record["file"], record["line"], record["was"], record["now"]): record
        for record in map(json.loads, kept.read_text().splitlines())
    }
    for mutant in mutants:
        result = known.get((mutant.file, mutant.line, mutant.was, mutant.now))
        if result is None or (again and is_open(result)):
            if time.monotonic() > until:
                return
            outcome, tests = judge(mutant, reach)
            if result is None:
                result = mutant.as_record() | dataclasses.asdict(outcome) | {"tests": tests}
            elif outcome.killed_by is not None:
                result["since"] = outcome.killed_by
            with kept.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
        yield result


def main() -> None:
    """Draw, try, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--number", type=int, default=NUMBER)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--again", action="store_true", help="try those that survived once more")
    parser.add_argument("--files", default="*", help="only files of such a path; writes no page")
    requested = parser.parse_args()
    until = time.monotonic() + 60 * requested.minutes
    reach = collect(TESTS, ROOMS, KEPT / "reach.json")
    mutants, totals = sample(requested.seed, requested.number, requested.files)
    sys.stderr.write(f"{len(mutants)} mutants of {sum(totals.values())}\n")
    load(reach.modules)
    control(reach)
    records = []
    for record in results(
        mutants, reach, KEPT / f"results-{requested.seed}.jsonl", until, again=requested.again
    ):
        records.append(record)
        if is_open(record):
            stated = f"{record['file']}:{record['line']} {record['was']} -> {record['now']}"
            sys.stderr.write(f"{len(records)} survived: {stated}\n")
    if requested.files == "*":
        write(records, totals, requested.seed, Path("contributing/mutation.md"))


if __name__ == "__main__":
    main()
