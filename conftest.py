"""Without PyTorch, collect no tests of the trainer."""

from __future__ import annotations

from importlib.util import find_spec

pytest_plugins = ["tests.support.forked_workers"]
HAS_TORCH = find_spec("torch") is not None

collect_ignore = [] if HAS_TORCH else ["trainer", "src/affidavit/trainer", "tests/trainer"]


def pytest_report_header() -> str:
    """Report it first: tests that did not run have not passed."""
    return "trainer: " + ("with torch" if HAS_TORCH else "NOT TESTED, run make install-trainer")
