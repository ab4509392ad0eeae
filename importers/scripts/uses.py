"""Ask about every use of a private object that is not on the allow-list.

A script is only certified if each use of its model, optimiser, loader, records and engine is one of
``uses.toml``: everything else may train more, release records, or change what the private call set
up. It is an open question at its line, which a comment about that line, or a replay, answers::

    warm_up(model)  # affidavit: harmless=reads_no_records
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache

from affidavit.importers.libraries import FAULTS
from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import OpenUse
from affidavit.importers.scripts.call_uses import KNOWN_SEED, CallUses
from affidavit.importers.scripts.conditions import exclude_each_other, is_reached
from affidavit.importers.scripts.loop_faults import divided_losses
from affidavit.importers.scripts.object_kinds import ObjectKinds, is_imported, whole_of
from affidavit.importers.scripts.row_kinds import NOTHING, Kinds
from affidavit.importers.scripts.step_count import enclosing_loops, optimizer_steps
from affidavit.importers.scripts.syntax import (
    Script,
    innermost_loop,
    keywords_of,
    last_name,
    package_of,
)
from affidavit.importers.scripts.use_table import (
    HANDLES,
    SECRETS,
    arguments_of,
    find_function,
    find_method,
    words_of,
)
from affidavit.importers.scripts.values import Evaluator, is_left_out, source_text

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
    reached = cache(lambda owner: is_reached(script, owner.body[0]))
    for node, why in (*Uses(kinds, draws_lots=draws_lots).open_uses(), *others):
        line = getattr(node, "lineno", call.lineno)
        if (
            exclude_each_other(script, node, call)
            or is_left_out(values, node)
            or (followed and not reached(_owner_of(script, node)))
            or any(line in script.harmless for line in _lines_of(script, node))
        ):
            continue
        if why in FAULTS:
            faults.append((node, why))
        else:
            message = f"line {line}: {source_text(node)}: {why}."
            questions.setdefault(line, OpenUse(line=line, message=message))
    return tuple(questions[line] for line in sorted(questions)), faults


def _owner_of(script: Script, node: ast.AST) -> ast.AST:
    """Return the function, class or module whose body a node is in."""
    owners = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    return next(outer for outer in script.ancestors(node) if isinstance(outer, owners))


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
        self.kinds, self.script, self.values = kinds, kinds.script, kinds.values
        self.calls = CallUses(kinds, draws_lots=draws_lots)

    def open_uses(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield the nodes that are no understood use, with the reason."""
        yield from _uses_of_row_code(self.kinds)
        yield from divided_losses(self.values)
        for call in self.kinds.sources.unread:
            yield call, "what another file computes of the records is not read"
        for node in self.script.nodes:
            match node:
                case ast.Call():
                    why = self.calls.of_call(node)
                case ast.Expr(value=ast.Call() as call):
                    why = self.calls.of_effect(call)
                case ast.Expr(value=value) if self.kinds.kinds(value) & SECRETS:
                    why = "records decide whether it fails"
                case ast.Attribute(ctx=ast.Del()) | ast.Subscript(ctx=ast.Del()):
                    why = self.of_deletion(node)
                case ast.Attribute(attr=name) | ast.alias(name=name) if name in NAMES["reflection"]:
                    why = "it may reach or change any object"
                case (
                    ast.Name(ctx=ast.Store())
                    | ast.Attribute(ctx=ast.Store())
                    | ast.Subscript(ctx=ast.Store())
                ):
                    why = self.of_store(node)
                case ast.Attribute():
                    why = self.of_attribute(node)
                case ast.Name(ctx=ast.Load()):
                    why = self.of_reference(node)
                case ast.Lambda():
                    why = self.of_code(node, node)
                case ast.Global(names=names) | ast.Nonlocal(names=names):
                    why = self.of_shared(node, names)
                case ast.Subscript(ctx=ast.Load()):
                    why = self.calls.of_lot(node)
                case ast.Break() | ast.Continue() | ast.Return() | ast.Raise() | ast.Assert():
                    why = self.of_exit(node)
                case _ if self.gives_another_meaning(node):
                    why = "it gives a name another meaning"
                case ast.FunctionDef():
                    why = self.of_definition(node)
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

    def of_store(self, target: ast.Name | ast.Attribute | ast.Subscript) -> str | None:
        """Say why what a name, an attribute or an item gets changes an object."""
        around = self.script.ancestors(target)
        outer = next(o for o in around if not isinstance(o, ast.Tuple | ast.List | ast.Starred))
        held = (getattr(outer, key, None) for key in ("value", "iter", "context_expr"))
        value = next(filter(None, held), None)
        if value is None:
            return None
        own = self.kinds.kinds(value)
        match target:
            case ast.Attribute():
                return self._of_attribute_store(target, value) or self._of_rebinding(target)
            case ast.Subscript():
                return self._of_item_store(target, own)
        changed = self.kinds.kinds(target) if isinstance(outer, ast.AugAssign) else NOTHING
        if changed & SECRETS and self._is_passed(target):
            return "it changes what is passed to it"
        if "model" in changed and own & SECRETS:
            return "records decide a part of the model"
        return self._of_rebinding(target)

    def _of_item_store(self, target: ast.Subscript, own: Kinds) -> str | None:
        base = self.kinds.kinds(target.value)
        decided = own & SECRETS or self.kinds.deciding(target) is not None
        if base & (HANDLES - {"holder"}) and decided:
            return f"records decide what the {words_of(base & HANDLES)} gets"
        whole = base if base & HANDLES else self._whole(target)
        if changed := whole & {"private", "engine", "optimizer"}:
            return f"it changes the {words_of(changed)}"
        if own & SECRETS and self._is_outside(target.value):
            return "it writes records"
        return "it changes the records" if own & SECRETS and base & {"data", "lots"} else None

    def _is_passed(self, target: ast.Name) -> bool:
        """Whether a name is that of a parameter."""
        return any(isinstance(item.node, ast.arg) for item in self.script.bindings_of(target))

    def of_deletion(self, target: ast.Attribute | ast.Subscript) -> str | None:
        """Say why deleting a part of an object may change it."""
        changed = self._whole(target) & (HANDLES | {"lots", "data"}) - {"holder", "criterion"}
        return f"it changes the {words_of(changed)}" if changed else None

    def _whole(self, target: ast.expr) -> Kinds:
        """Return the kinds of the object that a target is a part of."""
        return self.kinds.kinds(whole_of(target))

    def _of_attribute_store(self, target: ast.Attribute, value: ast.expr) -> str | None:
        name, whole, own = target.attr, self._whole(target), self.kinds.kinds(value)
        own_part = isinstance(target.value, ast.Name) and target.value.id == "self"
        decided = bool(own & SECRETS) or self.kinds.deciding(target) is not None
        setting = name.endswith("transform") or isinstance(value, ast.Constant)
        changed = whole & {"private", "optimizer", "engine", "lots"}
        changed |= NOTHING if setting else whole & {"data"}
        if changed and not (own_part and "model" in whole):
            return f"it changes the {words_of(changed)}"
        if "model" in whole:
            holds = own_part and bool(own & SECRETS) and own & SECRETS <= {"data", "lots"}
            if decided and not holds:
                return "records decide a part of the model"
            if name == "optimizer" or not (own_part or self.kinds.runs_before(target)):
                return "it changes the model after it is made private"
        if name in ("forward", "call", "__call__", "training_step"):
            return "it changes what a model computes"
        if self._replaces_import(target, value):
            return "it may change what others call"
        if name in NAMES["stops"] and decided:
            return "records decide where training stops"
        if not own_part and own & ((HANDLES | SECRETS) - {"model", "criterion", "scheduler"}):
            return "what an object holds is not followed"
        keras = self.kinds.library.key.startswith("tensorflow")
        if keras and name == "optimizer" and not own_part:
            return "a model may get another optimiser"
        return None

    def gives_another_meaning(self, node: ast.AST) -> bool:
        """Whether a definition or import binds a name that has a meaning already.

        That of the private call, or of another package's import that is no alternative.
        """
        name = getattr(node, "asname", None) or getattr(node, "name", None)
        if not isinstance(name, str):
            return False
        bindings = self.script.bindings.get((self.script.scope_of(node), name), ())
        places = [item.node for item in bindings]
        packages = {package_of(self.script.import_origin(item)[0] or "") for item in bindings
                    if isinstance(item.node, ast.alias)}  # fmt: skip
        around = self.script.ancestors(node)
        chosen = any(isinstance(item, ast.Try | ast.If) for item in around)
        other = isinstance(node, ast.alias) and len(packages) > 1 and not chosen
        private = any(map(self.values.is_set_by_private_call, places))
        return other or (node in places and private)

    def _of_rebinding(self, target: ast.Name | ast.Attribute) -> str | None:
        """Say why a name of a private object may hold another one later."""
        values, script = self.values, self.script
        places = self.script.places_of(target)
        ours = [item for item in places if values.is_set_by_private_call(item)]
        constructor = getattr(script.scope_of(target), "name", "") == "__init__"
        if target in ours or constructor or self.kinds.runs_before(target):
            return None
        was = frozenset().union(*(self.kinds.bound[item] for item in ours))
        now = self.kinds.bound[target]
        if not was & (HANDLES | {"lots"}) or (now and now <= was | {"holder"}):
            return None  # a wrapper of the same
        return f"it gives the name of the {words_of(was)} another object"

    def of_attribute(self, node: ast.Attribute) -> str | None:
        """Say why reading an attribute of an object is no understood use."""
        if may_know_seed(self.values, node):
            return KNOWN_SEED
        if node.attr == "fork_rng":
            return "the noise may be that of another step"
        if node.attr in NAMES["told_again"] and self.script.comes_from(
            node, NAMES["telling_packages"]
        ):
            return "it may read what the training logged"
        base = self.kinds.kinds(node.value)
        outer = self.script.parents[node]
        if isinstance(outer, ast.Call) and outer.func is node:
            return None
        if node.attr == "__class__" and base and getattr(outer, "attr", "") != "__name__":
            return "it may change any part of the object"
        if node.attr in NAMES["gradients"] and not is_imported(self.script, [node]):
            compared = isinstance(outer, ast.Compare)
            return None if compared else "it reads gradients that no noise covers"
        if self._is_carried(node):
            return "it may be of an earlier lot"
        if base & {"private", "optimizer"} and node.attr in NAMES["optimizer_parts"]:
            return f"{node.attr} of the optimiser is not a use that is understood"
        if "engine" in base and node.attr not in ("accountant", "secure_mode"):
            return f"{node.attr} of the engine is not a use that is understood"
        return None

    def _is_carried(self, node: ast.Name | ast.Attribute) -> bool:
        """Whether a loop reads a part of a lot before it sets it: that of an earlier turn."""
        loop = innermost_loop(self.script, node)
        if loop is None or not self.kinds.kinds(node) & {"lot", "rows", "loss"}:
            return False
        stores = self.script.places_of(node)
        own = [item for item in stores if loop in self.script.ancestors(item)]
        return bool(own) and all(
            (getattr(item, "lineno", 0), getattr(item, "col_offset", 0))
            > (node.lineno, node.col_offset)
            or node in ast.walk(getattr(self.kinds.statement(item), "value", None) or item)
            for item in own
        )

    def of_reference(self, node: ast.Name) -> str | None:
        """Ask about a function that uses private objects and is passed on."""
        if may_know_seed(self.values, node):
            return KNOWN_SEED
        if self._is_carried(node):
            return "it may be of an earlier lot"
        definition = self.script.function_of(node)
        return None if definition is None else self.of_code(node, definition)

    def of_code(self, node: ast.expr, code: ast.AST) -> str | None:
        """Say why code that is named may use objects at any time."""
        outer: ast.AST = self.script.parents[node]
        if isinstance(outer, ast.Call) and outer.func is node:
            return None
        if not self.touches(code):
            return None
        call = self.script.parents[outer] if isinstance(outer, ast.keyword) else outer
        if not isinstance(call, ast.Call):
            return "the function that it names may run at any place"
        place = next((place for place, item in arguments_of(call) if item is node), "**")
        uses = [find_function(self.script, call)]
        if isinstance(call.func, ast.Attribute):
            kinds = self.kinds.kinds(call.func.value)
            uses += [find_method(kind, call.func.attr) for kind in kinds]
        listed = any(use is not None and use.accepts("code", place) for use in uses)
        if listed or last_name(call.func) in NAMES["transformations"]:
            return None
        if last_name(call.func) in NAMES["runners"] and self.values.is_called_once(node):
            return None
        return "the function that it is given may run at any time"

    def touches(self, code: ast.AST) -> bool:
        """Whether a function uses a private object, or shares names with others."""
        return any(
            isinstance(part, ast.Global | ast.Nonlocal)
            or (isinstance(part, ast.Name | ast.Attribute)
                and isinstance(part.ctx, ast.Load)
                and bool(self.kinds.kinds(part) & (HANDLES | SECRETS)))
            for part in ast.walk(code)
        )  # fmt: skip

    def of_shared(self, node: ast.AST, names: list[str]) -> str | None:
        """Say which names of objects a function shares with other scopes."""
        own = getattr(self.script.scope_of(node), "name", "a function")
        for (_, name), bindings in self.script.bindings.items():
            kinds = frozenset().union(*(self.kinds.bound[item.node] for item in bindings))
            if name in names and kinds & (HANDLES | {"lots"}):
                return f"{name} is set in {own}, at any time"
        return None

    def of_definition(self, node: ast.FunctionDef) -> str | None:
        """Say why a function may run at other times than it is called."""
        names = [last_name(getattr(item, "func", item)) for item in node.decorator_list]
        other = next((name for name in names if name not in NAMES["known_decorators"]), None)
        owner = self.script.parents[node]
        keras = self.kinds.library.key.startswith(("tensorflow", "jax_keras"))
        replaces = node.name in ("train_step", "make_train_function")
        if keras and replaces and owner in self.kinds.models:
            return "a step of its own replaces that of Keras"
        if isinstance(owner, ast.ClassDef) and node.name in NAMES["operators"]:
            return "it is not followed where an operator runs it"
        if other is None or not self.touches(node):
            return None
        return f"what {other} does with it is not known"

    def of_exit(self, node: ast.AST) -> str | None:
        """Say why records may decide, or leave by, where the script goes on."""
        function, test = self.script.scope_of(node), self.kinds.deciding(node)
        layer = function in self.kinds.layers
        match node:
            case ast.Return(value=ast.expr() as value) if layer and (
                "value" in self.kinds.kinds(value)
            ):
                return "a layer may join the records of a lot"
            case ast.Raise(exc=ast.expr() as carried) if self.kinds.kinds(carried) & (
                (HANDLES | {"lots"}) - {"scheduler", "criterion"}
            ):
                return "what catches it gets private objects"
            case ast.Assert(test=condition):
                # Before any record is used, it checks their form.
                decides = self.kinds.kinds(condition) & SECRETS and not self.kinds.runs_before(node)
                return "records decide whether it goes on" if decides else None
            case ast.Return() | ast.Break() if self._leaves_lot(node):
                return "a lot that BatchMemoryManager splits may not run to its end"
        return None if test is None else f"records decide where it leaves ({source_text(test)})"

    def _leaves_lot(self, node: ast.AST) -> bool:
        """Whether a loop over parts of lots is left, so that gradients stay for the next lot."""
        if not self.script.calls_to("BatchMemoryManager", "wrap_data_loader"):
            return False
        loops = (next(enclosing_loops(self.values, step), None)
                 for step in optimizer_steps(self.values))  # fmt: skip
        return innermost_loop(self.script, node) in [loop for loop in loops if loop is not None]

    def _is_outside(self, base: ast.expr) -> bool:
        """Whether an object may be more than a list, a dictionary or an array of the script."""
        base = whole_of(base)
        made = self.script.value_of(base) if isinstance(base, ast.Name) else base
        if isinstance(made, ast.Call):
            return not self.script.comes_from(made.func, NAMES["numerical_packages"])
        return is_imported(self.script, [base])

    def _replaces_import(self, target: ast.Attribute, value: ast.expr) -> bool:
        """Whether a part of a package, or of a class of one, is replaced by other code."""
        path = self.script.module_path(target)
        return (
            bool(path)
            and package_of(path) not in NAMES["telling_packages"]
            and not path.startswith(("torch.backends.", "sys.std"))
            and self.values.known_value(value) is None
        )


