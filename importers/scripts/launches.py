"""Find how the files of a repository launch a script: the options and variables that they set.

An overridden default is not what runs. Every file that names the script is read (shell scripts,
Makefiles, workflows, sweeps, pipelines), beside the script and above it, except documentation.
Files are split into words, and never run.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from affidavit.importers.partial_plan import not_imported
from affidavit.plan import read_inside

SEARCH_FOLDERS = (".", "..", "../..")
"""Folders of the repository to search, relative to the script, nearest first."""
HIDDEN_FOLDERS = (".github/workflows", ".vscode", ".circleci")
"""Hidden folders that may have launch files."""
NON_LAUNCH_SUFFIXES = (".ipynb", ".md", ".rst", ".txt", ".tex", ".html", ".csv", ".tsv", ".jsonl",
               ".lock", ".svg", ".log")  # fmt: skip
PROCESS_STARTERS = ("subprocess", "os.system", "os.exec", "os.popen", "runpy")
DOCUMENT_SUFFIXES = (".yaml", ".yml", ".json")
MAX_FILES = 1_000
MAX_FILE = 1 << 18
MAX_SEARCHED = 1 << 26
"""Bytes of a larger file, in which only the names of programs are searched."""
MAX_NAME = 255
FIRST_BYTES = 80
"""Bytes by which a shell tells a script from a binary file."""
PROGRAM = re.compile(rb"""[^\s/\\"'=]+\Z""")
MODULE = re.compile(rb"[^\w.]{1,9}([\w.]+)")
COMMAND_ENDS = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "<"})
VARIABLE = re.compile(r"^\s*+(?:export\s++)?+([A-Z][A-Z0-9_]*+)=(\S*+)")
ASSIGNMENT = re.compile(r"^[^\S\n]*+(?:export[^\S\n]++)?+(\w++)[^\S\n]*+:?=[^\S\n]*+", re.M)
"""The start of an assignment in a shell script or Makefile."""
CLOSING = {'"': '"', "'": "'", "(": ")"}
"""What closes a value that may span lines."""
FUNCTION = re.compile(r"^[^\S\n]*+(?:function[^\S\n]++)?+(\w++)\s*+\(\)\s*+\{", re.M)
"""The start of a shell function."""
VARIABLE_USE = re.compile(r"\$(?:\{(\w++)(?:\[[@*]\])?\}|\((\w++)\)|(\w++))")
MAX_EXPANDED = 1 << 22
"""Characters of all commands of a file, with its variables and functions written out."""


def read_launches(folder: Path | None, name: str | None) -> dict[str, list[tuple[str, str]]]:
    """Return the options and ``$VARIABLES`` that launch files set for a script, and where.

    Option names are in lower case with underscores and without dashes, such as
    ``noise_multiplier``. Hydra's options have dots.
    """
    settings: dict[str, list[tuple[str, str]]] = defaultdict(list)
    if folder is None or not name:
        return settings
    stem = Path(name).stem
    for path in _files(folder):
        text, lowered = _text_of(path)
        if stem not in lowered or os.path.basename(path).lower() == name:
            continue
        file = Path(path)
        variables: dict[str, tuple[str, str]] = {}
        for where, line in _commands(file, text, name):
            if match := VARIABLE.match(line):
                variables[f"${match[1]}"] = (match[2].strip("\"'"), where)
            if stem in line.lower():
                for key, value in _options(line, name):
                    settings[key].append((value, where))
                for key, setting in variables.items():
                    settings[key].append(setting)
    return settings


def find_unread(folder: Path | None, name: str | None) -> str | None:
    """Return what may launch a script and is not read: too many files, or one that is too large."""
    if folder is None or not name:
        return None
    for number, path in enumerate(_files(folder, MAX_FILES + 1)):
        if number == MAX_FILES:
            return f"more than {MAX_FILES:,} files beside the script"
        file = os.path.basename(path)
        if file.lower() != name and not _programs_of(path).isdisjoint(("", name, Path(name).stem)):
            return f"{file}, which is larger than {MAX_FILE >> 10} KiB,"
    return None


def _programs_of(file: str) -> frozenset[str]:
    """Return the programs that a file names, if it is too large for a launch file.

    The name "" stands for programs that are not known.
    """
    version = _version_of(file)
    if version is None or version[1] <= MAX_FILE:
        return frozenset()
    return _search_programs(file, os.getcwd(), *version)


