"""Ask about every use of a private object that is not on the allow-list.

A script is only certified if each use of its model, optimiser, loader, records and engine is one of
``uses.toml``: everything else may train more, release records, or change what the private call set
up. It is an open question at its line, which a comment about that line, or a replay, answers::

    warm_up(model)  # affidavit: harmless=reads_no_records
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from affidavit.importers.libraries import FAULTS
from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import OpenUse
from affidavit.importers.scripts.call_uses import CallUses
from affidavit.importers.scripts.conditions import exclude_each_other, is_reached
from affidavit.importers.scripts.name_uses import NameUses
from affidavit.importers.scripts.object_kinds import ObjectKinds
from affidavit.importers.scripts.row_kinds import NOTHING
from affidavit.importers.scripts.syntax import Script, package_of
from affidavit.importers.scripts.use_table import SECRETS
from affidavit.importers.scripts.values import is_left_out, source_text

OF_OTHER_ROWS = "a row may be made of other records than its own"


def find_uses(
    kinds: ObjectKinds,
    call: ast.Call,
    others: Iterable[tuple[ast.AST, str]],
    *,
    draws_lots: bool,
) -> tuple[tuple[OpenUse, ...], list[tuple[ast.AST, str]]]:
    """Return the uses that are not understood, in the order of their lines, and known faults.

    A fault is a node with its key in ``faults.toml``. ``draws_lots`` is whether the private loader
    must draw the lots of each step, so that sampling amplifies privacy. ``others`` are not
    understood either.
    """
    questions, faults = dict[int, OpenUse](), list[tuple[ast.AST, str]]()
    values, script = kinds.values, kinds.script
    followed = not script.dynamic and is_reached(script, call)
    for node, why in (*Uses(kinds, draws_lots=draws_lots).open_uses(), *others):
        line = getattr(node, "lineno", call.lineno)
        if (
            exclude_each_other(script, node, call)
            or is_left_out(values, node)
            or (followed and not is_reached(script, node))
            or any(line in script.harmless for line in _lines_of(script, node))
        ):
            continue
        if why in FAULTS:
            faults.append((node, why))
        else:
            message = f"line {line}: {source_text(node)}: {why}."
            questions.setdefault(line, OpenUse(line=line, message=message))
    return tuple(questions[line] for line in sorted(questions)), faults


def _lines_of(script: Script, node: ast.AST) -> range:
    """Return the lines of the statement of a node, without the statements inside it."""
    outer = next(o for o in (node, *script.ancestors(node)) if isinstance(o, ast.stmt | ast.Module))
    body = getattr(outer, "body", None)
    ends = getattr(outer, "end_lineno", 1)
    last = body[0].lineno - 1 if isinstance(body, list) and body else ends
    first = getattr(outer, "lineno", 1)
    return range(first, max(first, last or first) + 1)


class Uses:
    """The uses of private objects in a script."""

    def __init__(self, kinds: ObjectKinds, *, draws_lots: bool) -> None:
        self.kinds, self.script = kinds, kinds.script
        self.calls, self.names = CallUses(kinds, draws_lots=draws_lots), NameUses(kinds)

    def open_uses(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield the nodes that are no understood use, with the reason."""
        yield from _uses_of_row_code(self.kinds)
        for node in self.script.nodes:
            match node:
                case ast.Call():
                    why = self.calls.of_call(node)
                case ast.Assign(targets=targets, value=value):
                    yield from self.names.of_stores(targets, value)
                    continue
                case ast.AugAssign(target=ast.Name() as target) if self.names.is_passed_lot(target):
                    why = "it changes what is passed to it"
                case ast.AugAssign(target=ast.Name() as target, value=value) if (
                    "model" in self.kinds.kinds(target) and self.kinds.kinds(value) & SECRETS
                ):
                    why = "records decide a part of the model"
                case (
                    ast.AugAssign(target=target, value=value)
                    | ast.AnnAssign(target=target, value=ast.expr() as value)
                ):
                    yield from self.names.of_stores([target], value)
                    continue
                case ast.Expr(value=ast.Call() as call):
                    why = self.calls.of_effect(call)
                case ast.Expr(value=value) if self.kinds.kinds(value) & SECRETS:
                    why = "records decide whether it fails"
                case ast.Attribute(ctx=ast.Del()) | ast.Subscript(ctx=ast.Del()):
                    why = self.names.of_other_store(node)
                case (
                    ast.For(target=target)
                    | ast.comprehension(target=target)
                    | ast.withitem(optional_vars=ast.expr() as target)
                ):
                    stored = (part for part in ast.walk(target)
                              if isinstance(part, ast.Attribute | ast.Subscript))  # fmt: skip
                    whys = [(part, self.names.of_other_store(part)) for part in stored]
                    yield from ((part, why) for part, why in whys if why is not None)
                    continue
                case ast.Attribute(attr=name) | ast.alias(name=name) if name in NAMES[
                    "reflection"
                ] and not self._is_of_the_script(node):
                    why = "it may reach or change any object"
                case ast.Attribute(ctx=ast.Load()):
                    why = self.names.of_attribute(node)
                case ast.Name(ctx=ast.Load()):
                    why = self.names.of_reference(node)
                case ast.Lambda():
                    why = self.names.of_code(node, node)
                case ast.Global(names=names) | ast.Nonlocal(names=names):
                    why = self.names.of_shared(node, names)
                case ast.Subscript(ctx=ast.Load()):
                    why = self.calls.of_lot(node)
                case ast.Break() | ast.Continue() | ast.Return() | ast.Raise() | ast.Assert():
                    why = self.names.of_exit(node)
                case _ if self.names.gives_another_meaning(node):
                    why = "it gives a name another meaning"
                case ast.FunctionDef():
                    why = self.names.of_definition(node)
                case ast.Match(subject=subject) if self.kinds.kinds(subject):
                    why = "what it matches is not followed"
                case ast.AsyncFor() | ast.AsyncWith():
                    why = "what it waits for is not followed"
                case ast.While(test=test) if self.kinds.kinds(test) & SECRETS:
                    why = "records decide how often it runs"
                case ast.Yield() | ast.Await() | ast.YieldFrom():
                    passed = node.value
                    own = NOTHING if passed is None else self.kinds.kinds(passed)
                    why = "what takes it is not followed" if own else None
                case _:
                    why = None
            if why is not None:
                yield node, why

    def _is_of_the_script(self, node: ast.Attribute | ast.alias) -> bool:
        """Whether an attribute is one of ``self`` that the script stores, as of a patch's size."""
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return not name.startswith("_") and bool(self.script.stored_attributes.get(name))
        return False


