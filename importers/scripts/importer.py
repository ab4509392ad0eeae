"""Import a plan from a training script of a library in ``libraries``, without running it."""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from affidavit.importers.directives import read_directives, read_harmless_lines
from affidavit.importers.libraries import (
    ACCOUNTING,
    LIBRARIES,
    OPACUS,
    OPACUS_BEFORE_1,
    TRAINING,
    Library,
)
from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import PartialPlan, not_imported
from affidavit.importers.scripts.conditions import exclude_each_other, is_reached
from affidavit.importers.scripts.linking import ScriptLinker, file_path, find_callers
from affidavit.importers.scripts.modules import modules_of
from affidavit.importers.scripts.opacus import OpacusPlanReader
from affidavit.importers.scripts.options import READERS
from affidavit.importers.scripts.plan_reader import ScriptPlanReader
from affidavit.importers.scripts.quantities import attributes_used_of
from affidavit.importers.scripts.syntax import Script, find_import, last_name, parse_script
from affidavit.importers.scripts.values import Evaluator, is_left_out, source_text

MAX_SCRIPT_BYTES = 1 << 18
MAX_RUNNERS = 5
NOISE_SCHEDULERS = frozenset(NAMES["noise_schedulers"])
ENGINES = frozenset(name for entry in TRAINING for name in entry.private.names) | {"PrivacyEngine"}
ARRAY_PACKAGES = ("torch", "tensorflow", "jax", "numpy")
PRIVATE_CALL_NAMES = tuple({name.encode() for entry in LIBRARIES for name in entry.private.names})
MODULE_NAMES = tuple({module.encode() for entry in TRAINING for module in entry.modules})


def read(
    raw: bytes, folder: Path | None = None, *, name: str | None = None, explicit: bool = True
) -> PartialPlan | None:
    """Read the plan fields of the script's only private call; return None if it has none.

    ``folder`` is where imports, settings and launch files are searched, and ``name`` the name of
    the script's file. A script that is not ``explicit`` is only read if it imports a training
    library. Raises ``MalformedPlan`` if the script is not Python, has several private calls, or
    may call another method, or use other arguments or noise than the text shows.
    """
    try:
        return _read(raw, folder, name, explicit=explicit)
    except RecursionError:
        message = "its expressions are nested too deeply."
        raise not_imported("script", message, "Write them as several statements.") from None


def _read(
    raw: bytes, folder: Path | None, name: str | None, *, explicit: bool
) -> PartialPlan | None:
    mentioned = (any(name in raw for name in names) for names in (MODULE_NAMES, PRIVATE_CALL_NAMES))
    if not (any(mentioned) if explicit else all(mentioned)):
        return None
    if len(raw) > MAX_SCRIPT_BYTES:
        message = f"it is longer than {MAX_SCRIPT_BYTES >> 10} KiB."
        raise not_imported("script", message, "Move what it only stores to a file of data.")
    harmless = read_harmless_lines(raw.decode("utf-8", "replace"))
    script = Script(_parsed(raw), folder, name, harmless)
    library = _library_of(script, explicit=explicit)
    if library is None:
        return None
    return _partial(raw, _as_its_caller_runs_it(script, library), library)


def _as_its_caller_runs_it(script: Script, library: Library) -> Script:
    """Link the script with its imports, as the only file of the repository that runs it."""
    named = list(_private_references(script, library))
    line = getattr(named[0], "lineno", 1)
    way, nodes = [script], named
    while len(running := find_callers(way[-1], nodes)) == 1 and len(way) < MAX_RUNNERS:
        ((host, nodes),) = running.items()
        if host in way or host.dynamic is not None:
            break
        way.append(host)
    for host in reversed(way[1:]):
        runs = Script(copy.deepcopy(host.tree), host.folder, host.name, dict(host.harmless))
        linked = ScriptLinker(runs, line, library.modules, [file_path(item) for item in way]).script
        if any(_private_references(linked, library)):
            return linked
    return ScriptLinker(script, line, library.modules).script


def _partial(raw: bytes, script: Script, library: Library) -> PartialPlan:
    calls, others, lines = _private_calls(script, library)
    source = raw.decode("utf-8", "replace")
    reading = OpacusPlanReader if library is OPACUS else ScriptPlanReader
    partials = []
    for call in calls:
        _require_unambiguous(script, library, call)
        one = reading(library, script, call, read_directives(source))
        one.values.alternatives = tuple(
            script.parents[other] for other in others if other is not call
        )
        partials.append(one.partial())
    if any(other.data != partials[0].data for other in partials):
        raise not_imported(
            f"{library.name} script",
            f"one of several private calls runs (lines {lines}), and their arguments differ.",
            'Add "# affidavit: noise_multiplier=..." with the noise used, or write a plan.',
            calls[0].lineno,
        )
    broken = dict.fromkeys(fault for other in partials for fault in other.broken)
    open_uses = dict.fromkeys(use for other in partials for use in other.open_uses)
    return replace(partials[0], broken=tuple(broken), open_uses=tuple(open_uses))


