"""Read settings files beside a script: JSON and YAML."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from affidavit.importers.scripts.launches import yaml_of
from affidavit.importers.scripts.syntax import last_name
from affidavit.importers.scripts.values import Evaluator, Record, Unreadable
from affidavit.plan import OutsideFolder, read_inside

MAX_FILE = 1 << 20
MAX_VALUES = 100_000
MAX_DEPTH = 50
INTERPOLATION = re.compile(r"\$\{([^${}]+)\}")


def read_settings_file(values: Evaluator, call: ast.Call) -> Any:
    """Read ``json.load(open(...))``, ``yaml.safe_load(...)`` or ``OmegaConf.load("...")``."""
    text = ast.unparse(call.func)
    if text in ("open", "Path", "pathlib.Path") and call.args:
        return Record("file", {"": values.evaluate(call.args[0])})
    if text in ("json.load", "json.loads", "yaml.safe_load", "yaml.load", "OmegaConf.load"):
        source: Any = call.args[0] if call.args else None
        while isinstance(source, ast.Call) and last_name(source.func) in (
            "read",
            "read_text",
            "open",
        ):
            source = (
                source.func.value
                if isinstance(source.func, ast.Attribute)
                else next(iter(source.args), None)
            )
        opened = values.evaluate(source) if source is not None else None
        name = opened.fields[""] if isinstance(opened, Record) and "" in opened.fields else opened
        return as_record(read_settings(values, call, str(name)))
    return None


def read_settings(values: Evaluator, node: ast.AST, name: str) -> Any:
    """Read a JSON or YAML file beside the script; raises ``Unreadable``."""
    text = read_nearby_text(values.script.folder, node, name)
    try:
        document = json.loads(text) if name.endswith(".json") else yaml_of(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(node, f"{name} cannot be read: {type(error).__name__}") from None
    if not isinstance(document, dict):
        raise Unreadable(node, f"{name} is not a mapping")
    if not _is_small(document):
        raise Unreadable(node, f"{name} is too large, or refers to itself")
    return document


def _is_small(document: Any) -> bool:
    """Whether a document stays within the size and depth limits with aliases expanded."""
    count, parts = 0, [(document, 0)]
    while parts:
        part, depth = parts.pop()
        count += 1
        if count > MAX_VALUES or depth > MAX_DEPTH:
            return False
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        parts += [(item, depth + 1) for item in inner]
    return True


def read_nearby_text(folder: Path | None, node: ast.AST, name: str) -> str:
    """Read a file beside the script, within the current folder; raises ``Unreadable``."""
    if folder is None:
        raise Unreadable(node, f"{name} cannot be read from here")
    try:
        raw = read_inside(folder / name, Path.cwd(), MAX_FILE)
        if len(raw) <= MAX_FILE:
            return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        raise Unreadable(node, f"{name} is longer than {MAX_FILE >> 20} MiB")
    except (FileNotFoundError, OutsideFolder, IsADirectoryError):
        raise Unreadable(node, f"{name} is not a file beside the script") from None
    except (OSError, ValueError) as error:
        raise Unreadable(node, f"{name} cannot be read: {type(error).__name__}") from None


def as_record(document: Any) -> Any:
    """Convert a document to nested records."""
    if isinstance(document, dict):
        return Record("file", {key: as_record(value) for key, value in document.items()})
    return document