@lru_cache(maxsize=MAX_FILES)
def _search_programs(file: str, root: str, *_: int) -> frozenset[str]:
    try:
        raw = read_inside(file, root, MAX_SEARCHED)
    except OSError:
        return frozenset()
    if _is_binary(raw):
        return frozenset()
    if len(raw) > MAX_SEARCHED:
        return frozenset({""})
    text = raw.replace(b"\0", b"").lower()
    # Splitting takes a tenth of the time of an expression that begins with a name.
    before, after = text.split(b".py")[:-1], text.split(b"-m")[1:]
    names = [PROGRAM.search(part[-MAX_NAME:]) for part in before]
    modules = [MODULE.match(part[:MAX_NAME]) for part in after]
    return frozenset(
        [f"{match[0].decode('utf-8', 'replace').lower()}.py" for match in names if match]
        + [match[1].decode().rpartition(".")[2] for match in modules if match]
    )


def _is_binary(raw: bytes) -> bool:
    """Whether a shell refuses to run the file, because its first line has a NUL."""
    return b"\0" in raw[:FIRST_BYTES].partition(b"\n")[0]


def find_mention(
    folder: Path | None, name: str | None, variable: str, read: list[str]
) -> str | None:
    """Return the first file that names an environment variable, except those ``read`` for it.

    Workflows, Dockerfiles, compose files, jobs and sourced scripts set variables in many ways: a
    default that any of them names is not what is known to run.
    """
    word = re.compile(rf"(?<!oc\.env:)\b{re.escape(variable)}\b")
    for path in () if folder is None else _files(folder):
        text, _ = _text_of(path)
        file = os.path.basename(path)
        if file.lower() == name or any(where.startswith(file) for where in read):
            continue
        if word.search(text):
            return file
    return None


def _text_of(file: str) -> tuple[str, str]:
    """Return the text of a launch file, also in lower case; both are empty if it is none."""
    version = _version_of(file)
    return ("", "") if version is None else _read_text(file, os.getcwd(), *version)


def _version_of(file: str) -> tuple[int, int, int, int] | None:
    """Return what changes with the content of a file, and second its size; None if it is gone."""
    try:
        state = os.stat(file)
    except (OSError, ValueError):
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


@lru_cache(maxsize=MAX_FILES)
def _read_text(file: str, root: str, *_: int) -> tuple[str, str]:
    """Read a file of the repository once, because each script beside it searches it."""
    try:
        raw = read_inside(file, root, MAX_FILE)
    except OSError:
        return "", ""
    if _is_binary(raw) or len(raw) > MAX_FILE:
        return "", ""
    text = raw.replace(b"\0", b"").decode("utf-8", "replace")  # as a shell reads it
    if file.endswith(".py") and not any(word in text for word in PROCESS_STARTERS):
        return "", ""  # a module
    return text, text.lower()


