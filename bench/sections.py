"""Read and write the sections of documents that benches print.

``<!-- bench: gate -->`` begins the output of ``gate`` and ``<!-- end: gate -->`` ends it. Measured
figures stand only between such markers, so that a new measurement leaves no old figure behind.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from tests.service import postgresql_server

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "numpy",
    "scipy",
    "torch",
    "dp-accounting",
    "prv-accountant",
    "sqlalchemy",
    "fastapi",
    "uvicorn",
    "psycopg",
)


def markers(name: str) -> tuple[str, str]:
    """Return the start and end markers of a bench."""
    return f"<!-- bench: {name} -->", f"<!-- end: {name} -->"


def section(text: str, name: str) -> str:
    """Return the text between the markers; raises ``ValueError`` unless each occurs once."""
    return _around(text, name)[1]


def with_section(text: str, name: str, found: str) -> str:
    """Return ``text`` with a new section; raises ``ValueError`` as ``section`` does."""
    before, _, after = _around(text, name)
    return f"{before}\n{found.strip()}\n\n{after}"


def _around(text: str, name: str) -> tuple[str, str, str]:
    begin, end = markers(name)
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"there must be one {begin} and, after it, one {end}")
    before, _, rest = text.partition(begin)
    inside, _, after = rest.partition(end)
    return before + begin, inside, end + after


def provenance(seconds: float, load: float) -> str:
    """Describe when, from which commit and on which machine a bench ran for ``seconds``.

    ``load`` is the load average before it started.
    """
    stored = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    of = commit.stdout.strip() or "unknown"
    changed = " with changes" if stored.stdout.strip() else ""
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {of}{changed}: {machine()}, load {load:.1f} before "
        f"it began; {'; '.join(versions())}. It took {_duration(seconds)}."
    )


def machine() -> str:
    """Describe the processor, its cores, and the memory."""
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in told.splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = models[0] if models else platform.machine()
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB"


def versions() -> list[str]:
    """Return the versions of Python, PostgreSQL and packages that are installed."""
    result = [f"Python {platform.python_version()}"]
    programs = postgresql_server.binaries()
    if programs is not None:
        told = subprocess.run(
            [programs / "postgres", "--version"], capture_output=True, text=True, check=False
        )
        result += [f"PostgreSQL {word}" for word in told.stdout.split()[2:3]]
    for name in PACKAGES:
        try:
            result.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return result


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} minutes"
