"""Import a plan from a training script of a library in ``libraries``, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from affidavit.importers import libraries
from affidavit.importers.directives import read_directives, read_harmless_lines
from affidavit.importers.libraries import LIBRARIES, OPACUS, TRAINING, Library
from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import OpenUse, PartialPlan, not_imported
from affidavit.importers.scripts.conditions import exclude_each_other, is_reached
from affidavit.importers.scripts.opacus import OpacusPlanReader
from affidavit.importers.scripts.options import READERS
from affidavit.importers.scripts.plan_reader import ScriptPlanReader
from affidavit.importers.scripts.repository import (
    file_of_package,
    find_caller,
    leading_definitions,
    modules_of,
    one_walk,
)
from affidavit.importers.scripts.syntax import Script, find_import, last_name, parse_script
from affidavit.importers.scripts.values import Evaluator, is_left_out, source_text
from affidavit.plan import MalformedPlan, Reason

MAX_SCRIPT_BYTES = 1 << 18
ARRAY_PACKAGES = ("torch", "tensorflow", "jax", "numpy")
PRIVATE_CALL_NAMES = tuple({name.encode() for entry in LIBRARIES for name in entry.private.names})
MODULE_NAMES = tuple({module.encode() for entry in TRAINING for module in entry.modules})


def read(
    raw: bytes, folder: Path | None = None, *, name: str | None = None, explicit: bool = True
) -> PartialPlan | None:
    """Read the plan fields of the script's private call; return None if it has none.

    Imports and launch files are searched in ``folder``. A script that is not ``explicit`` must
    import a training library. Raises ``MalformedPlan`` if other noise may be used than is shown.
    """
    try:
        with one_walk():
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
    plans = _plans(raw, script, library)
    if len(plans) == 1:
        return plans[0]
    first, *others = (replace(plan, pointer=f"/{index}") for index, plan in enumerate(plans))
    return replace(first, others=tuple(others))


def _plans(raw: bytes, script: Script, library: Library) -> list[PartialPlan]:
    """Read the plans of all private calls; raises ``MalformedPlan`` with what is wrong in each."""
    groups, every = _private_calls(script, library)
    source = raw.decode("utf-8", "replace")
    plans: list[PartialPlan] = []
    reasons: list[Reason] = []
    for group in groups:
        rest = [call for other in groups if other is not group for call in other]
        elsewhere = {line for call in rest for line in _lines_about(script, call, source)}
        stated = read_directives(source, frozenset(elsewhere))
        others = [call for call in every if call not in rest]
        try:
            own = [_plan_of(script, library, call, others, rest, stated) for call in group]
        except MalformedPlan as error:
            reasons += error.reasons
            continue
        if all(one.data == own[0].data for one in own):
            broken = dict.fromkeys(fault for one in own for fault in one.broken)
            uses = dict.fromkeys(use for one in own for use in one.open_uses)
            own = [replace(own[0], broken=tuple(broken), open_uses=tuple(uses))]
        plans += own
    if reasons:
        raise MalformedPlan(*dict.fromkeys(reasons))
    return plans


def _plan_of(
    script: Script, library: Library, call: ast.Call, others: list[ast.Call],
    elsewhere: list[ast.Call], stated: dict[str, Any],
) -> PartialPlan:  # fmt: skip
    """Read the plan of a call; others run instead of it, or ``elsewhere``. Raises as ``_plans``."""
    large = _require_unambiguous(script, library, call)
    whys = [f"it imports {file}, which is too large to be read" for file in large]
    leading = leading_definitions(script, call)
    if (file := find_caller(script, {getattr(item, "name", "") for item in leading})) is not None:
        script.shared_definitions |= set(leading)
        whys.append(f"{file} may run it, and what it does with the result is not read")
    at, answered = f"line {call.lineno}: {source_text(call.func)}", call.lineno in script.harmless
    callers = [OpenUse(line=call.lineno, message=f"{at}: {why}.") for why in whys if not answered]
    reading = OpacusPlanReader if library is OPACUS else ScriptPlanReader
    one = reading(library, script, call, stated)
    one.values.alternatives = tuple(script.parents[other] for other in others if other is not call)
    one.values.elsewhere = tuple(elsewhere)
    partial = one.partial()
    uses = dict.fromkeys((*callers, *partial.open_uses))
    return replace(partial, open_uses=tuple(uses))


def _lines_about(script: Script, call: ast.Call, source: str) -> Iterator[int]:
    """Yield the lines of a private call's statement, and of the comments right above it."""
    statement = next(o for o in script.ancestors(call) if isinstance(o, ast.stmt))
    lines = source.splitlines()
    first = statement.lineno
    while first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    yield from range(first, (statement.end_lineno or statement.lineno) + 1)


