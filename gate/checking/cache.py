"""What was judged before, kept by what it depends on: the text, the engines, and this release.

An entry is a file with a checksum of its own. One that does not fit its checksum is removed
and told of, and the gate that met it does not end with 0: a cache that something else writes
to is no ground to let a plan through, even though the plan was judged anew.

Nothing here guards against somebody who can write to the cache on purpose; who can do that
can change the gate as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from affidavit import __version__
from affidavit.accountants import versions
from affidavit.certificate import write_atomically
from affidavit.gate.checking.finding import Edit, Finding, Fix
from affidavit.gate.checking.verdict import Judged
from affidavit.gate.exits import Exit
from affidavit.plan import digest_of

FORMAT = 1


class Cache:
    """A folder of entries; ``corrupt`` are those that were found broken and removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.corrupt: list[Path] = []

    def get(self, question: dict[str, Any], judge: Callable[[], Judged]) -> Judged:
        """What was judged about ``question``, or is now."""
        key = digest_of(
            {"format": FORMAT, "affidavit": __version__, "engines": versions(), **question}
        )
        path = self._folder / f"{key.removeprefix('sha256:')}.json"
        found = self._read(path)
        if found is None:
            found = judge()
            if found.exit in (Exit.CERTIFIED, Exit.BLOCKED):
                self._write(path, found)
        return found

    def _read(self, path: Path) -> Judged | None:
        try:
            entry = json.loads(path.read_bytes())
            if entry["checksum"] != digest_of(entry["judged"]):
                raise ValueError("the checksum does not fit")
            return _judged(entry["judged"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self.corrupt.append(path)
            path.unlink(missing_ok=True)
            return None

    def _write(self, path: Path, found: Judged) -> None:
        document = json.loads(json.dumps(asdict(found)))
        content = json.dumps({"checksum": digest_of(document), "judged": document})
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(path, content.encode())
        except OSError:
            return  # a cache that cannot be written costs time, and nothing else


def folder() -> Path:
    """Where entries are kept: ``AFFIDAVIT_CACHE``, else below the user's cache."""
    if given := os.environ.get("AFFIDAVIT_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "affidavit" / "check"


def _judged(document: dict[str, Any]) -> Judged:
    findings = tuple(_finding(item) for item in document["findings"])
    return Judged(**{**document, "exit": Exit(document["exit"]), "findings": findings})


def _finding(document: dict[str, Any]) -> Finding:
    return Finding(**{**document, "fixes": tuple(_fix(item) for item in document["fixes"])})


def _fix(document: dict[str, Any]) -> Fix:
    changes = tuple((pointer, before, after) for pointer, before, after in document["changes"])
    edits = tuple(Edit(**item) for item in document["edits"])
    return Fix(**{**document, "changes": changes, "edits": edits})
