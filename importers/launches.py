"""How the shell scripts of a repository run a script: the options and variables that they set.

A default that such a script overrides is not what runs. Shell scripts are looked for beside the
script and above it; they are split into words, and never run.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

PLACES = tuple(f"{above}/{below}" for above in (".", "..", "../..") for below in (".", "scripts"))
PATTERNS = ("*.sh", "*.bash", "*.slurm", "*.sbatch", "Makefile")
MOST_FILES = 200
LARGEST_FILE = 1 << 18
ENDS = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "<"})
VARIABLE = re.compile(r"^\s*(?:export\s+)?([A-Z][A-Z0-9_]*)=(\S*)")


def launches(folder: Path | None, name: str | None) -> dict[str, list[tuple[str, str]]]:
    """The options, without dashes, and ``$VARIABLES`` that shell scripts set, and where each does.

    Names are in lower case with underscores, as ``noise_multiplier``; options of Hydra have dots.
    """
    settings: dict[str, list[tuple[str, str]]] = defaultdict(list)
    if folder is None or not name:
        return settings
    for file in _files(folder):
        variables: dict[str, tuple[str, str]] = {}
        text = file.read_text("utf-8", "replace").replace("\\\n", " ")
        for number, line in enumerate(text.splitlines(), 1):
            where = f"line {number} of {file.name}"
            if match := VARIABLE.match(line):
                variables[f"${match[1]}"] = (match[2].strip("\"'"), where)
            if Path(name).stem in line.lower():
                for key, value in _options(line, name):
                    settings[key].append((value, where))
                for key, told in variables.items():
                    settings[key].append(told)
    return settings


def differs(value: Any, text: str) -> bool:
    """Whether a shell script's word is another value than this one."""
    try:
        return bool(yaml_of(text) != value) and text != str(value)
    except ValueError:
        return True


def yaml_of(text: str) -> Any:
    """What a YAML text says; raises ``ValueError`` if it cannot be read."""
    try:
        return YAML(typ="safe").load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        raise ValueError(type(error).__name__) from None


def _files(folder: Path) -> Iterator[Path]:
    seen: set[Path] = set()
    root = Path.cwd().resolve()
    for place in PLACES:
        at = (folder / place).resolve()
        if not at.is_relative_to(root) or not at.is_dir():
            continue
        for pattern in PATTERNS:
            for file in sorted(at.glob(pattern)):
                if file not in seen and len(seen) < MOST_FILES and file.is_file():
                    seen.add(file)
                    if file.stat().st_size <= LARGEST_FILE:
                        yield file


def _options(line: str, name: str) -> Iterator[tuple[str, str]]:
    """The options after the name of the script, and the variables before it."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    stem = Path(name).stem
    at = next(
        (
            index
            for index, word in enumerate(words)
            if Path(word).name.lower() == name
            or (words[index - 1] == "-m" and word.lower().rpartition(".")[2] == stem)
        ),
        None,
    )
    if at is None:
        return
    for word in words[:at]:
        if match := VARIABLE.match(word):
            yield f"${match[1]}", match[2]
    rest = words[at + 1 :]
    end = next((index for index, word in enumerate(rest) if word in ENDS), len(rest))
    rest = rest[:end]
    for index, word in enumerate(rest):
        key, equals, value = word.partition("=")
        follows = rest[index + 1] if index + 1 < len(rest) else "-"
        if equals:
            yield option(key), value
        elif word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            has_value = not follows.startswith("-") or follows[1:2].isdigit()
            yield option(word), follows if has_value else "true"


def option(word: str) -> str:
    """The name of an option as it is looked up.

    >>> option("--noise-multiplier"), option("+privacy.sigma")
    ('noise_multiplier', 'privacy.sigma')
    """
    if word.startswith("$"):
        return word
    return word.lstrip("-+~").replace("-", "_").lower()
