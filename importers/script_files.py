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
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from affidavit.importers.names import NAMES
from affidavit.importers.script_aliases import escape_of, holders_of
from affidavit.importers.script_ast import (
    Definition,
    Script,
    keywords_of,
    last_name,
    package_of,
    parsed,
    unpacks,
)
from affidavit.importers.script_launches import PLACES, yaml_of
from affidavit.importers.script_values import Record, Unreadable, Values, default_of

MAX_FILE = 1 << 20
MAX_VALUES = 100_000
DEEPEST = 50
MAX_MODULES = 100
GIN_PARSERS = NAMES["gin_parsers"]
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


def configured(values: Values, function: ast.FunctionDef | ast.ClassDef, name: str) -> Any:
    """A parameter that Hydra or gin gives to a decorated function."""
    decorators = {ast.unparse(getattr(item, "func", item)) for item in function.decorator_list}
    if decorators & {"gin.configurable", "gin.register"}:
        return gin_binding(values, function, name)
    return hydra(values, function)


def gin_binding(values: Values, function: ast.FunctionDef | ast.ClassDef, name: str) -> Any:
    """``function.name = value`` of the gin files that the script parses, else its own default.

    Raises ``Unreadable``.
    """
    parsers = values.script.called(*GIN_PARSERS)
    passes_it = any(
        call.args or any(item.arg in (None, name) for item in call.keywords)
        for call in values.calls_of(function)
    )
    if passes_it:
        raise Unreadable(function, f"a call of {function.name} gives it arguments of its own")
    if len(parsers) != 1 or last_name(parsers[0].func) not in GIN_PARSERS[:2]:
        raise Unreadable(function, "not one gin file is parsed by its name")
    bindings: dict[str, str] = {}
    macros: dict[str, str] = {}
    for line in _gin_lines_parsed(values, parsers[0]):
        if (match := GIN.match(line)) and match[2] == function.name:
            if match[1] and "/" in match[1]:
                raise Unreadable(parsers[0], f"a file binds {name} in a scope alone")
            bindings[match[3]] = match[4]
        elif match := MACRO.match(line):
            macros[match[1]] = match[2]
    text = bindings.get(name)
    if text is not None and text.startswith("%"):
        text = macros.get(text[1:], text)
    if text is None:
        inits = (item for item in function.body if getattr(item, "name", "") == "__init__")
        own = next(inits, None) if isinstance(function, ast.ClassDef) else function
        default = None if own is None else default_of(own, name)
        return None if default is None else values.of(default)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise Unreadable(function, f"a file binds {name} to {text}, which is not a value") from None


def _gin_lines_parsed(values: Values, call: ast.Call) -> Iterator[str]:
    """The lines that a call parses: those of its files, and the bindings that it is passed."""
    names = ("config_files", "bindings")
    arguments = dict(zip(names, call.args, strict=False)) | keywords_of(call)
    files, bindings = (values.of(arguments[key]) if key in arguments else None for key in names)
    for file in files if isinstance(files, list) else [files]:
        if file is not None:
            yield from _gin_lines(values, call, str(file))
    yield from (str(line) for line in bindings or ())


def _gin_lines(values: Values, node: ast.AST, file: str, depth: int = 0) -> Iterator[str]:
    """The lines of a gin file and of those that it includes, in the order of their bindings."""
    for line in _text_of(values, node, file).splitlines():
        if match := INCLUDE.match(line):
            if depth > 10:
                raise Unreadable(node, f"{file} includes too many files")
            yield from _gin_lines(values, node, match[2], depth + 1)
        elif line.startswith("include"):
            raise Unreadable(node, f"{file} includes what is not read")
        elif line.startswith("import"):
            _require_no_bindings(values, node, line.split()[-1])
        else:
            yield line


def _require_no_bindings(values: Values, node: ast.AST, module: str) -> None:
    """Refuse a module that a gin file imports, unless its text is here and binds nothing."""
    texts = []
    for place in PLACES:
        try:
            texts.append(_text_of(values, node, f"{place}/{module.replace('.', '/')}.py"))
        except Unreadable:
            continue
    if not texts or any(name in text for text in texts for name in (*GIN_PARSERS, "gin.constant")):
        raise Unreadable(node, f"the module {module}, which gin imports, may bind more")


def run_config(values: Values, call: ast.Call) -> Any:
    """Flower's ``context.run_config``: ``[tool.flwr.app.config]`` of the nearest pyproject.toml."""
    if not (isinstance(call.func, ast.Name) and call.func.id == "run_config" and not call.args):
        return None
    for place in PLACES:
        try:
            text = _text_of(values, call, f"{place}/pyproject.toml")
            config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
        except (Unreadable, KeyError, TypeError, ValueError, RecursionError):
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