def _parsed(raw: bytes) -> ast.Module:
    try:
        return parse_script(raw)
    except SyntaxError as error:
        message = f"it is not Python ({error.msg})."
        raise not_imported("script", message, "Correct it.", error.lineno or 1) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise not_imported("script", f"it is not Python: {error}.", "Correct it.") from None


def _library_of(script: Script, *, explicit: bool) -> Library | None:
    """Return the only library whose private call runs, or None if there is none."""
    entries = [entry for entry in TRAINING if _is_called(script, entry)]
    if explicit and not entries:
        entries = [entry for entry in ACCOUNTING if _is_called(script, entry)]
    named = [
        node
        for node in _private_references(script, OPACUS)
        if isinstance(script.parents[node], ast.Call)
    ]
    if named and not entries:
        message = f"{source_text(named[0])} is called, but no supported library is imported."
        raise not_imported("script", message, "Write a plan.", named[0].lineno)
    if OPACUS_BEFORE_1 in entries and not script.method_calls("attach"):
        # The class alone, whose method make_private is private.
        entries.remove(OPACUS_BEFORE_1)
    if not entries:
        if explicit:
            _require_nothing_private(script)
        return None
    keys = {entry.key for entry in entries}
    entries = [entry for entry in entries if keys.isdisjoint(entry.yields_to)]
    if len(entries) > 1:
        running = _running_references(
            script, [node for entry in entries for node in _private_references(script, entry)]
        )
        entries = [
            e for e in entries if any(node in running for node in _private_references(script, e))
        ]
    if len(entries) > 1:
        names = " and ".join(entry.name for entry in entries)
        numbers = {
            getattr(node, "lineno", 0) for e in entries for node in _private_references(script, e)
        }
        lines = ", ".join(map(str, sorted(numbers)))
        raise not_imported(
            "script",
            f"it calls {names}, but only one library is supported (lines {lines}).",
            "Put each in its own script, or write a plan for each.",
            max(numbers),
        )
    return entries[0]


def _private_calls(script: Script, library: Library) -> tuple[list[ast.Call], list[ast.Call], str]:
    """Return the private calls of which one runs, all private calls, and the former's lines."""
    every = list(_private_references(script, library))
    named = _running_references(script, every)
    calls, others = (
        [call for node in nodes if (call := _private_call_of(script, library, node)) is not None]
        for nodes in (named, every)
    )
    lines = ", ".join(str(getattr(node, "lineno", "?")) for node in named)
    if not calls or len(named) > len(calls) or not exclude_each_other(script, *calls):
        problem = (
            "has several private calls" if calls else "names a private call but never makes it"
        )
        line = getattr(named[-1], "lineno", None)
        remedy = "Put each in its own script, or write a plan for each."
        raise not_imported(f"{library.name} script", f"it {problem} (lines {lines}).", remedy, line)
    return calls, others, lines


def _running_references(script: Script, named: list[ast.expr]) -> list[ast.expr]:
    """Return the references to private calls that can run.

    A reference is left out if a known condition excludes it, or if nothing in the script mentions
    its function or class while another reference runs.
    """
    values = Evaluator(script, READERS)
    running = [node for node in named if not is_left_out(values, node)] or named
    if script.dynamic is None and script.dynamic_getattr is None:
        running = [node for node in running if is_reached(script, node)] or running
    return running


def _require_nothing_private(script: Script) -> None:
    """Refuse a script that imports a training library without a supported call."""
    for entry in TRAINING:
        if (statement := find_import(script, entry.modules)) is not None:
            known = [name for other in TRAINING if entry.modules[0] in other.modules
                     for name in other.private.names[:2]]  # fmt: skip
            names = " or ".join(known[:3])
            raise not_imported(
                "script",
                f"it imports {entry.modules[0]}, but makes no supported call, such as {names}.",
                "Check the file that makes the call, or write a plan.",
                statement.lineno,
            )


def _is_called(script: Script, library: Library) -> bool:
    return bool(find_import(script, library.modules) and any(_private_references(script, library)))


def _private_references(script: Script, library: Library) -> Iterator[ast.expr]:
    """Yield the references to the private call: by its name, an alias, or as a method."""
    names = set(library.private.names)
    for node in script.nodes:
        if isinstance(node, ast.alias) and node.name in names and node.asname:
            names.add(node.asname)
    if library.makes_classes:
        yield from _generated_classes(script, names)
        return
    for node in script.nodes:
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[base, *_]) if script.comes_from(
                base, library.modules
            ):
                yield node
            case ast.Name() | ast.Attribute() if last_name(node) in names:
                own = library is OPACUS or script.comes_from(node, library.modules)
                module = last_name(script.parents[node]) in names  # of the same name
                if own and not module and node not in script.type_nodes:
                    yield node


