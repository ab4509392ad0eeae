"""Readers of files beside a script, for ``script_values``.

JSON and YAML files, read directly, by OmegaConf, Hydra or gin; Flower's run configuration; and
values imported from modules of the same repository.
"""

from __future__ import annotations

import ast
import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from affidavit.importers.script import Script, last_name
from affidavit.importers.script_values import Record, Unreadable, Values

LARGEST_FILE = 1 << 20
PLACES = (".", "..", "../..")
"""Folders in which a repository's files are looked for, beside the script first."""
MOST_MODULES = 100
INTERPOLATION = re.compile(r"\$\{([^${}]+)\}")
GIN = re.compile(r"^([\w./]*[./])?(\w+)\.(\w+)\s*=\s*(\S.*?)\s*(?:#.*)?$")
INCLUDE = re.compile(r"""^include\s+(['"])(.+)\1\s*(?:#.*)?$""")
MACRO = re.compile(r"^(\w+)\s*=\s*(\S.*?)\s*(?:#.*)?$")


def settings_file(values: Values, call: ast.Call) -> Any:
    """``json.load(open(...))``, ``yaml.safe_load(...)`` and ``OmegaConf.load("...")``."""
    text = ast.unparse(call.func)
    if text in ("open", "Path", "pathlib.Path") and call.args:
        return Record("file", {"": values.of(call.args[0])})
    if text in ("json.load", "json.loads", "yaml.safe_load", "yaml.load", "OmegaConf.load"):
        source: Any = call.args[0] if call.args else None
        while isinstance(source, ast.Call) and last_name(source.func) in (
            "read",
            "read_text",
            "open",
        ):
            source = source.func.value if isinstance(source.func, ast.Attribute) else source.args[0]
        opened = values.of(source) if source is not None else None
        name = opened.fields[""] if isinstance(opened, Record) and "" in opened.fields else opened
        return record_of(read_settings(values, call, str(name)))
    return None


def configured(values: Values, function: ast.FunctionDef, name: str) -> Any:
    """A parameter that Hydra or gin gives to a decorated function."""
    decorators = {ast.unparse(getattr(item, "func", item)) for item in function.decorator_list}
    if decorators & {"gin.configurable", "gin.register"}:
        return gin_binding(values, function, name)
    return hydra(values, function)


def gin_binding(values: Values, function: ast.FunctionDef, name: str) -> Any:
    """``function.name = value`` of the only gin file that the script parses.

    Raises ``Unreadable``.
    """
    parsers = [
        call
        for call in values.script.calls
        if last_name(call.func) in ("parse_config_file", "parse_config", "bind_parameter",
                                    "parse_config_files_and_bindings")
    ]  # fmt: skip
    passes_it = any(
        call.args or any(item.arg in (None, name) for item in call.keywords)
        for call in values.calls_of(function)
    )
    if passes_it:
        raise Unreadable(function, f"a call of {function.name} gives it arguments of its own")
    if len(parsers) != 1 or last_name(parsers[0].func) != "parse_config_file":
        raise Unreadable(function, "not one gin file is parsed by its name")
    file = values.of(parsers[0].args[0]) if parsers[0].args else None
    bindings: dict[str, str] = {}
    macros: dict[str, str] = {}
    for line in _gin_lines(values, parsers[0], str(file)):
        if (match := GIN.match(line)) and match[2] == function.name:
            if match[1] and "/" in match[1]:
                raise Unreadable(parsers[0], f"{file} binds {name} in a scope alone")
            bindings[match[3]] = match[4]
        elif match := MACRO.match(line):
            macros[match[1]] = match[2]
    text = bindings.get(name)
    if text is not None and text.startswith("%"):
        text = macros.get(text[1:])
    if text is None:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise Unreadable(function, f"{file} binds {name} to {text}, which is no value") from None


def _gin_lines(values: Values, node: ast.AST, file: str, depth: int = 0) -> Iterator[str]:
    """The lines of a gin file and of those that it includes, in the order of their bindings."""
    for line in _text_of(values, node, file).splitlines():
        if match := INCLUDE.match(line):
            if depth > 10:
                raise Unreadable(node, f"{file} includes too many files")
            yield from _gin_lines(values, node, match[2], depth + 1)
        elif line.startswith(("include", "import")):
            raise Unreadable(node, f"{file} imports modules, which may bind more")
        else:
            yield line


