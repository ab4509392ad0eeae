"""Find what the files of a repository set when they launch a script: options and variables.

In files that name it, words such as ``--name`` and ``name=value`` leave an option open.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from affidavit.importers.names import NAMES
from affidavit.plan import OutsideFolder, read_inside

SEARCH_FOLDERS, HIDDEN_FOLDERS = NAMES["launch_folders"], NAMES["hidden_launch_folders"]
NON_LAUNCH_SUFFIXES = NAMES["non_launch_suffixes"]
PROCESS_STARTERS = (b"subprocess", b"os.system", b"os.exec", b"os.popen", b"runpy")
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors of a path at which nothing is. Others, such as too little memory, hide what is there."""
MAX_FILES = 1_000
MAX_FILE = 1 << 18
MAX_SEARCHED = 1 << 26
"""Bytes of a larger file, in which only the names of programs are searched."""
MAX_NAME = 255
FIRST_BYTES = 80
"""Bytes by which a shell tells a script from a binary file."""
PROGRAM = re.compile(rb"""[^\s/\\"'=]+\Z""")
MODULE = re.compile(rb"[^\w.]{1,9}([\w.]+)")
COMMENT = re.compile(r"(?:^|(?<=\s))#.*", re.M)
SEPARATORS = re.compile(r"""[\s"'`\[\](){},;|&\\]+""")
"""What separates the words of shell scripts, documents and lists alike."""


@dataclass(frozen=True, slots=True)
class Launches:
    """Options that files set, with the file that names each, and what is not read."""

    settings: dict[str, str]
    unread: str | None


def read_launches(folder: Path | None, name: str | None) -> Launches:
    """Return what the files beside a script and above it set when they launch it."""
    settings: dict[str, str] = {}
    unread: str | None = None
    try:
        for number, path in enumerate(_files(folder, MAX_FILES + 1) if folder and name else ()):
            if number == MAX_FILES:
                unread = unread or f"more than {MAX_FILES:,} files beside the script"
                break
            text, programs = _read(path, os.getcwd())
            file = os.path.basename(path)
            if file.lower() == name or programs.isdisjoint(("", name, Path(name or "").stem)):
                continue
            if text is None:
                unread = unread or f"{file}, which is larger than {MAX_FILE >> 10} KiB,"
            settings |= dict.fromkeys(_settings(text or ""), file)
    except OSError as error:
        file = os.path.basename(str(error.filename))
        unread = f"{file}, which cannot be read ({error.strerror}),"
    return Launches(settings, unread)


def _settings(text: str) -> Iterator[str]:
    """Yield the names of options that words of a text may set."""
    for word in SEPARATORS.split(COMMENT.sub("", text)):
        key, mark, _ = word.partition("=")
        if mark or word.endswith(":") or (word[:1] == "-" and word.lstrip("-")[:1].isalpha()):
            yield option_name(key.rstrip(":"))


@lru_cache(maxsize=MAX_FILES)
def _read(file: str, root: str) -> tuple[str | None, frozenset[str]]:
    """Return the text of a file, None if it is too large, and the programs it names ("" is any)."""
    try:
        raw = read_inside(file, root, MAX_SEARCHED)
    except (OutsideFolder, FileNotFoundError):
        return "", frozenset()
    if b"\0" in raw[:FIRST_BYTES].partition(b"\n")[0]:
        return "", frozenset()  # a shell refuses to run it
    if len(raw) > MAX_SEARCHED:
        return None, frozenset({""})
    raw = raw.translate(None, b"\0")  # as a shell reads it
    if file.endswith(".py") and not any(word in raw for word in PROCESS_STARTERS):
        return "", frozenset()  # a module
    # Splitting takes a tenth of the time of an expression that begins with a name.
    before, after = raw.lower().split(b".py")[:-1], raw.lower().split(b"-m")[1:]
    names = [PROGRAM.search(part[-MAX_NAME:]) for part in before]
    modules = [MODULE.match(part[:MAX_NAME]) for part in after]
    files = {f"{match[0].decode('utf-8', 'replace').lower()}.py" for match in names if match}
    files |= {match[1].decode().rpartition(".")[2] for match in modules if match}
    return (None if len(raw) > MAX_FILE else raw.decode("utf-8", "replace")), frozenset(files)


def _files(folder: Path, most: int) -> Iterator[str]:
    """Yield the files that may launch the script, ``most`` of them at most."""
    seen: dict[str, None] = {}
    root = Path.cwd().resolve()
    for place in SEARCH_FOLDERS:
        at = (folder / place).resolve()
        if at.is_relative_to(root):
            below = [path for path in _paths_in(str(at)) if os.path.basename(path)[0] != "."]
            for inner in (str(at), *(str(at / name) for name in HIDDEN_FOLDERS), *below):
                seen |= dict.fromkeys(_paths_in(inner))
    yield from itertools.islice((path for path in seen if Path(path).is_file()), most)


@lru_cache(maxsize=MAX_FILES)
def _paths_in(folder: str) -> tuple[str, ...]:
    """Return the sorted paths of what may launch a script in a folder, or nothing if it is none."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        if error.errno in ABSENT:
            return ()
        raise
    paths = (name for name in names if os.path.splitext(name)[1].lower() not in NON_LAUNCH_SUFFIXES)
    return tuple(os.path.join(folder, name) for name in paths)


def option_name(word: str) -> str:
    """Return the normalized name of an option.

    >>> option_name("--noise-multiplier"), option_name("+privacy.sigma")
    ('noise_multiplier', 'privacy.sigma')
    """
    return word.lstrip("-+~").replace("-", "_").lower()


def forget_files() -> None:
    """Read files and folders again from now on."""
    _read.cache_clear()
    _paths_in.cache_clear()