def _private_call_of(script: Script, library: Library, node: ast.expr) -> ast.Call | None:
    """Return the call of a reference, or of a class method that takes the same arguments."""
    outer = script.parents[node]
    if isinstance(outer, ast.Attribute) and outer.attr in library.private.makers:
        node, outer = outer, script.parents[outer]
    return outer if isinstance(outer, ast.Call) and outer.func is node else None


def _generated_classes(script: Script, makers: set[str]) -> Iterator[ast.expr]:
    """Yield the references to classes that one of these functions makes."""
    for node in script.nodes:
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
            continue
        bindings = script.bindings_of(node)
        values = [binding.value for binding in bindings]
        if any(isinstance(item, ast.Call) and last_name(item.func) in makers for item in values):
            yield node


def _require_unambiguous(script: Script, library: Library, call: ast.Call) -> None:
    """Refuse a call that may not be the library's, with the arguments that the text shows."""
    kind, name = f"{library.name} script", last_name(call.func)
    if (hidden := _hidden_package(script, library)) is not None:
        message = f"{hidden} beside it is imported in place of the package."
        raise not_imported(kind, message, "Rename it, or write a plan.", call.lineno)
    rebound = [
        binding
        for (_, bound), bindings in script.bindings.items()
        if bound in library.private.names
        for binding in bindings
        if not isinstance(binding.node, ast.alias)
    ]
    method = library is OPACUS
    if (
        (method and not isinstance(call.func, ast.Attribute))
        or rebound
        or (method and any(bound in library.private.names for _, bound in script.bindings))
        or not script.stored_attributes.keys().isdisjoint(
            (*library.private.names, *library.private.makers)
        )
    ):
        message = f"its {name} may not be {library.name}'s."
        line = getattr(rebound[0].node, "lineno", None) if rebound else call.lineno
        raise not_imported(kind, message, "Write a plan.", line)
    replaced = set(NAMES["replaced"]) - set(library.methods)
    for use in () if method else attributes_used_of(script, call):
        if use.attr in replaced or (
            not isinstance(use.ctx, ast.Load) and use.attr not in NAMES["harmless_attributes"]
        ):
            message = f"{source_text(use)} may change what it adds."
            raise not_imported(kind, message, "Write a plan.", use.lineno)
    targets = {last_name(target) for target in getattr(script.parents[call], "targets", ())}
    for other in () if method else script.calls_to(*replaced):
        if any(last_name(arg) in targets for arg in other.args):
            message = f"{source_text(other)} may change what it adds."
            raise not_imported(kind, message, "Write a plan.", other.lineno)
    if method and (maker := _foreign_engine(script, call.func)) is not None:
        message = (
            f"its {name} may not be {library.name}'s: {source_text(maker)} is not from opacus."
        )
        raise not_imported(kind, message, "Write a plan.", maker.lineno)
    for node in script.nodes:
        if (
            change := _noise_change(node) or _library_replacement(script, node, library)
        ) is not None:
            line = getattr(node, "lineno", None)
            raise not_imported(kind, f"{change}.", "Write a plan with the lowest noise.", line)
    beside = [
        *modules_of(Evaluator(script, READERS), library.modules),
        *find_callers(script, [call.func]),
    ]
    for module in beside:
        if (
            module is not script
            and module.dynamic is not None
            and find_import(module, library.modules)
        ):
            line = getattr(module.dynamic, "lineno", "?")
            message = f"line {line} of {module.name} may replace a part of the library."
            raise not_imported(kind, message, "Write a plan.", call.lineno)
        for node in _nodes_that_may_change(module) if module is not script else ():
            if (change := _change_in_module(module, node, library)) is not None:
                message = f"{change}, on line {getattr(node, 'lineno', '?')} of {module.name}."
                remedy = "Write a plan with the lowest noise."
                raise not_imported(kind, message, remedy, call.lineno)


def _hidden_package(script: Script, library: Library) -> str | None:
    """Return the file or folder that Python imports in place of the library, if there is one.

    It is beside the script, or in a folder that the script puts before all others.
    """
    if script.folder is None:
        return None
    places = [script.folder]
    for call, base in script.method_calls("insert"):
        if script.module_path(base) == "sys.path" and len(call.args) == 2:
            text = getattr(call.args[1], "value", None)
            if isinstance(text, str) and not text.startswith("/") and ".." not in text:
                places.append(script.folder / text)
    for package in (*library.modules, *ARRAY_PACKAGES):
        for place in places:
            if os.path.isfile(place / f"{package}.py"):
                return f"{package}.py"
            if os.path.isfile(place / package / "__init__.py"):
                return f"{package}/"
    return None


