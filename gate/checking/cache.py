"""Evaluate plans, and cache the results.

The key of a result is the plan's text, the options, the versions of the accountants, and this
release. An entry is a file with a checksum. A corrupt entry is removed and reported, and the check
does not exit with 0, although the plan is checked again: another program writes to the cache. The
checksum does not protect against deliberate changes: anyone who can write to the user's folders can
change the program as well. The author of a pull request writes to the repository, so that a cache
in it is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affidavit import __version__
from affidavit.accountants import engine_versions
from affidavit.gate.checking.finding import CheckResult
from affidavit.gate.exit_codes import Exit
from affidavit.plan import digest_of, is_inside
from affidavit.trust import write_atomically

if TYPE_CHECKING:
    from affidavit.certificate.policy import Policy
    from affidavit.gate.checking.source import Source

FORMAT = 1


class Evaluator:
    """Evaluates plans; ``folder`` is the cache's, or None, and ``corrupt`` its removed entries."""

    def __init__(self, second_opinion: bool, policy: Policy | None, folder: Path | None) -> None:
        self._second_opinion, self._policy, self._folder = second_opinion, policy, folder
        self.corrupt: list[Path] = []

    def evaluate(self, source: Source) -> CheckResult:
        """Evaluate a plan without the cache."""
        # Imported here because a cached result needs no accountant.
        from affidavit.gate.checking.evaluate import evaluate

        return evaluate(source, second_opinion=self._second_opinion, policy=self._policy)

    def evaluate_cached(self, source: Source) -> CheckResult:
        """Return the cached result of a plan, or evaluate it."""
        if self._folder is None or source.imported is not None or source.names_a_file:
            return self.evaluate(source)
        key = {
            "format": FORMAT,
            "affidavit": __version__,
            "engines": engine_versions(),
            "file": os.fsencode(source.file).hex(),
            "pointer": source.pointer,
            "text": _digest(source),
            "second_opinion": self._second_opinion,
            "policy": None if self._policy is None else self._policy.digest(),
        }
        path = self._folder / f"{digest_of(key).removeprefix('sha256:')}.json"
        result = self._read(path)
        if result is None:
            result = self.evaluate(source)
            if result.exit in (Exit.CERTIFIED, Exit.BLOCKED):
                _write(path, result)
        return result

    def _read(self, path: Path) -> CheckResult | None:
        try:
            entry = json.loads(path.read_bytes())
            if entry["checksum"] != digest_of(entry["judged"]):
                raise ValueError("checksum mismatch")
            return CheckResult.from_document(entry["judged"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self.corrupt.append(path)
            with suppress(OSError):
                path.unlink()
            return None


def _digest(source: Source) -> str:
    """Return the sha256 of the plan's text, and of its place in the file."""
    section, text = source.section, source.whole
    place = ""
    if section is not None:
        lines = text.count("\n", 0, section.start)
        column = section.start - text.rfind("\n", 0, section.start)
        place, text = f"{section.start}:{lines}:{column}:", text[section.start : section.end]
    return hashlib.sha256((place + text).encode("utf-8", "surrogatepass")).hexdigest()


def _write(path: Path, result: CheckResult) -> None:
    document: Any = json.loads(json.dumps(asdict(result)))
    with suppress(OSError, ValueError):  # an unwritable cache, or a name that is not UTF-8
        content = json.dumps({"checksum": digest_of(document), "judged": document})
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, content.encode())


def cache_folder() -> Path:
    """Return the cache folder: ``AFFIDAVIT_CACHE``, or one in the user's cache."""
    if configured := os.environ.get("AFFIDAVIT_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "affidavit" / "check"


def is_in_repository(folder: Path) -> bool:
    """Whether a folder lies in the current one, or in the repository of the current one."""
    here = Path.cwd()
    root = next((place for place in (here, *here.parents) if (place / ".git").exists()), here)
    return is_inside(folder, root)
