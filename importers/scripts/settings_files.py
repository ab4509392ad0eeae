"""Read settings files beside a script: JSON, YAML, OmegaConf, Hydra, gin and Flower."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.launches import SEARCH_FOLDERS, yaml_of
from affidavit.importers.scripts.syntax import keywords_of, last_name, unpacks
from affidavit.importers.scripts.values import Evaluator, Record, Unreadable, default_of
from affidavit.plan import OutsideFolder, read_inside

MAX_FILE = 1 << 20
MAX_VALUES = 100_000
MAX_DEPTH = 50
GIN_PARSERS = NAMES["gin_parsers"]
INTERPOLATION = re.compile(r"\$\{([^${}]+)\}")
GIN_NAME = re.compile(r"[\w./]++")
INCLUDE = re.compile(r"""include\s++(?:'([^']++)'|"([^"]++)")\s*+(?:#.*)?""")


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


def read_configured_parameter(
    values: Evaluator, function: ast.FunctionDef | ast.ClassDef, name: str
) -> Any:
    """Read a parameter that Hydra or gin passes to a decorated function."""
    decorators = {ast.unparse(getattr(item, "func", item)) for item in function.decorator_list}
    if decorators & {"gin.configurable", "gin.register"}:
        return read_gin_binding(values, function, name)
    return read_hydra_config(values, function)


def read_gin_binding(values: Evaluator, function: ast.FunctionDef | ast.ClassDef, name: str) -> Any:
    """Read ``function.name = value`` from the gin files that the script parses, else its default.

    Raises ``Unreadable``.
    """
    parsers = values.script.calls_to(*GIN_PARSERS)
    passes_it = any(
        call.args or any(item.arg in (None, name) for item in call.keywords)
        for call in values.calls_of(function)
    )
    if passes_it:
        raise Unreadable(function, f"a call of {function.name} passes it arguments")
    if len(parsers) != 1 or last_name(parsers[0].func) not in GIN_PARSERS[:2]:
        raise Unreadable(function, "the script does not parse exactly one gin file by name")
    bindings: dict[str, str] = {}
    macros: dict[str, str] = {}
    for line in _gin_lines_parsed(values, parsers[0]):
        bound, value = _gin_binding(line)
        owner, _, parameter = bound.rpartition(".")
        scope = owner.removesuffix(function.name)
        if parameter and scope != owner and scope[-1:] in ("", ".", "/"):
            if "/" in scope:
                raise Unreadable(parsers[0], f"a file binds {name} in a scope only")
            bindings[parameter] = value
        elif "." not in bound and "/" not in bound:
            macros[bound] = value
    text = bindings.get(name)
    if text is not None and text.startswith("%"):
        text = macros.get(text[1:], text)
    if text is None:
        inits = (item for item in function.body if getattr(item, "name", "") == "__init__")
        own = next(inits, None) if isinstance(function, ast.ClassDef) else function
        default = None if own is None else default_of(own, name)
        return None if default is None else values.evaluate(default)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise Unreadable(function, f"a file binds {name} to {text}, which is not a value") from None


def _gin_binding(line: str) -> tuple[str, str]:
    """Return the name that a line of a gin file binds, and the text of its value; empty if none."""
    name, _, text = line.partition("=")
    name = name.rstrip()
    return (name, text.partition("#")[0].strip()) if GIN_NAME.fullmatch(name) else ("", "")


def _gin_lines_parsed(values: Evaluator, call: ast.Call) -> Iterator[str]:
    """Yield the lines that a call parses: those of its files, and its bindings."""
    names = ("config_files", "bindings")
    arguments = dict(zip(names, call.args, strict=False)) | keywords_of(call)
    files, bindings = (
        values.evaluate(arguments[key]) if key in arguments else None for key in names
    )
    for file in files if isinstance(files, list) else [files]:
        if file is not None:
            yield from _gin_lines(values, call, str(file))
    for text in bindings if isinstance(bindings, list) else [bindings or ""]:
        yield from str(text).splitlines()


def _gin_lines(values: Evaluator, node: ast.AST, file: str, depth: int = 0) -> Iterator[str]:
    """Yield the lines of a gin file and of its included files, in binding order."""
    for line in read_nearby_text(values, node, file).splitlines():
        if match := INCLUDE.fullmatch(line):
            if depth > 10:
                raise Unreadable(node, f"{file} includes too many files")
            yield from _gin_lines(values, node, match[1] or match[2], depth + 1)
        elif line.startswith("include"):
            raise Unreadable(node, f"{file} has an include that is not supported")
        elif line.startswith("import"):
            _require_no_bindings(values, node, line.split()[-1])
        else:
            yield line


