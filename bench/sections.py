"""Read and write the sections of documents that benches print.

``<!-- bench: gate -->`` begins the output of ``gate`` and ``<!-- end: gate -->`` ends it. Measured
figures stand only between such markers, so that a new measurement leaves no old figure behind.
A section with a commit that is no ancestor, or further back than ``MOST_COMMITS``, is marked old.

    python -m bench.sections    # marks the sections of both pages anew
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from tests.support import postgresql_server

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


MOST_COMMITS = 100
OLD = f"**Old**: not measured within the last {MOST_COMMITS} commits."
PAGES = (ROOT / "docs/explanation/benchmarks.md", ROOT / "contributing/benchmarks.md")
COMMIT = re.compile(r"\bcommit ([0-9a-f]{7,40})\b")
SECTION = re.compile(r"<!-- bench: ([\w-]+) -->")


def age(found: str, root: Path = ROOT) -> float:
    """Return the commits since the oldest one that a section names; infinite if one is no ancestor.

    It is 0 outside of a repository, where no commit is known.
    """
    if _git(root, "rev-parse", "HEAD") is None:
        return 0
    ages = [0.0]
    for commit in COMMIT.findall(found):
        is_ancestor = _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None
        since = _git(root, "rev-list", "--count", f"{commit}..HEAD") if is_ancestor else None
        ages.append(float("inf") if since is None else float(since))
    return max(ages)


def with_marks(text: str, root: Path = ROOT) -> str:
    """Return ``text`` with a mark at the beginning of each old section, and at no other."""
    for name in SECTION.findall(text):
        found = section(text, name).replace(OLD, "").strip()
        is_old = age(found, root) > MOST_COMMITS
        text = with_section(text, name, f"{OLD}\n\n{found}" if is_old else found)
    return text


Spread = tuple[float, float]
"""The least and the most of a ratio."""


def ratios(found: str) -> dict[tuple[int, str], Spread]:
    """Return the spread of each ratio of a section, by the number of its table and its row.

    A table has it in the columns ``least`` and ``most``, or as ``1.10-1.15`` in ``spread``.
    """
    result: dict[tuple[int, str], Spread] = {}
    number, header = 0, [""]
    for line in found.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            header = [""]
        elif header == [""]:
            number, header = number + 1, cells
        elif {"least", "most"} <= set(header) and not line.startswith("|---"):
            least, most = (float(cells[header.index(name)]) for name in ("least", "most"))
            result[number, cells[0]] = least, most
        elif "spread" in header and not line.startswith("|---"):
            least, most = map(float, cells[header.index("spread")].split("-"))
            result[number, cells[0]] = least, most
    return result


def slower(before: str, after: str) -> list[str]:
    """Return a line for each ratio of which the least is now above the most before."""
    earlier, later = ratios(before), ratios(after)
    return [
        f"{row}: {later[key][0]:g} to {later[key][1]:g}, before {least:g} to {most:g}"
        for key, (least, most) in earlier.items()
        for _, row in [key]
        if key in later and later[key][0] > most
    ]


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git printed, or None if it failed or is missing."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def provenance(seconds: float, load: float, page: str = "") -> str:
    """Describe when, from which commit and on which machine a bench ran for ``seconds``.

    ``load`` is the load average before it started. A machine that the ``page`` describes is not
    described again.
    """
    documents = ":!docs", ":!contributing"  # the benches before this one wrote into them
    changes = _git(ROOT, "status", "--porcelain", "--untracked-files=no", "--", ".", *documents)
    of = _git(ROOT, "rev-parse", "--short", "HEAD") or "unknown"
    changed = " with changes" if changes else ""
    described = "; ".join([machine(), *versions()])
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {of}{changed}, load {load:.1f} before it began. It "
        f"took {_duration(seconds)}.{'' if described in page else f' {described}.'}"
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


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_marks(page.read_text(encoding="utf-8")), encoding="utf-8")
        sys.stdout.write(f"{page.relative_to(ROOT)}\n")