def _parsed(raw: bytes) -> ast.Module:
    try:
        return parse_script(raw)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = f"it is not Python ({getattr(error, 'msg', error)})."
        line = getattr(error, "lineno", None)
        raise not_imported("script", message, "Correct it.", line or 1) from None


def _library_of(script: Script, *, explicit: bool) -> Library | None:
    """Return the only library whose private call runs, or None if there is none."""
    entries = [entry for entry in TRAINING if _is_called(script, entry)]
    if explicit and not entries:
        entries = [entry for entry in libraries.ACCOUNTING if _is_called(script, entry)]
    if libraries.OPACUS_BEFORE_1 in entries and not script.method_calls("attach"):
        # The class alone, whose method make_private is private.
        entries.remove(libraries.OPACUS_BEFORE_1)
    if not entries:
        for node in _private_references(script, OPACUS):
            if isinstance(script.parents[node], ast.Call):
                message = f"{source_text(node)} is called, but no supported library is imported."
                raise not_imported("script", message, "Write a plan.", node.lineno)
        for entry in TRAINING if explicit else ():
            if (statement := find_import(script, entry.modules)) is not None:
                calls = " or ".join(entry.private.names[:3])
                message = f"it imports {entry.modules[0]}, but makes no supported call ({calls})."
                remedy = "Check the file that makes the call, or write a plan."
                raise not_imported("script", message, remedy, statement.lineno)
        return None
    keys = {entry.key for entry in entries}
    entries = [entry for entry in entries if keys.isdisjoint(entry.yields_to)]
    if len(entries) > 1:
        every = [node for entry in entries for node in _private_references(script, entry)]
        running = set(_running_references(script, every))
        entries = [one for one in entries if running & {*_private_references(script, one)}]
    if len(entries) > 1:
        names = " and ".join(entry.name for entry in entries)
        message = f"it calls {names}, but only one library is supported."
        remedy = "Put each in its own script, or write a plan for each."
        raise not_imported("script", message, remedy)
    return entries[0]


def _private_calls(script: Script, library: Library) -> tuple[list[list[ast.Call]], list[ast.Call]]:
    """Return the private calls that run, in groups of which one runs, and all private calls."""
    every = list(_private_references(script, library))
    named = _running_references(script, every)
    calls, others = ([call for node in nodes if (call := _private_call_of(
        script, library, node)) is not None] for nodes in (named, every))  # fmt: skip
    if not calls or len(named) > len(calls):
        lines = ", ".join(str(node.lineno) for node in named)
        problem = "in several places" if calls else "but never makes it"
        message = f"it names a private call {problem} (lines {lines})."
        remedy = "Call it where it is named, or write a plan for each."
        raise not_imported(f"{library.name} script", message, remedy, named[-1].lineno)
    groups: list[list[ast.Call]] = []
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        alternatives = (group for group in groups if exclude_each_other(script, call, *group))
        group = next(alternatives, None)
        groups.append([call]) if group is None else group.append(call)
    return groups, others


def _running_references(script: Script, named: list[ast.expr]) -> list[ast.expr]:
    """Return the references to private calls that can run: no known condition excludes them."""
    values = Evaluator(script, READERS)
    running = [node for node in named if not is_left_out(values, node)] or named
    if not script.dynamic:
        running = [node for node in running if is_reached(script, node)] or running
    return running


def _is_called(script: Script, library: Library) -> bool:
    return bool(find_import(script, library.modules) and any(_private_references(script, library)))