def _require_no_bindings(values: Evaluator, node: ast.AST, module: str) -> None:
    """Raise ``Unreadable`` if a module that a gin file imports may bind values."""
    texts = []
    for place in SEARCH_FOLDERS:
        try:
            texts.append(read_nearby_text(values, node, f"{place}/{module.replace('.', '/')}.py"))
        except Unreadable:
            continue
    if not texts or any(name in text for text in texts for name in (*GIN_PARSERS, "gin.constant")):
        raise Unreadable(node, f"the module {module}, which gin imports, may bind other values")


def read_flower_config(values: Evaluator, call: ast.Call) -> Any:
    """Read Flower's ``context.run_config`` from ``[tool.flwr.app.config]`` in pyproject.toml."""
    if not (isinstance(call.func, ast.Name) and call.func.id == "run_config" and not call.args):
        return None
    for place in SEARCH_FOLDERS:
        try:
            text = read_nearby_text(values, call, f"{place}/pyproject.toml")
            config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
            return Record("run_config", _flatten(config))
        except (Unreadable, KeyError, TypeError, ValueError, AttributeError, RecursionError):
            continue
    return None


def _flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys, as Flower passes them."""
    fields: dict[str, Any] = {}
    for key, value in config.items():
        inner = isinstance(value, dict)
        fields |= _flatten(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return fields


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


def read_hydra_compose(values: Evaluator, call: ast.Call) -> Any:
    """Read Hydra's ``compose(config_name=..., overrides=[...])``.

    Raises ``Unreadable``.
    """
    if last_name(call.func) != "compose" or not values.script.comes_from(call.func, ("hydra",)):
        return None
    starts = values.script.calls_to("initialize")
    if len(starts) != 1 or len(call.args) > 1:
        raise Unreadable(call, "the script does not call initialize() exactly once")
    start, arguments = (
        {key: values.evaluate(value) for key, value in keywords_of(node).items()}
        for node in (starts[0], call)
    )
    name = values.evaluate(call.args[0]) if call.args else arguments.get("config_name")
    config = _hydra_config(values, call, start.get("config_path") or ".", str(name))
    overrides = arguments.get("overrides") or []
    if not isinstance(overrides, list):
        raise Unreadable(call, "its overrides are not a list")
    for override in overrides:
        key, equals, text = str(override).partition("=")
        try:
            settled = bool(equals) and _set_field(config, key.lstrip("+"), yaml_of(text))
        except ValueError:
            settled = False
        if not settled:
            raise Unreadable(call, f"the override {override} is not supported")
    return config


def _set_field(config: Any, key: str, value: Any) -> bool:
    """Set a field by its dotted key; return False if the field is a table or has no parent."""
    *path, last = key.split(".")
    for step in path:
        config = config.fields.get(step) if isinstance(config, Record) else None
    if not isinstance(config, Record) or isinstance(config.fields.get(last), Record):
        return False
    config.fields[last] = value
    return True


def _hydra_config(values: Evaluator, node: ast.Call, folder: str, name: str) -> Any:
    if (stored := _structured_config(values, name)) is not None:
        return without_launch_overrides(values, stored, "hydra")
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
    config = as_record(document)
    swept = config.fields.get("hydra")
    for key in ("sweeper", "params"):
        swept = swept.fields.get(key) if isinstance(swept, Record) else None
    for key in swept.fields if isinstance(swept, Record) else ():
        _set_field(config, key, Unreadable(node, f"{file} sweeps {key}"))
    return without_launch_overrides(values, config, "hydra")


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


def _structured_config(values: Evaluator, name: str) -> Any:
    """Return the only structured config in Hydra's ``ConfigStore``, if it has this name."""
    stores = values.script.calls_to("store")
    named = [keywords_of(call) for call in stores]
    if not any(values.known_value(item.get("name")) == name for item in named):
        return None
    if len(named) != 1 or named[0].keys() != {"name", "node"} or unpacks(stores[0]):
        raise Unreadable(stores[0], "several structured configs may be combined")
    node = named[0]["node"]
    return values.evaluate(node if isinstance(node, ast.Call) else ast.Call(node, [], []))


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