def hydra(values: Values, function: ast.FunctionDef | ast.ClassDef) -> Any:
    """The configuration that ``@hydra.main`` passes to a function.

    Raises ``Unreadable``.
    """
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "hydra.main":
            arguments = {key: values.of(node) for key, node in keywords_of(decorator).items()}
            folder = arguments.get("config_path") or "."
            return _hydra_config(values, decorator, folder, str(arguments.get("config_name")))
    return None


def composed(values: Values, call: ast.Call) -> Any:
    """Hydra's ``compose(config_name=..., overrides=[...])`` below one ``initialize``.

    Raises ``Unreadable``.
    """
    if last_name(call.func) != "compose" or not values.script.is_of(call.func, ("hydra",)):
        return None
    starts = values.script.called("initialize")
    if len(starts) != 1 or len(call.args) > 1:
        raise Unreadable(call, "not one initialize() says where its configurations are")
    start, arguments = (
        {key: values.of(value) for key, value in keywords_of(node).items()}
        for node in (starts[0], call)
    )
    name = values.of(call.args[0]) if call.args else arguments.get("config_name")
    config = _hydra_config(values, call, start.get("config_path") or ".", str(name))
    for override in arguments.get("overrides") or ():
        key, equals, text = str(override).partition("=")
        try:
            settled = bool(equals) and _set_field(config, key.lstrip("+"), yaml_of(text))
        except ValueError:
            settled = False
        if not settled:
            raise Unreadable(call, f"the override {override} is not read")
    return config


def _set_field(config: Any, key: str, value: Any) -> bool:
    """Set a field by its dotted ``key``, unless that is a table or in none."""
    *path, last = key.split(".")
    for step in path:
        config = config.fields.get(step) if isinstance(config, Record) else None
    if not isinstance(config, Record) or isinstance(config.fields.get(last), Record):
        return False
    config.fields[last] = value
    return True


def _hydra_config(values: Values, node: ast.Call, folder: str, name: str) -> Any:
    if (stored := _stored(values, name)) is not None:
        return as_launched(values, stored, "hydra")
    file = f"{folder}/{name}" if name.endswith((".yaml", ".yml")) else f"{folder}/{name}.yaml"
    document = read_settings(values, node, file)
    for group in document.pop("defaults", []):
        if isinstance(group, dict):
            for key, choice in group.items():
                if key.removeprefix("override ").startswith("hydra/"):
                    continue  # what Hydra itself does
                other = f"{folder}/{key}/{choice}.yaml"
                inner = read_settings(values, node, other)
                moved = "@package" in _text_of(values, node, other)
                if moved or "defaults" in inner or key in document:
                    raise Unreadable(node, f"{other} and {file} may set the same")
                document[key] = inner
        elif group != "_self_":
            raise Unreadable(node, f"the configuration {group} is not read")
    main = values.main or values.script
    for key, told in main.launches.items():
        for text, where in told if key not in document else ():
            groups = [f"{folder}/{key}/{choice}.yaml" for choice in text.split(",")]
            own = any(((main.folder or Path()) / group).is_file() for group in groups)
            if own or (key in NAMES["config_options"] and text != name):
                raise Unreadable(node, f"{where} sets {key} to {text}")
    config = record_of(document)
    swept = config.fields.get("hydra")
    for key in ("sweeper", "params"):
        swept = swept.fields.get(key) if isinstance(swept, Record) else None
    for key in swept.fields if isinstance(swept, Record) else ():
        _set_field(config, key, Unreadable(node, f"{file} sweeps {key}"))
    return as_launched(values, config, "hydra")


def as_launched(values: Values, record: Record, kind: str, path: str = "") -> Record:
    """A configuration as a record of this kind, without what shell scripts give other values."""
    fields = {}
    for key, value in record.fields.items():
        own: Record | Unreadable | None = values.overridden(value, f"{path}{key}")
        if own is None and isinstance(value, Record):
            own = as_launched(values, value, kind, f"{path}{key}.")
        fields[key] = value if own is None else own
    return Record(kind, fields, record.stores)


def _stored(values: Values, name: str) -> Any:
    """The structured config of this name in Hydra's ``ConfigStore``, if it is the only one."""
    stores = values.script.called("store")
    named = [keywords_of(call) for call in stores]
    if not any(values.known(item.get("name")) == name for item in named):
        return None
    if len(named) != 1 or named[0].keys() != {"name", "node"} or unpacks(stores[0]):
        raise Unreadable(stores[0], "several structured configs may make up one")
    node = named[0]["node"]
    return values.of(node if isinstance(node, ast.Call) else ast.Call(node, [], []))