def run_config(values: Values, call: ast.Call) -> Any:
    """Flower's ``context.run_config``: ``[tool.flwr.app.config]`` of the nearest pyproject.toml."""
    if not (isinstance(call.func, ast.Name) and call.func.id == "run_config" and not call.args):
        return None
    for place in PLACES:
        try:
            text = _text_of(values, call, f"{place}/pyproject.toml")
            config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
        except (Unreadable, KeyError, TypeError, ValueError):
            continue
        return Record("run_config", _flat(config))
    return None


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables with dotted keys, as Flower passes them."""
    fields: dict[str, Any] = {}
    for key, value in config.items():
        inner = isinstance(value, dict)
        fields |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return fields


def hydra(values: Values, function: ast.FunctionDef) -> Any:
    """The configuration that ``@hydra.main`` passes to a function.

    Raises ``Unreadable``.
    """
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "hydra.main":
            arguments = {k.arg: values.of(k.value) for k in decorator.keywords if k.arg}
            folder = arguments.get("config_path") or "."
            name = f"{folder}/{arguments.get('config_name')}"
            name = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
            document = read_settings(values, decorator, name)
            for group in document.pop("defaults", []):
                if isinstance(group, dict):
                    for key, choice in group.items():
                        file = f"{folder}/{key}/{choice}.yaml"
                        inner = read_settings(values, decorator, file)
                        moved = "@package" in _text_of(values, decorator, file)
                        if moved or "defaults" in inner or key in document:
                            raise Unreadable(decorator, f"{file} and {name} may set the same")
                        document[key] = inner
                elif group != "_self_":
                    raise Unreadable(decorator, f"the configuration {group} is not read")
            return record_of(document)
    return None


def read_settings(values: Values, node: ast.AST, name: str) -> Any:
    """A JSON or YAML file beside the script; raises ``Unreadable``."""
    text = _text_of(values, node, name)
    try:
        document = json.loads(text) if name.endswith(".json") else YAML(typ="safe").load(text)
    except (ValueError, YAMLError, RecursionError) as error:
        raise Unreadable(node, f"{name} cannot be read: {type(error).__name__}") from None
    if not isinstance(document, dict):
        raise Unreadable(node, f"{name} is not a mapping")
    return interpolated(document, document, values)


def _text_of(values: Values, node: ast.AST, name: str, folder: Path | None = None) -> str:
    folder = folder or values.script.folder
    if folder is None:
        raise Unreadable(node, f"{name} is not read from here")
    file = folder / name
    try:
        inside = Path(os.path.realpath(file)).is_relative_to(Path.cwd().resolve())
        if not inside or not file.is_file() or file.stat().st_size > LARGEST_FILE:
            raise Unreadable(node, f"{name} is not a file beside the script")
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise Unreadable(node, f"{name} cannot be read: {type(error).__name__}") from None


def interpolated(part: Any, whole: Any, values: Values) -> Any:
    """``part`` with ``${key}`` and ``${oc.env:NAME,default}`` replaced where they are settled."""
    if isinstance(part, dict):
        return {key: interpolated(value, whole, values) for key, value in part.items()}
    if isinstance(part, list):
        return [interpolated(value, whole, values) for value in part]
    match = INTERPOLATION.fullmatch(part.strip()) if isinstance(part, str) else None
    if match is None:
        return part
    kind, _, rest = match[1].partition(":")
    if kind == "oc.env":
        name, comma, default = rest.partition(",")
        values.defaults.add(f"${name}")
        return YAML(typ="safe").load(default) if comma else part
    value: Any = whole
    for key in match[1].split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return part if value is None or isinstance(value, str) else value


def record_of(document: Any) -> Any:
    """A document as a record of records."""
    if isinstance(document, dict):
        return Record("file", {key: record_of(value) for key, value in document.items()})
    return document


def local_import(values: Values, call: ast.Call) -> Any:
    """A name that a module of this repository defines, or the module as a record.

    Raises ``Unreadable`` if any module of the script may set it while it runs.
    """
    if not isinstance(call.func, ast.Name) or call.args:
        return None
    bindings = values.script.bindings_of(call.func)
    if len(bindings) != 1 or not isinstance(bindings[0].node, ast.alias):
        return None
    module = _module(values, values.script, bindings[0].node)
    if module is None:
        return None
    statement = values.script.parents[bindings[0].node]
    name = bindings[0].node.name if isinstance(statement, ast.ImportFrom) else None
    inner = Values(module, values.readers, defaults=values.defaults)
    changed = set().union(
        *(other.stored_attributes.keys() | other.set_attributes for other in _modules(values))
    )
    if name is not None and module.defines(name):
        made = inner.of(ast.Call(func=ast.Name(name, ast.Load()), args=[], keywords=[]))
        if not call.keywords:
            return made
        if not isinstance(made, Record) or any(item.arg is None for item in call.keywords):
            raise Unreadable(call, f"what {name} returns is not settled")
        named = {item.arg: values.attempt(item.value) for item in call.keywords if item.arg}
        return Record(made.kind, made.fields | named)
    if call.keywords:
        return None
    names = [name] if name else [key for scope, key in module.bindings if scope is module.tree]
    fields = {
        key: Unreadable(call.func, f"{key} is set while the script runs")
        if key in changed
        else inner.attempt(ast.Name(key, ast.Load()))
        for key in names
    }
    if name is None:
        return Record("class", fields)
    value = fields[name]
    if isinstance(value, Unreadable):
        raise Unreadable(call.func, f"{value.why}, in the module that {name} comes from")
    return value


def _module(values: Values, script: Script, alias: ast.alias) -> Script | None:
    """The module of this repository that an import names, if there is just one."""
    match script.parents[alias]:
        case ast.ImportFrom(module=str(module), level=level):
            start = [".", *[".."] * (level - 1)] if level else None
        case ast.Import() if alias.asname or "." not in alias.name:
            module, start = alias.name, None
        case _:
            return None
    if script.folder is None:
        return None
    places = ["/".join(start)] if start else PLACES
    texts = []
    for place in places:
        try:
            path = f"{place}/{module.replace('.', '/')}.py"
            texts.append((_text_of(values, alias, path, script.folder), script.folder / path))
        except Unreadable:
            continue
    if len(texts) != 1:
        return None
    try:
        return Script(ast.parse(texts[0][0]), texts[0][1].parent)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _modules(values: Values) -> list[Script]:
    """The script, and the modules of its repository that it imports, at any depth."""
    scripts = [values.script]
    seen: set[str] = set()
    for script in scripts:
        for node in script.nodes:
            if isinstance(node, ast.alias) and (module := _module(values, script, node)):
                key = ast.dump(module.tree)
                if key not in seen and len(seen) < MOST_MODULES:
                    seen.add(key)
                    scripts.append(module)
    return scripts
