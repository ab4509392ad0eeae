"""Read settings files beside a script: JSON, YAML, OmegaConf and Hydra's."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.launches import yaml_of
from affidavit.importers.scripts.syntax import keywords_of, last_name
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


def read_hydra_config(values: Evaluator, function: ast.FunctionDef | ast.ClassDef) -> Any:
    """Read the configuration that ``@hydra.main`` passes to a function.

    Raises ``Unreadable``.
    """
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "hydra.main":
            arguments = {key: values.evaluate(node) for key, node in keywords_of(decorator).items()}
            folder = arguments.get("config_path") or "."
            return _hydra_config(values, decorator, folder, str(arguments.get("config_name")))
    return None


def _hydra_config(values: Evaluator, node: ast.Call, folder: str, name: str) -> Any:
    if values.script.calls_to("store"):
        raise Unreadable(node, "it may be combined with a structured config")
    file = f"{folder}/{name}" if name.endswith((".yaml", ".yml")) else f"{folder}/{name}.yaml"
    document = read_settings(values, node, file)
    groups = document.pop("defaults", None) or []
    if not isinstance(groups, list):
        raise Unreadable(node, f"the defaults of {file} are not a list")
    for group in groups:
        if isinstance(group, dict):
            for key, choice in ((str(key), choice) for key, choice in group.items()):
                if key.removeprefix("override ").startswith("hydra/"):
                    continue  # what Hydra itself does
                other = f"{folder}/{key}/{choice}.yaml"
                inner = read_settings(values, node, other)
                moved = "@package" in read_nearby_text(values, node, other)
                if moved or "defaults" in inner or key in document:
                    raise Unreadable(node, f"{other} and {file} may set the same key")
                document[key] = inner
        elif group != "_self_":
            raise Unreadable(node, f"the configuration group {group} is not supported")
    main = values.main_script or values.script
    for key, settings in main.launches.items():
        for text, where in settings if key not in document else ():
            files = [f"{folder}/{key}/{choice}.yaml" for choice in text.split(",")]
            own = any(((main.folder or Path()) / other).is_file() for other in files)
            if own or (key in NAMES["config_options"] and text != name):
                raise Unreadable(node, f"{where} sets {key} to {text}")
    if "sweeper" in (document.get("hydra") or ()):
        raise Unreadable(node, f"{file} sweeps values")
    return without_launch_overrides(values, as_record(document), "hydra")


def without_launch_overrides(
    values: Evaluator, record: Record, kind: str, path: str = ""
) -> Record:
    """Return a configuration without the values that launch scripts override."""
    fields = {}
    for key, value in record.fields.items():
        own: Record | Unreadable | None = values.launch_override(value, f"{path}{key}")
        if own is None and isinstance(value, Record):
            own = without_launch_overrides(values, value, kind, f"{path}{key}.")
        fields[key] = value if own is None else own
    return Record(kind, fields, record.stores)


def read_settings(values: Evaluator, node: ast.AST, name: str) -> Any:
    """Read a JSON or YAML file beside the script; raises ``Unreadable``."""
    text = read_nearby_text(values, node, name)
    try:
        document = json.loads(text) if name.endswith(".json") else yaml_of(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(node, f"{name} cannot be read: {type(error).__name__}") from None
    if not isinstance(document, dict):
        raise Unreadable(node, f"{name} is not a mapping")
    if not _is_small(document):
        raise Unreadable(node, f"{name} is too large, or refers to itself")
    return interpolate(document, document, values)


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


def read_nearby_text(
    values: Evaluator, node: ast.AST, name: str, folder: Path | None = None
) -> str:
    """Read a file beside the script, within the current folder; raises ``Unreadable``."""
    folder = folder or (values.main_script or values.script).folder
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


def interpolate(part: Any, whole: Any, values: Evaluator) -> Any:
    """Replace ``${key}`` and ``${oc.env:NAME,default}`` where their values are known."""
    if isinstance(part, dict):
        return {key: interpolate(value, whole, values) for key, value in part.items()}
    if isinstance(part, list):
        return [interpolate(value, whole, values) for value in part]
    match = INTERPOLATION.fullmatch(part.strip()) if isinstance(part, str) else None
    if match is None:
        return part
    kind, _, rest = match[1].partition(":")
    if kind == "oc.env":
        name, comma, default = rest.partition(",")
        try:
            value = yaml_of(default) if comma else part
        except ValueError:
            return part
        if values.launch_override(value, f"${name}") is not None:
            return part
        values.defaults.add(f"${name}")
        return value
    value = whole
    for key in match[1].split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return part if value is None or isinstance(value, str) else value


def as_record(document: Any) -> Any:
    """Convert a document to nested records."""
    if isinstance(document, dict):
        return Record("file", {key: as_record(value) for key, value in document.items()})
    return document