def read_settings(values: Values, node: ast.AST, name: str) -> Any:
    """A JSON or YAML file beside the script; raises ``Unreadable``."""
    text = _text_of(values, node, name)
    try:
        document = json.loads(text) if name.endswith(".json") else yaml_of(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(node, f"{name} cannot be read: {type(error).__name__}") from None
    if not isinstance(document, dict):
        raise Unreadable(node, f"{name} is not a mapping")
    if not _is_small(document):
        raise Unreadable(node, f"{name} is too large, or refers to itself")
    return interpolated(document, document, values)


def _is_small(document: Any) -> bool:
    """Whether a document stays small and flat where each alias is written out."""
    count, parts = 0, [(document, 0)]
    while parts:
        part, depth = parts.pop()
        count += 1
        if count > MAX_VALUES or depth > DEEPEST:
            return False
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        parts += [(item, depth + 1) for item in inner]
    return True


def _text_of(values: Values, node: ast.AST, name: str, folder: Path | None = None) -> str:
    folder = folder or (values.main or values.script).folder
    if folder is None:
        raise Unreadable(node, f"{name} cannot be read from here")
    file = folder / name
    try:
        readable = os.path.isfile(file) and file.stat().st_size <= MAX_FILE
        if not readable or not Path(os.path.realpath(file)).is_relative_to(Path.cwd().resolve()):
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
        try:
            value = yaml_of(default) if comma else part
        except ValueError:
            return part
        if values.overridden(value, f"${name}") is not None:
            return part
        values.defaults.add(f"${name}")
        return value
    value = whole
    for key in match[1].split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return part if value is None or isinstance(value, str) else value


def record_of(document: Any) -> Any:
    """A document as a record of records."""
    if isinstance(document, dict):
        return Record("file", {key: record_of(value) for key, value in document.items()})
    return document


def module_of(values: Values, function: ast.expr) -> tuple[Values, str] | None:
    """The module of this repository that defines what is named, and its name there."""
    name = function.attr if isinstance(function, ast.Attribute) else None
    base = function.value if isinstance(function, ast.Attribute) else function
    alias = getattr(values.script.binding_of(base), "node", None)
    if not isinstance(alias, ast.alias):
        return None
    whole = _module(values, values.script, alias)
    if whole is None:
        return None
    module, is_whole = whole
    if is_whole == (name is None):
        return None
    return _inside(values, module), name or alias.name


def definition_of(values: Values, node: ast.expr) -> tuple[Values, Definition] | None:
    """The function or class of another file of the repository, with the values of its module."""
    origin = module_of(values, node)
    for _ in range(20):
        if origin is None:
            return None
        inner, name = origin
        bound = inner.script.bindings.get((inner.script.tree, name), [])
        made = bound[0].node if len(bound) == 1 else None
        if not isinstance(made, ast.alias):
            return (inner, made) if isinstance(made, ast.FunctionDef | ast.ClassDef) else None
        origin = module_of(inner, ast.Name(name, ast.Load()))
    return None


def _inside(values: Values, module: Script) -> Values:
    """The values of a module of the script."""
    main = values.main or values.script
    return Values(
        module,
        values.readers,
        values.defaults,
        main=main,
        definition=values.definition,
        _depth=values._depth,
    )


def local_import(values: Values, call: ast.Call) -> Any:
    """What a module of this repository defines: a value, an instance, a result, or all of it.

    Raises ``Unreadable`` if any module of the script may set it while it runs.
    """
    if (origin := module_of(values, call.func)) is None:
        return _whole_module(values, call)
    inner, name = origin
    module = inner.script
    bound = module.bindings.get((module.tree, name), [])
    if any(isinstance(item, ast.Starred) for item in call.args):
        raise Unreadable(call, "its arguments are not all named")
    passed = ast.Call(  # with values, as its arguments belong to another file
        ast.Name(name, ast.Load()),
        [ast.Constant(values.attempt(item)) for item in call.args],
        [ast.keyword(item.arg, ast.Constant(values.attempt(item.value))) for item in call.keywords],
    )
    if len(bound) == 1 and isinstance(bound[0].node, ast.alias):
        return local_import(inner, passed)  # what another module defines
    changed = _changed(values, name)
    if module.defines(name):
        made = inner.of(passed)
        if not isinstance(made, Record):
            return made
        returned = inner.returned(passed)
        where = escape_of(module, holders_of(returned), methods=made.kind != "class")
        if where is not None:
            raise Unreadable(call, f"the module of {name} may change what it returns")
        fields = {
            key: Unreadable(call, f"{key} is set while the script runs")
            if changed.get(key, set()) - made.stores
            else value
            for key, value in made.fields.items()
        }
        return Record(made.kind, fields)
    if call.args or call.keywords:
        return None
    if name in changed:
        raise Unreadable(call.func, f"{name} is set while the script runs")
    value = inner.attempt(ast.Name(name, ast.Load()))
    if isinstance(value, Unreadable):
        raise Unreadable(call.func, f"{value.why}, in the module that {name} comes from")
    return value


def _whole_module(values: Values, call: ast.Call) -> Any:
    """A module of this repository that is imported whole, as a record of what it defines."""
    alias = getattr(values.script.binding_of(call.func), "node", None)
    origin = _module(values, values.script, alias) if isinstance(alias, ast.alias) else None
    if origin is None or not origin[1] or call.args or call.keywords:
        return None
    module, changed = origin[0], _changed(values)
    inner = _inside(values, module)
    names = [key for scope, key in module.bindings if scope is module.tree]
    return Record("class", {
        key: Unreadable(call.func, f"{key} is set while the script runs")
        if key in changed
        else inner.attempt(ast.Name(key, ast.Load()))
        for key in names
    })  # fmt: skip


def _changed(values: Values, owner: str | None = None) -> dict[str, set[ast.AST]]:
    """The attributes that any module of the script sets, and where.

    Those that objects set of themselves count for the class ``owner`` alone.
    """
    changed: dict[str, set[ast.AST]] = {}
    for script in modules_of(values):
        for name, stores in script.stored_attributes.items():
            for store in stores:
                own = isinstance(store.value, ast.Name) and store.value.id == "self"
                classes = [c.name for c in script.above(store) if isinstance(c, ast.ClassDef)]
                if not own or owner in classes:
                    changed.setdefault(name, set()).add(store)
    return changed


def _module(values: Values, script: Script, alias: ast.alias) -> tuple[Script, bool] | None:
    """The module of this repository that an import is from, and whether it binds it whole."""
    known = (values.main or values.script).modules
    if (script, alias) not in known:
        known[script, alias] = _imported(values, script, alias)
    return known[script, alias]


def _imported(values: Values, script: Script, alias: ast.alias) -> tuple[Script, bool] | None:
    match script.parents[alias]:
        case ast.ImportFrom(module=module, level=level):
            start = [".", *[".."] * (level - 1)] if level else None
            inner = _file(values, script, alias, start, f"{module or '.'}/{alias.name}")
            if inner is not None:
                return inner, True
            own = None if module is None else _file(values, script, alias, start, module)
            return None if own is None else (own, False)
        case ast.Import() if alias.asname or "." not in alias.name:
            whole = _file(values, script, alias, None, alias.name)
            return None if whole is None else (whole, True)
    return None


def _file(
    values: Values, script: Script, node: ast.AST, start: list[str] | None, module: str
) -> Script | None:
    """The parsed file of a module, if there is just one."""
    if script.folder is None:
        return None
    path = module.replace(".", "/") if module[0] != "." else module
    files = []
    for place in ["/".join(start)] if start else PLACES:
        for file in (f"{place}/{path}.py", f"{place}/{path}/__init__.py"):
            try:
                text = _text_of(values, node, file, script.folder)
            except Unreadable:
                continue
            files.append((text, script.folder / file))
    return parsed_file(*files[0]) if len(files) == 1 else None


@lru_cache(maxsize=256)
def parsed_file(text: str, file: Path) -> Script | None:
    """The script of a file; None if its text is not Python."""
    try:
        return Script(parsed(text), file.parent, file.name.lower())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def modules_of(values: Values, beside: Collection[str] = ()) -> list[Script]:
    """The script, and the modules of its repository that it imports, at any depth.

    Packages ``beside`` are not followed, which may be a library's own.
    """
    scripts = [values.script]
    for script in scripts:
        for node in script.nodes:
            if not isinstance(node, ast.alias) or _package(script, node) in beside:
                continue
            origin = _module(values, script, node)
            if origin is not None and origin[0] not in scripts and len(scripts) < MAX_MODULES:
                scripts.append(origin[0])
    return scripts


def _package(script: Script, alias: ast.alias) -> str:
    return package_of(getattr(script.parents[alias], "module", None) or alias.name)