def _uses_of_row_code(kinds: ObjectKinds) -> Iterator[tuple[ast.AST, str]]:
    """Yield what in the code that prepares single records is not understood, with the reason.

    That is what is passed as a transform or mapped over the records, and what a data set of the
    script's own does, which may take or keep others. Only functions of packages are understood.
    """
    script, todo = kinds.script, list[ast.expr]()
    for node in script.nodes:
        match node:
            case ast.keyword(arg=str(name), value=value) if _is_transform(name) or (
                name == "collate_fn"
            ):
                todo.append(value)
            case ast.Attribute(attr=name, ctx=ast.Store()) if _is_transform(name):
                todo += filter(None, [getattr(script.parents[node], "value", None)])
            case ast.Call(func=function, args=args) if last_name(function) in NAMES[
                "row_code_takers"
            ] and (
                isinstance(function, ast.Attribute)
                or any(kinds.kinds(item) & SECRETS for item in args)
            ):
                todo += args
    todo += (read := [item for call in kinds.sources.calls for item in call.args])
    of_sources = {part for item in read for part in ast.walk(item)}
    seen = set[ast.AST]()
    while todo:
        parts = [part for part in ast.walk(todo.pop()) if part not in seen]
        seen.update(parts)
        for part in parts:
            if isinstance(part, ast.Lambda) or (
                isinstance(part, ast.Attribute) and part.attr in script.functions
            ):
                yield part, OF_OTHER_ROWS
            if not isinstance(part, ast.Name) or not _is_code(script, part):
                continue
            for bound in script.bindings_of(part):
                source = part in of_sources
                package = package_of(script.import_origin(bound)[0] or "")
                foreign = isinstance(bound.node, ast.alias) and not source
                if isinstance(bound.node, ast.FunctionDef | ast.ClassDef) or (
                    foreign and package not in NAMES["transform_packages"]
                ):
                    yield part, OF_OTHER_ROWS
                elif bound.value is not None and not source:
                    todo.append(bound.value)
    for method in script.functions.get("__getitem__", ()):
        yield method, OF_OTHER_ROWS


