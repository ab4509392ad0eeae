"""Read where scripts take their settings from.

A default is what runs unless something overrides it; the report says that it was read.
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from affidavit.importers.names import NAMES, load_facts
from affidavit.importers.scripts.launches import option_name
from affidavit.importers.scripts.syntax import Script, keywords_of, last_name, unpacks
from affidavit.importers.scripts.values import Evaluator, NotSet, Record, Unreadable, source_text
from affidavit.plan import read_inside

PARSER_MAKERS = ("ArgumentParser", "add_argument_group", "add_mutually_exclusive_group")
NAMESPACE_CLASSES, TRAINING_SET_SIZES = load_facts("settings.toml").values()
MAX_FILE = 1 << 20
MAX_VALUES = 100_000
MAX_DEPTH = 50


def read_argparse(values: Evaluator, call: ast.Call) -> Any:
    """Read ``parser.parse_args()``: the defaults of the only parser; raises ``Unreadable``."""
    if getattr(call.func, "attr", "") not in ("parse_args", "parse_known_args"):
        return None
    if call.args or call.keywords:
        raise Unreadable(call, "it parses other arguments than the command line")
    partial = last_name(call.func) == "parse_known_args"
    script = values.script
    _require_plain_parser(values, call)
    declared: dict[str, Any] = {}
    for item, _ in script.method_calls("add_argument"):
        name = option_destination(item)
        if name is None:
            raise Unreadable(item, "an option's name is not a literal")
        twice = Unreadable(item, f"the option {name} is declared twice")
        declared[name] = twice if name in declared else _option_default(values, item, name)
    record = Record("options", declared)
    return [record, Unreadable(call, "unknown")] if partial else record


def _option_default(values: Evaluator, call: ast.Call, name: str) -> Any:
    """Return the default of an ``add_argument``, or why it is not what runs."""
    script = values.script
    positional = [str(arg.value) for arg in call.args if isinstance(arg, ast.Constant)]
    every = script.calls_to("add_argument")
    others = {option_name(str(getattr(arg, "value", ""))) for one in every for arg in one.args}
    short = [key for key in script.launches.settings if len(key) > 1 and name.startswith(key)
             and key not in others]  # fmt: skip
    if (reason := values.launch_override(name, *positional, *short)) is not None:
        return reason
    named = keywords_of(call)
    required = values.known_value(named.get("required")) not in (None, False)
    action = values.known_value(named.get("action"))
    if required or not all(item.startswith("-") for item in positional):
        return NotSet(call, f"{name} must be given on the command line")
    if action in ("store_true", "store_false") and "default" not in named:
        return action == "store_false"
    if "default" not in named or ("type" in named and values.assumed.get(name) in (True, False)):
        return NotSet(call, f"the option {name} has no default")
    value = values.try_evaluate(named["default"])
    kind = named.get("type")
    if not isinstance(value, str) or kind is None or getattr(kind, "id", "") == "str":
        return value
    return Unreadable(call, f"the default of {name} is a text that its type converts")


def _require_plain_parser(values: Evaluator, call: ast.Call) -> None:
    script = values.script
    parsers = script.calls_to("ArgumentParser")
    if len(parsers) != 1 or script.module_path(parsers[0].func) != "argparse.ArgumentParser":
        raise Unreadable(call, "the script does not make exactly one parser, of argparse")
    known = keywords_of(parsers[0]).keys() <= {*NAMES["safe_parser_arguments"]}
    if parsers[0].args or unpacks(parsers[0]) or not known:
        raise Unreadable(parsers[0], "the parser's arguments may change defaults")
    for node in script.nodes:
        outer = script.parents.get(node)
        match node:
            case ast.Attribute(attr="set_defaults") | ast.alias(name="argv"):
                raise Unreadable(node, "an option may be changed while the script runs")
            case ast.Attribute(attr="default" | "dest" | "argv", ctx=ast.Store()):
                raise Unreadable(node, "an option may be changed while the script runs")
            case ast.Attribute(attr="argv") if not isinstance(
                outer, ast.Subscript | ast.Call
            ) or not isinstance(getattr(outer, "ctx", ast.Load()), ast.Load):
                raise Unreadable(node, "sys.argv is changed while the script runs")
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if values.origin_of(receiver) is not parsers[0]:
        raise Unreadable(call, f"{source_text(receiver)} is not always the parser")
    for part in (parts := list[ast.AST](script.calls_to(*PARSER_MAKERS))):
        outer, others = script.parents[part], list[ast.AST]()
        match outer:
            case ast.Return():
                others += values.calls_of(script.scope_of(outer))
            case ast.Assign(targets=[ast.Name(id=name)]) if isinstance(part, ast.Call):
                others += script.reads_of(name)
            case ast.Attribute(attr=name) if name in NAMES["safe_parser_methods"]:
                pass
            case _ if not isinstance(outer, ast.Expr):
                raise Unreadable(outer, "the parser is passed on, and may get other defaults")
        parts += [other for other in others if other not in parts]


def option_destination(call: ast.Call) -> str | None:
    """Return the attribute that an ``add_argument`` sets, or None if it is computed."""
    names = [getattr(arg, "value", None) for arg in call.args]
    if not names or unpacks(call) or not all(isinstance(name, str) for name in names):
        return None
    explicit = keywords_of(call).get("dest")
    if explicit is not None:
        return str(explicit.value) if isinstance(explicit, ast.Constant) else None
    long = next((name for name in names if str(name).startswith("--")), names[0])
    return str(long).lstrip("-").replace("-", "_")


def read_absl_flags(values: Evaluator, call: ast.Call) -> Any:
    """Read absl's ``flags.FLAGS``, of ``DEFINE_...`` calls; raises ``Unreadable``."""
    if not (isinstance(call.func, ast.Name) and call.func.id == "FLAGS" and not call.args):
        return None
    fields: dict[str, Any] = {}
    for item in values.script.calls_to(*NAMES["flags"]):
        name = getattr(next(iter(item.args), None), "value", None)
        if not isinstance(name, str) or name in fields:
            raise Unreadable(item, "a flag's name is not a literal, or is declared twice")
        if len(item.args) > 1:
            fields[name] = values.try_evaluate(item.args[1])
    return Record("options", fields)