def _foreign_engine(script: Script, method: ast.expr) -> ast.Call | None:
    """Return what makes the engine of a private call, if it is not Opacus' own class."""
    engine = method.value if isinstance(method, ast.Attribute) else None
    made: list[ast.AST | None] = [engine]
    if isinstance(engine, ast.Name):
        bindings = script.bindings_of(engine)
        made = [binding.value for binding in bindings]
    elif isinstance(engine, ast.Attribute):
        stores = script.stored_attributes.get(engine.attr, [])
        made = [getattr(script.parents[store], "value", None) for store in stores]
    calls = (node for node in made if isinstance(node, ast.Call))
    return next((call for call in calls if not _creates_engine(script, call)), None)


def _creates_engine(script: Script, call: ast.Call) -> bool:
    """Whether a call creates Opacus' engine, directly or by a function of this file."""
    if script.comes_from(call.func, OPACUS.modules):
        return True
    function = script.function_of(call.func)
    if function is None or function.decorator_list:
        return False
    returned = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)
    ]
    return bool(returned) and all(
        isinstance(value, ast.Call) and script.comes_from(value.func, OPACUS.modules)
        for value in returned
    )


def _noise_change(node: ast.AST) -> str | None:
    """Describe how a statement may change the noise of the private call, if it may."""
    match node:
        case ast.Attribute(attr=attribute, ctx=ast.Store() | ast.Del()) if _is_noise_attribute(
            attribute
        ) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            return f"{attribute} is set elsewhere"
        case (
            ast.Attribute(attr=used)
            | ast.alias(name=used)
            | ast.Constant(value=used)
            | ast.Name(id=used)
        ) if used in NOISE_SCHEDULERS:
            return f"{used} changes the noise during training"
        case ast.Attribute(attr="__setattr__" | "__delattr__"):
            return f"{source_text(node)} may set the noise"
        case (
            ast.Subscript(value=base, ctx=ast.Store() | ast.Del())
            | ast.Call(func=ast.Attribute(value=base, attr="update" | "pop" | "__setitem__"))
            | ast.Assign(value=base)
        ) if _is_namespace(base):
            return f"{source_text(node)} may set the noise"
        case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=str(name)), *_]) if (
            _is_noise_attribute(name)
        ):
            return "setattr sets noise_multiplier"
    return None


@lru_cache(maxsize=256)
def _nodes_that_may_change(module: Script) -> list[ast.AST]:
    """Return the nodes of a module that ``_change_in_module`` may describe."""
    return [
        node
        for node in module.nodes
        if (isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load))
        or (getattr(node, "name", None) or last_name(node)) in NOISE_SCHEDULERS
    ]


def _change_in_module(module: Script, node: ast.AST, library: Library) -> str | None:
    """Describe how an imported module may change the noise or the library, if it may."""
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        if node.attr.strip("_") != "noise" and (change := _noise_change(node)) is not None:
            return change
        return _library_replacement(module, node, library)
    named = getattr(node, "name", None) or last_name(node)
    return _noise_change(node) if named in NOISE_SCHEDULERS else None


def _is_namespace(node: ast.expr) -> bool:
    """Whether an expression is the attribute dictionary of an object."""
    match node:
        case ast.Call(func=ast.Name(id="vars"), args=[_]) | ast.Attribute(attr="__dict__"):
            return True
    return False


def _library_replacement(script: Script, node: ast.AST, library: Library) -> str | None:
    """Describe how a statement may replace a part of the library, if it may."""
    match node:
        case ast.Attribute(attr=part, ctx=ast.Store() | ast.Del()):
            constant = isinstance(getattr(script.parents[node], "value", None), ast.Constant)
            foundation = (
                not constant
                and script.comes_from(node.value, ARRAY_PACKAGES)
                and not script.module_path(node.value).startswith("torch.backends.")
            )
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            of_it = script.comes_from(node.value, library.modules)
            if (part in NAMES["private_parts"] and not own) or foundation or of_it:
                return f"{source_text(node)} is replaced"
        case ast.Call(func=ast.Name(id="setattr"), args=[base, *_]) if script.comes_from(
            base, library.modules
        ):
            return "setattr replaces a part of the library"
        case ast.Name(id="patch" | "monkeypatch") | ast.Attribute(attr="patch"):
            return f"{source_text(node)} may replace a part of the library"
        case ast.ClassDef(bases=bases) if any(
            last_name(base) in ENGINES and script.comes_from(base, library.modules)
            for base in bases
        ):
            return f"{node.name} may change what it adds"
    return None


def _is_noise_attribute(attribute: str) -> bool:
    """Whether an attribute is a library's noise: ``_noise_multiplier``, fastDP's ``noise``."""
    return attribute.strip("_") in ("noise_multiplier", "noise")
