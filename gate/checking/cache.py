"""A cache of check results, keyed by plan text, options, accountant versions and this release.

An entry is a file with a checksum. A corrupt entry is removed and reported, and the check does not
exit with 0: a cache that something else writes to is no basis for letting a plan through, even
though the plan was checked again. The checksum does not protect against deliberate changes;
whoever can write to the cache can change the program as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from affidavit import __version__
from affidavit.accountants import engine_versions
from affidavit.certificate import write_atomically
from affidavit.gate.checking.finding import CheckResult
from affidavit.gate.exit_codes import Exit
from affidavit.plan import digest_of

FORMAT = 1
_RESULT = TypeAdapter(CheckResult)


class Cache:
    """A folder of entries; ``corrupt`` lists the removed ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.corrupt: list[Path] = []

    def get(self, question: dict[str, Any], check: Callable[[], CheckResult]) -> CheckResult:
        """The cached result for ``question``, or that of ``check``."""
        key = digest_of(
            {"format": FORMAT, "affidavit": __version__, "engines": engine_versions(), **question}
        )
        path = self._folder / f"{key.removeprefix('sha256:')}.json"
        result = self._read(path)
        if result is None:
            result = check()
            if result.exit in (Exit.CERTIFIED, Exit.BLOCKED):
                self._write(path, result)
        return result

    def _read(self, path: Path) -> CheckResult | None:
        try:
            entry = json.loads(path.read_bytes())
            if entry["checksum"] != digest_of(entry["judged"]):
                raise ValueError("checksum mismatch")
            return _RESULT.validate_python(entry["judged"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self.corrupt.append(path)
            with suppress(OSError):
                path.unlink()
            return None

    def _write(self, path: Path, result: CheckResult) -> None:
        document = json.loads(json.dumps(asdict(result)))
        content = json.dumps({"checksum": digest_of(document), "judged": document})
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, content.encode())
        except OSError:
            return  # an unwritable cache only costs time


def folder() -> Path:
    """The cache folder: ``AFFIDAVIT_CACHE``, or below the user's cache."""
    if configured := os.environ.get("AFFIDAVIT_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "affidavit" / "check"