def read_absl_flag(values: Evaluator, call: ast.Call) -> Any:
    """Read an absl flag object, whose ``value`` is the flag's default; raises ``Unreadable``."""
    if last_name(call.func) not in NAMES["flags"] or len(call.args) < 2:
        return None
    name = str(values.known_value(call.args[0]))
    script = values.script
    if name in script.stored_attributes or script.calls_to("set_default"):
        raise Unreadable(call, f"the flag {name} may be set while the script runs")
    return Record("flag", {"value": values.use_default(name, values.try_evaluate(call.args[1]))})


def read_instance(values: Evaluator, call: ast.Call) -> Any:
    """Read an instance of a class of this file, or of a well-known class; raises ``Unreadable``."""
    node, name = _class_named(values.script, call.func), last_name(call.func)
    if node is None and name not in NAMESPACE_CLASSES:
        return None
    call = values.with_unpacked_keywords(call)
    if call.args or unpacks(call):
        raise Unreadable(call, "it has arguments without a name")
    fields = NAMESPACE_CLASSES[name] if node is None else _class_fields(values, node)
    passed = {key: values.try_evaluate(value) for key, value in keywords_of(call).items()}
    return Record("class", fields | passed)


def _class_named(script: Script, function: ast.expr) -> ast.ClassDef | None:
    node = getattr(script.binding_of(function), "node", None)
    return node if isinstance(node, ast.ClassDef) else None