def _commands(file: Path, text: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file that may be commands, and the place of each."""
    if file.suffix.lower() in DOCUMENT_SUFFIXES or file.name == "MLproject":
        with suppress(ValueError):
            for line in _document_commands(yaml_of(text), name, set()):
                yield file.name, line
            return
    if file.suffix == ".py":
        with suppress(SyntaxError, ValueError, RecursionError):
            for node in ast.walk(ast.parse(text)):
                for line in _in_python(node):
                    yield f"line {getattr(node, 'lineno', '?')} of {file.name}", line
        return
    sets: dict[str, set[str]] = defaultdict(set)
    for key, value in _assignments(text):
        sets[key].add(value)
    single = {
        key: " ".join(values.pop().split()) for key, values in sets.items() if len(values) < 2
    }
    known = {key: value for key, value in single.items() if "$" not in value}
    bodies = _functions(text)
    left = MAX_EXPANDED

    def value_of(match: re.Match[str]) -> str:
        return known.get(match[1] or match[2] or match[3], match[0])

    for number, line in enumerate(text.replace("\\\n", " ").replace("`\n", " ").splitlines(), 1):
        if not line.strip():
            continue
        listed = line.lstrip().startswith(("CMD", "ENTRYPOINT"))
        words = re.sub(r"[\[\],]", " ", line) if listed else line
        called = line.split(maxsplit=1)[0]
        if (body := bodies.get(called)) is not None:
            passed = line.partition(called)[2]
            left -= len(body) + body.count("$@") * len(passed)
            words = "" if left < 0 else body.replace("$@", passed).replace('"', " ")
        left -= len(words) + sum(len(value_of(use)) for use in VARIABLE_USE.finditer(words))
        if left < 0:
            message = f"{file.name} has commands of more than {MAX_EXPANDED} characters."
            raise not_imported("script", message, "Shorten it, or write a plan.")
        yield f"line {number} of {file.name}", VARIABLE_USE.sub(value_of, words)


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values that lines assign; values in quotes or parentheses span lines."""
    end = 0
    closings = dict.fromkeys(CLOSING.values(), 0)
    for match in ASSIGNMENT.finditer(text):
        start = match.end()
        if match.start() < end:
            continue
        end = _end_of_line(text, start)
        value = text[start:end]
        if (mark := CLOSING.get(text[start : start + 1])) is not None:
            if closings[mark] <= start:
                at = text.find(mark, start + 1)
                closings[mark] = len(text) if at < 0 else at
            after = closings[mark] + 1
            if after <= len(text) and text[after : after + 1] in ("", "\n"):
                value, end = text[start + 1 : after - 1], after
        yield match[1], value


def _functions(text: str) -> dict[str, str]:
    """Return the bodies of the shell functions that pass on their arguments."""
    bodies: dict[str, str] = {}
    end = 0
    for match in FUNCTION.finditer(text):
        if match.start() < end:
            continue
        close = text.find("}", match.end())
        if close < 0:
            break
        body, end = text[match.end() : close], close + 1
        if "$@" in body:
            bodies[match[1]] = body
    return bodies


def _end_of_line(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _in_python(node: ast.AST) -> list[str]:
    """Return the commands in a string or list of a module that starts processes."""
    match node:
        case ast.Constant(value=str(text)):
            return text.splitlines()
        case ast.JoinedStr(values=parts):
            return ["".join(_command_word(part) for part in parts)]
        case ast.List(elts=parts):
            return [shlex.join(map(_command_word, parts))]
    return []


def _command_word(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "$"


def _document_commands(part: Any, name: str, seen: set[int]) -> Iterator[str]:
    """Yield the commands of a document: its texts, word lists and sweep parameters."""
    if isinstance(part, str):
        yield from part.splitlines()
    elif isinstance(part, list | dict) and id(part) not in seen:
        seen.add(id(part))
        own = part if isinstance(part, list) else [*_words(part, name)]
        if own and all(isinstance(item, str | int | float) for item in own):
            yield shlex.join(map(str, own))
        for item in part.values() if isinstance(part, dict) else part:
            yield from _document_commands(item, name, seen)


def _words(table: dict[Any, Any], name: str) -> Iterator[Any]:
    """Yield the command line of a table with a program, arguments and sweep parameters."""
    program = str(table.get("program", ""))
    commands = [table.get("command"), table.get("args")]
    if Path(program.lower()).name == name:
        yield program
    elif not all(isinstance(item, list) for item in commands):
        return
    for item in commands:
        yield from item if isinstance(item, list) else str(item or "").split()
    parameters = table.get("parameters")
    for key, parameter in parameters.items() if isinstance(parameters, dict) else ():
        yield f"--{key}={parameter.get('value') if isinstance(parameter, dict) else parameter}"


def differs_from_yaml(value: Any, text: str) -> bool:
    """Whether the word of a launch file is another value than ``value``."""
    try:
        return bool(yaml_of(text) != value) and text != str(value)
    except ValueError:
        return True


def yaml_of(text: str) -> Any:
    """Parse a YAML text; raises ``ValueError``."""
    try:
        return YAML(typ="safe").load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        raise ValueError(type(error).__name__) from None


def _files(folder: Path, most: int = MAX_FILES) -> Iterator[str]:
    """Yield the files that may launch the script, ``most`` of them at most."""
    seen: set[str] = set()
    root = Path.cwd().resolve()
    for place in SEARCH_FOLDERS:
        at = (folder / place).resolve()
        if not at.is_relative_to(root) or not at.is_dir():
            continue
        below = (path for path in _paths_in(str(at)) if not os.path.basename(path).startswith("."))
        for inner in (str(at), *(str(at / name) for name in HIDDEN_FOLDERS), *below):
            for file in _paths_in(inner):
                suffix = os.path.splitext(file)[1].lower()
                if file in seen or suffix in NON_LAUNCH_SUFFIXES or not os.path.isfile(file):
                    continue
                seen.add(file)
                if len(seen) > most:
                    return
                yield file


def _paths_in(folder: str) -> list[str]:
    """Return the sorted paths in a folder, or nothing if it is none."""
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _options(line: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the options after the script's name in a command, and the variables before it."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    stem = Path(name).stem
    for word in words:
        if stem in word.lower() and len(word.split()) > 1:
            yield from _options(word, name)  # a command in quotes
    words = [part for word in words for part in (word.split() if word[:1] == "-" else [word])]
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
    end = next((index for index, word in enumerate(rest) if word in COMMAND_ENDS), len(rest))
    rest = rest[:end]
    for index, word in enumerate(rest):
        key, equals, value = word.partition("=")
        follows = rest[index + 1] if index + 1 < len(rest) else "-"
        if equals:
            yield option_name(key), value
        elif word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            has_value = not follows.startswith("-") or follows[1:2].isdigit()
            yield option_name(word), follows if has_value else "true"


def option_name(word: str) -> str:
    """Return the normalized name of an option.

    >>> option_name("--noise-multiplier"), option_name("+privacy.sigma")
    ('noise_multiplier', 'privacy.sigma')
    """
    if word.startswith("$"):
        return word
    return word.lstrip("-+~").replace("-", "_").lower()