def _private_references(script: Script, library: Library) -> Iterator[ast.expr]:
    """Yield the references to the private call: by its name, an alias, or as a method."""
    names = set(library.private.names)
    for node in script.nodes:
        if isinstance(node, ast.alias) and node.name in names and node.asname:
            names.add(node.asname)
    for node in script.nodes:
        match node:
            case ast.Name(ctx=ast.Load()) if library.makes_classes:
                made = (item.value for item in script.bindings_of(node))
                if any(isinstance(m, ast.Call) and last_name(m.func) in names for m in made):
                    yield node
            case ast.Call(func=ast.Name(id="getattr"), args=[base, *_]) if script.comes_from(
                base, library.modules
            ):
                yield node
            case ast.Name() | ast.Attribute() if (
                last_name(node) in names and not library.makes_classes
            ):
                own = library is OPACUS or script.comes_from(node, library.modules)
                module = last_name(script.parents[node]) in names  # of the same name
                module |= library is OPACUS and script.function_of(node) is not None
                if own and not module and node not in script.type_nodes:
                    yield node


def _private_call_of(script: Script, library: Library, node: ast.expr) -> ast.Call | None:
    """Return the call of a reference, or of a class method that takes the same arguments."""
    outer = script.parents[node]
    if isinstance(outer, ast.Attribute) and outer.attr in library.private.makers:
        node, outer = outer, script.parents[outer]
    return outer if isinstance(outer, ast.Call) and outer.func is node else None


def _require_unambiguous(script: Script, library: Library, call: ast.Call) -> list[str]:
    """Refuse a call that may not be the library's; return files that are too large to be read."""
    kind, name = f"{library.name} script", last_name(call.func)
    files = (file_of_package(script, name) for name in (*library.modules, *ARRAY_PACKAGES))
    if (hidden := next(filter(None, files), None)) is not None:
        message = f"{hidden} beside it is imported in place of the package."
        raise not_imported(kind, message, "Rename it, or write a plan.", call.lineno)
    method = library is OPACUS
    rebound = [
        binding for (scope, bound), bindings in script.bindings.items() for binding in bindings
        if bound in library.private.names
        and (isinstance(scope, ast.ClassDef) if method else not isinstance(binding.node, ast.alias))
    ]  # fmt: skip
    stored = script.stored_attributes.keys() & {*library.private.names, *library.private.makers}
    if rebound or stored or (method and not isinstance(call.func, ast.Attribute)):
        message = f"its {name} may not be {library.name}'s."
        line = getattr(rebound[0].node, "lineno", None) if rebound else call.lineno
        raise not_imported(kind, message, "Write a plan.", line)
    if script.dynamic and not library.trains:
        message = f"{source_text(script.dynamic[0])} may change what it is told."
        line = getattr(script.dynamic[0], "lineno", None)
        raise not_imported(kind, message, "Write a plan.", line)
    modules, large = modules_of(script, library.modules)
    for module in [script, *modules]:
        if (change := _change_by(module, script, library)) is not None:
            where = "" if module is script else f" of {module.name}"
            at = getattr(change, "lineno", call.lineno)
            message = f"line {at}{where}: {source_text(change)} may change the noise."
            line = at if module is script else call.lineno
            raise not_imported(kind, message, "Write a plan with the lowest noise.", line)
    return large


def _change_by(module: Script, script: Script, library: Library) -> ast.AST | None:
    """Find what may change the noise of any private object that ``uses`` does not know."""
    other = module is not script
    if other and module.dynamic and find_import(module, library.modules):
        return module.dynamic[0]
    for attribute, stores in module.stored_attributes.items():
        for store in stores:
            own = isinstance(store.value, ast.Name) and store.value.id == "self"
            noise = attribute.strip("_") == "noise_multiplier"
            noise |= attribute in NAMES["private_parts"] and other
            constant = isinstance(getattr(module.parents[store], "value", None), ast.Constant)
            statement = module.parents[store]
            outer = module.parents.get(statement)
            missing = f"not hasattr({source_text(store.value)}, {attribute!r})"
            constant |= (
                isinstance(outer, ast.If) and statement in outer.body
                and source_text(outer.test) == missing and not module.dynamic
                and "hasattr" not in {name for _, name in module.bindings}
            )  # fmt: skip
            of_package = module.comes_from(store.value, (*library.modules, *ARRAY_PACKAGES))
            if (noise and not own) or (other and of_package and not constant):
                return store
    return None
