"""Which tests run which lines: every test once, under line coverage, with its time.

A plugin of pytest, alone in its process: ``collect`` runs the tests with it and returns what
it saw. A line that runs while modules are imported, or in a fixture that several tests share,
is seen for the first test only; ``tests_of`` therefore adds the other tests of a file after
those that were seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import coverage
import pytest

WRITES = "AFFIDAVIT_REACH"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """The seconds of each test, and the tests of each line of each file."""

    seconds: dict[str, float]
    tests: dict[str, dict[int, list[str]]]
    modules: list[str]

    def tests_of(self, file: str, lines: Iterable[int], at_most: float) -> list[str]:
        """The tests of these lines, the quickest first, then their neighbours, then the file's.

        Stops where their times come to ``at_most`` seconds, but never before the first.
        """
        by_line = self.tests.get(file, {})
        direct = {name for line in lines for name in by_line.get(line, [])}
        near = {name.partition("::")[0] for name in direct}
        beside = {name for name in self.seconds if name.partition("::")[0] in near}
        whole = {name for names in by_line.values() for name in names}
        result: list[str] = []
        spent = 0.0
        for group in (direct, beside - direct, (whole - beside) - direct):
            for name in sorted(group, key=lambda test: (self.seconds[test], test)):
                spent += self.seconds[name]
                if result and spent > at_most:
                    return result
                result.append(name)
        return result


def collect(folders: Sequence[str], rooms: Sequence[str], kept: Path) -> Reach:
    """Run the tests of ``folders`` for what they run of ``rooms``; what is kept is read again."""
    if not kept.exists():
        environment = os.environ | {WRITES: json.dumps([str(kept), list(rooms)])}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "tests.mutation.reach", *folders]
        ended = subprocess.run(command, env=environment, check=False)
        if ended.returncode or not kept.exists():
            raise SystemExit("the tests do not pass without any mutant")
    result = json.loads(kept.read_text())
    names = list(result["seconds"])
    return Reach(
        seconds=result["seconds"],
        modules=result["modules"],
        tests={
            file: {int(line): [names[test] for test in tests] for line, tests in lines.items()}
            for file, lines in result["tests"].items()
        },
    )


class _Watch:
    """Measures each test with its fixtures, and writes all down at the end."""

    def __init__(self, kept: Path, rooms: Sequence[str]) -> None:
        self._kept, self._rooms = kept, rooms
        self._seconds: dict[str, float] = {}
        self._coverage = coverage.Coverage(
            data_file=None,
            config_file=False,
            include=[f"{Path(room).resolve()}/*" for room in rooms],
        )

    def pytest_sessionstart(self) -> None:
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        begin = time.process_time()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = round(time.process_time() - begin, 4)
            self._coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        place = {name: place for place, name in enumerate(self._seconds)}
        tests: dict[str, dict[int, list[int]]] = defaultdict(dict)
        for file in data.measured_files():
            name = Path(file).resolve().relative_to(Path.cwd()).as_posix()
            for line, names in data.contexts_by_lineno(file).items():
                tests[name][line] = sorted(place[test] for test in names if test)
        modules = sorted(name for name in sys.modules if _of_others(name))
        result = {"seconds": self._seconds, "tests": tests, "modules": modules}
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        self._kept.write_text(json.dumps(result))


def _of_others(name: str) -> bool:
    """Whether a module can be loaded before any mutant is: it is neither ours nor a plugin's."""
    ours = ("affidavit", "tests", "src", "docs", "coverage", "conftest", "__main__", "examples")
    return not name.startswith(ours) and not name.startswith("_pytest")


def pytest_configure(config: pytest.Config) -> None:
    """Watch, where ``collect`` asked for it."""
    if WRITES in os.environ:
        stored, rooms = json.loads(os.environ[WRITES])
        config.pluginmanager.register(_Watch(Path(stored), rooms))