def _is_transform(name: str) -> bool:
    return name.endswith(("transform", "transforms"))


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


def may_know_seed(values: Evaluator, node: ast.expr) -> bool:
    """Whether a reference to a function that seeds generators may give a seed that others know.

    A seed is secret if it comes from the system's entropy, or from an option or a setting that the
    text gives no value.
    """
    script, call = values.script, values.script.parents[node]
    name = last_name(node) or ""
    own = isinstance(node, ast.Name) and not is_imported(script, [node])
    jax_key = name == "key" and script.module_path(node) == "jax.random.key"
    if (name not in NAMES["seeds"] and not jax_key) or own:
        return False
    engines = script.calls_to("PrivacyEngine")
    if any(values.known_value(keywords_of(item).get("secure_mode")) for item in engines):
        return False
    if not isinstance(call, ast.Call) or call.func is not node:
        return True  # what it is passed to, or named, may call it with any seed
    seed = next(iter(call.args), keywords_of(call).get("seed"))
    return not _is_secret(values, seed)


def _is_secret(values: Evaluator, seed: ast.expr | None) -> bool:
    """Whether a seed is the system's entropy, or an option that the text gives no value."""
    match made := seed and (values.origin_of(seed) or seed):
        case ast.Call(func=function) if last_name(function) in NAMES["same_number"]:
            return bool(made.args) and _is_secret(values, made.args[0])
        case ast.Call(func=ast.Attribute(value=ast.Call() as source)):
            return _is_secret(values, source)  # SystemRandom().getrandbits(31)
        case ast.Call(func=function):
            return values.script.module_path(function) in NAMES["entropy"]
        case ast.Attribute() | ast.Subscript():
            return values.known_value(made) is None and not values.script.module_path(made)
    return made is None