def _uses_of_row_code(kinds: ObjectKinds) -> Iterator[tuple[ast.AST, str]]:
    """Yield what in the code that prepares single records is not understood, with the reason.

    That is what is passed as a transform or mapped over the records, and what a data set of the
    script's own does, which may take or keep others. Only functions of packages are understood.
    """
    script = kinds.script
    todo = [
        item.value
        for call in script.calls
        for item in call.keywords
        if (item.arg or "").endswith(("transform", "transforms"))
    ]
    todo += [
        item
        for call in script.calls_to(*NAMES["row_code_takers"])
        if isinstance(call.func, ast.Attribute)
        or any(kinds.kinds(item) & SECRETS for item in call.args)
        for item in call.args
    ]
    todo += [
        value
        for name, stores in script.stored_attributes.items()
        if name.endswith(("transform", "transforms"))
        for store in stores
        if (value := getattr(script.parents[store], "value", None)) is not None
    ]
    todo += (read := [item for call in kinds.sources.calls for item in call.args])
    of_sources = {part for item in read for part in ast.walk(item)}
    seen = set[ast.AST]()
    while todo:
        for part in ast.walk(todo.pop()):
            if part in seen:
                continue
            seen.add(part)
            if isinstance(part, ast.Lambda):
                yield part, OF_OTHER_ROWS
            if not isinstance(part, ast.Name) or not _is_code(script, part):
                continue
            for bound in script.bindings_of(part):
                origin = package_of(script.import_origin(bound)[0] or "")
                if isinstance(bound.node, ast.FunctionDef | ast.ClassDef):
                    yield part, OF_OTHER_ROWS
                elif part in of_sources:
                    continue
                elif isinstance(bound.node, ast.alias):
                    if origin not in NAMES["transform_packages"]:
                        yield part, OF_OTHER_ROWS
                elif bound.value is not None:
                    todo.append(bound.value)
    for method in script.functions.get("__getitem__", ()):
        yield method, OF_OTHER_ROWS


def _is_code(script: Script, name: ast.Name) -> bool:
    """Whether a name may be that of code, and not of a setting, as in ``args.size``."""
    outer: ast.AST = name
    while isinstance(script.parents[outer], ast.Attribute):
        outer = script.parents[outer]
    call = script.parents[outer]
    called = isinstance(call, ast.Call) and call.func is outer
    return isinstance(name.ctx, ast.Load) and (
        called or (outer is name and not isinstance(call, ast.Subscript))
    )