def _class_fields(values: Evaluator, node: ast.ClassDef) -> dict[str, Any]:
    """Return the fields of a dataclass or plain class, with their defaults."""
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    plain = all("dataclass" in ast.unparse(item) for item in node.decorator_list)
    if not plain or node.keywords or not methods.isdisjoint(NAMES["unplain"]):
        raise Unreadable(node, f"{node.name} is not a plain class or dataclass")
    fields: dict[str, Any] = {}
    for base in node.bases:
        parent = _class_named(values.script, base)
        if parent is not None:
            fields |= _class_fields(values, parent)
        elif last_name(base) not in ("object", "NamedTuple", "BaseModel", "TrainingArguments"):
            raise Unreadable(base, "its base class is not in this file")
    for item in node.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                fields[name] = _default_of(values, value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                fields[name] = _default_of(values, value)
            case ast.If() | ast.For() | ast.AugAssign() | ast.Try() | ast.With():
                raise Unreadable(item, f"{node.name} computes its fields")
    return fields


def _default_of(values: Evaluator, value: ast.expr) -> Any:
    """Return the default of a field, also if ``field(...)`` states it."""
    if isinstance(value, ast.Call) and last_name(value.func) in ("field", "Field"):
        options = keywords_of(value)
        factory = options.get("default_factory")
        made = value if factory is None else ast.Call(func=factory, args=[], keywords=[])
        value = options.get("default", made)
    return values.try_evaluate(value)


def read_dataset_length(values: Evaluator, call: ast.Call) -> Any:
    """Read ``len(x)`` of a torchvision training set; raises ``Unreadable``."""
    script = values.script
    plain = ast.unparse(call.func) == "len" and not script.resolve("len", script.tree)[1]
    if not plain or len(call.args) != 1:
        return None
    node = call.args[0]
    if isinstance(node, ast.Attribute) and node.attr == "dataset":
        loader = values.origin_of(node.value)
        if isinstance(loader, ast.Call) and last_name(loader.func) == "DataLoader":
            node = next(iter(loader.args), None) or keywords_of(loader).get("dataset", node)
    made = values.origin_of(node)
    if not isinstance(made, ast.Call) or not script.comes_from(made.func, ("torchvision",)):
        raise Unreadable(made or node, f"the length of {source_text(node)} is unknown")
    train = keywords_of(made).get("train")
    size = TRAINING_SET_SIZES.get(last_name(made.func) or "")
    cut = script.stored_attributes.keys() & ("data", "targets", "train_data", "samples", "imgs")
    if size is None or train is None or values.known_value(train) is not True or cut:
        raise Unreadable(made, "it is not a whole training set of a known size")
    return size


def read_settings_file(values: Evaluator, call: ast.Call) -> Any:
    """Read a JSON or YAML file, as by ``json.load(open(...))``; raises ``Unreadable``."""
    text = ast.unparse(call.func)
    if text in ("open", "Path", "pathlib.Path") and call.args:
        return Record("file", {"": values.evaluate(call.args[0])})
    if text not in ("json.load", "json.loads", "yaml.safe_load", "yaml.load", "OmegaConf.load"):
        return None
    source = next(iter(call.args), call)
    while isinstance(source, ast.Call) and last_name(source.func) in ("read", "read_text", "open"):
        own = source.func.value if isinstance(source.func, ast.Attribute) else None
        source = own or next(iter(source.args), call)
    opened = values.evaluate(source) if source is not call else None
    name = str(opened.fields.get("") if isinstance(opened, Record) else opened)
    if values.script.folder is None:
        raise Unreadable(call, f"{name} cannot be read from here")
    try:
        raw = read_inside(values.script.folder / name, Path.cwd(), MAX_FILE)
        if len(raw) > MAX_FILE:
            raise Unreadable(call, f"{name} is longer than {MAX_FILE >> 20} MiB")
        content = raw.decode("utf-8")
        is_json = name.endswith(".json")
        document = json.loads(content) if is_json else YAML(typ="safe").load(content)
        return _as_record(call, document, itertools.count())
    except (OSError, ValueError, RecursionError, YAMLError) as error:
        why = f"{name} beside the script cannot be read: {type(error).__name__}"
        raise Unreadable(call, why) from None


def _as_record(call: ast.Call, document: Any, count: Iterator[int], depth: int = 0) -> Any:
    """Convert a document to nested records, with aliases expanded; raises ``Unreadable``."""
    if depth > MAX_DEPTH or next(count) > MAX_VALUES:
        raise Unreadable(call, "its file is too large, or refers to itself")
    if isinstance(document, list):
        return [_as_record(call, item, count, depth + 1) for item in document]
    if isinstance(document, dict):
        items = {key: _as_record(call, item, count, depth + 1) for key, item in document.items()}
        return Record("file", items)
    return document


READERS = (read_argparse, read_absl_flags, read_absl_flag, read_settings_file, read_dataset_length,
           read_instance)  # fmt: skip
"""All readers, in the order in which they are tried."""
