"""Say which stores, references, definitions and exits are no understood use of an object."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.object_kinds import ObjectKinds
from affidavit.importers.scripts.raw_records import is_imported, is_own, is_raw, words_of
from affidavit.importers.scripts.row_kinds import NOTHING, Kinds
from affidavit.importers.scripts.seeds import KNOWN_SEED, may_know_seed
from affidavit.importers.scripts.step_count import enclosing_loops, optimizer_steps
from affidavit.importers.scripts.syntax import (
    innermost_loop,
    last_name,
    package_of,
    root_of,
)
from affidavit.importers.scripts.use_table import (
    HANDLES,
    SECRETS,
    find_function,
    find_method,
)
from affidavit.importers.scripts.values import source_text


class NameUses:
    """The uses of private objects in a script that are no calls."""

    def __init__(self, kinds: ObjectKinds) -> None:
        self.kinds, self.script, self.values = kinds, kinds.script, kinds.values

    def of_stores(self, targets: list[ast.expr], value: ast.expr) -> Iterator[tuple[ast.AST, str]]:
        """Yield the targets of an assignment that change an object, with the reason."""
        parts = list(targets)
        own = self.kinds.kinds(value)
        while parts:
            target = parts.pop()
            match target:
                case ast.Tuple(elts=elements) | ast.List(elts=elements):
                    parts += elements
                case ast.Starred(value=inner):
                    parts.append(inner)
                case ast.Attribute():
                    why = self._of_attribute_store(target, value)
                    if why is not None or (why := self._of_rebinding(target)) is not None:
                        yield target, why
                case ast.Subscript(value=base):
                    kinds = self.kinds.kinds(base)
                    secret = own & SECRETS or self.kinds.decided_by_records(target)
                    if kinds & (HANDLES - {"holder"}) and secret:
                        yield target, f"records decide what the {words_of(kinds & HANDLES)} gets"
                    elif kinds & {"private", "engine", "optimizer"}:
                        yield target, f"it changes the {words_of(kinds)}"
                    elif not kinds & HANDLES and (
                        changed := self._whole(target) & {"private", "engine", "optimizer"}
                    ):
                        yield target, f"it changes the {words_of(changed)}"
                    elif self._is_outside(base) and is_raw(self.kinds, value):
                        yield target, "it writes records"
                    elif kinds & {"data", "lots"} and own & SECRETS:
                        yield target, "it changes the records"
                case ast.Name():
                    if (why := self._of_rebinding(target)) is not None:
                        yield target, why

    def of_other_store(self, target: ast.Attribute | ast.Subscript) -> str | None:
        """Say why deleting a part of an object, or storing one by a loop, may change it."""
        changed = self._whole(target) & (HANDLES | {"lots", "data"}) - {"holder", "criterion"}
        return f"it changes the {words_of(changed)}" if changed else None

    def _whole(self, target: ast.expr) -> Kinds:
        """Return the kinds of the object that a target is a part of."""
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        return self.kinds.kinds(target)

    def _of_attribute_store(self, target: ast.Attribute, value: ast.expr) -> str | None:
        name, base, own = target.attr, self.kinds.kinds(target.value), self.kinds.kinds(value)
        root = root_of(target)
        whole = base | (self.kinds.kinds(root) if isinstance(root, ast.Name) else NOTHING)
        changed = whole & {"private", "optimizer", "engine", "lots"}
        if base & changed or (changed and "model" not in base and "holder" not in whole):
            return f"it changes the {words_of(changed)}"
        if "model" in base:
            if own & SECRETS or self.kinds.decided_by_records(target):
                holds = own & {"data", "lots", "holder"} and isinstance(target.value, ast.Name)
                if holds and not own & {"value", "lot", "rows", "loss"}:
                    return None  # it only holds the data set
                return "records decide a part of the model"
            if name == "optimizer":
                return "the model gets another optimiser"
            own_layer = isinstance(target.value, ast.Name) and target.value.id == "self"
            if not own_layer and not self.kinds.runs_before(target):
                return "it changes the model after it is made private"
        if name in ("forward", "call", "__call__", "training_step"):
            return "it changes what a model computes"
        if self._replaces_import(target, value):
            return "it may change what others call"
        own_part = isinstance(target.value, ast.Name) and target.value.id == "self"
        computed = own & (SECRETS - {"data", "lots", "count"})
        if computed and name in ("data", "weight", "bias", *NAMES["gradients"]):
            return "records decide a weight or gradient"
        setting = name.endswith("transform") or isinstance(value, ast.Constant)
        if base & {"data", "lots"} and (computed or not (own & {"data"} or setting)):
            return "it changes the records"
        if name in NAMES["stops"] and (own & SECRETS or self.kinds.decided_by_records(target)):
            return "records decide where training stops"
        if own & SECRETS and is_imported(self.script, [target]):
            return "another file may read it"
        keras = self.kinds.library.key.startswith("tensorflow")
        if keras and name == "optimizer" and not own_part:
            return "a model may get another optimiser"
        return None

    def gives_another_meaning(self, node: ast.AST, name: str) -> bool:
        """Whether a definition or import binds a name that has a meaning already."""
        return self._is_private_name(node, name) or self._rebinds_import(node, name)

    def _rebinds_import(self, node: ast.AST, name: str) -> bool:
        """Whether an import may give a name, that another package's import gives, another value."""
        if not isinstance(node, ast.alias):
            return False
        package = package_of(self._module_of(node))
        if name == "*":
            return package not in (
                *NAMES["transform_packages"],
                *NAMES["numerical_packages"],
                *NAMES["training_packages"],
            )
        others = self.script.bindings.get((self.script.scope_of(node), name), ())
        return any(
            isinstance(item.node, ast.alias)
            and package_of(self._module_of(item.node)) != package
            and not any(isinstance(outer, ast.Try | ast.If)
                        for place in (node, item.node) for outer in self.script.ancestors(place))
            for item in others
        )  # fmt: skip

    def _module_of(self, alias: ast.alias) -> str:
        statement = self.script.parents[alias]
        return getattr(statement, "module", None) or alias.name

    def _is_private_name(self, node: ast.AST, name: str) -> bool:
        """Whether a node other than an assignment binds a name that the private call sets."""
        bindings = self.script.bindings.get((self.script.scope_of(node), name), ())
        places = [item.node for item in bindings]
        return node in places and any(map(self.values.is_set_by_private_call, places))

    def _of_rebinding(self, target: ast.Name | ast.Attribute) -> str | None:
        """Say why a name of a private object may hold another one later."""
        values, script, private = self.values, self.script, self.kinds.private
        if values.is_set_by_private_call(target):
            return None
        if isinstance(target, ast.Name):
            places = [item.node for item in script.bindings_of(target)]
        else:
            places = list(script.stores_of_attribute(target.attr, target))
        ours = [item for item in places if values.is_set_by_private_call(item)]
        if not ours:
            return None
        scope = script.scope_of(private)
        before = script.scope_of(target) is scope and target.lineno < private.lineno
        constructor = getattr(script.scope_of(target), "name", "") == "__init__"
        if before or (isinstance(target, ast.Attribute) and constructor):
            return None
        was = frozenset().union(*(self.kinds.bound[item] for item in ours))
        now = self.kinds.bound[target]
        if now and now <= was | {"holder"}:
            return None  # a wrapper of the same
        if not was & (HANDLES | {"lots"}):
            return None
        return f"it gives the name of the {words_of(was)} another object"

    def of_attribute(self, node: ast.Attribute) -> str | None:
        """Say why reading an attribute of an object is no understood use."""
        if may_know_seed(self.values, node):
            return KNOWN_SEED
        if node.attr == "fork_rng":
            return "the noise may be that of another step"
        base = self.kinds.kinds(node.value)
        outer = self.script.parents[node]
        if isinstance(outer, ast.Call) and outer.func is node:
            return None
        named = node.attr == "__class__" and getattr(outer, "attr", "") == "__name__"
        if node.attr in ("__dict__", "__class__") and base and not named:
            return "it may change any part of the object"
        if node.attr in NAMES["gradients"] and not is_imported(self.script, [node]):
            compared = isinstance(outer, ast.Compare)
            return None if compared else "it reads gradients that no noise covers"
        if self._is_carried(node):
            return "it may be of an earlier lot"
        parts = ("original_optimizer", "step", "grad_samples")
        if base & {"private", "optimizer"} and node.attr in parts:
            return f"{node.attr} of the optimiser is not a use that is understood"
        if (
            "model" in base
            and node.attr in ("forward", "optimizer")
            and not isinstance(outer, ast.Attribute)
        ):
            return None
        if "engine" in base and node.attr not in ("accountant", "secure_mode"):
            return f"{node.attr} of the engine is not a use that is understood"
        return None

    def _is_carried(self, node: ast.Name | ast.Attribute) -> bool:
        """Whether a loop reads a part of a lot before it sets it: that of an earlier turn."""
        loop = innermost_loop(self.script, node)
        if loop is None or not self.kinds.kinds(node) & {"lot", "rows", "loss"}:
            return False
        if isinstance(node, ast.Name):
            stores = [item.node for item in self.script.bindings_of(node)]
        else:
            stores = list(self.script.stores_of_attribute(node.attr, node))
        if any(isinstance(outer, ast.comprehension) for item in stores
               for outer in list(self.script.ancestors(item))[:2]):  # fmt: skip
            return False
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
        if node.id in NAMES["namespaces"] and not self.script.bindings_of(node):
            return self._of_namespace(node)
        definition = self.script.function_of(node)
        if definition is None:
            return None
        return self.of_code(node, definition)

    def _of_namespace(self, node: ast.Name) -> str | None:
        call = self.script.parents[node]
        if isinstance(call, ast.Call) and call.args and call.func is node:
            own = self.kinds.kinds(call.args[0])
            return "it may change any part of the object" if own else None
        return "it may change any name"

    def of_code(self, node: ast.expr, code: ast.AST) -> str | None:
        """Say why code that is named may use objects at any time."""
        outer: ast.AST = self.script.parents[node]
        if isinstance(outer, ast.Call) and outer.func is node:
            return None
        if not self.touches(code):
            return None
        if isinstance(outer, ast.keyword):
            place: int | str = outer.arg or "**"
            outer = self.script.parents[outer]
        elif isinstance(outer, ast.Call):
            place = next((i for i, item in enumerate(outer.args) if item is node), "**")
        else:
            return "the function that it names may run at any place"
        if not isinstance(outer, ast.Call):
            return "the function that it names may run at any place"
        uses = [find_function(self.script, outer)]
        if isinstance(outer.func, ast.Attribute):
            name = outer.func.attr
            uses += [find_method(kind, name) for kind in self.kinds.kinds(outer.func.value)]
        if any(use is not None and use.accepts("code", place) for use in uses):
            return None
        name = last_name(outer.func) or ""
        if name in NAMES["runners"] and self.values.is_called_once(node):
            return None
        if name in ("jit", "vmap", "grad", "value_and_grad", "partial", "pmap", "remat", "scan"):
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
        own = self.script.scope_of(node)
        for name in names:
            for (scope, bound), bindings in self.script.bindings.items():
                if bound != name:
                    continue
                kinds = frozenset().union(*(self.kinds.bound[item.node] for item in bindings))
                if (kinds | self.kinds.held[scope, name]) & (HANDLES | {"lots"}):
                    return f"{name} is set in {getattr(own, 'name', 'a function')}, at any time"
        return None

    def of_definition(self, node: ast.FunctionDef) -> str | None:
        """Say why a function may run at other times than it is called."""
        names = [last_name(getattr(item, "func", item)) for item in node.decorator_list]
        other = next((name for name in names if name not in NAMES["known_decorators"]), None)
        owner = self.script.parents[node]
        keras = self.kinds.library.key.startswith(("tensorflow", "jax_keras"))
        replaces = node.name in ("train_step", "make_train_function")
        if keras and replaces and self.kinds.is_model_class(owner):
            return "a step of its own replaces that of Keras"
        if other is None or not self.touches(node):
            return None
        return f"what {other} does with it is not known"

    def of_exit(self, node: ast.AST) -> str | None:
        """Say why records may decide, or leave by, where the script goes on."""
        test = self.kinds.deciding(node)
        function = self.script.scope_of(node)
        name = getattr(function, "name", "")
        layer = name in ("forward", "call")
        owner = self.script.parents.get(function)
        if isinstance(node, ast.Return) and layer and self.kinds.is_model_class(owner or function):
            made = NOTHING if node.value is None else self.kinds.kinds(node.value)
            if "value" in made:
                return "a layer may join the records of a lot"
        if isinstance(node, ast.Raise) and node.exc is not None:
            carried = self.kinds.kinds(node.exc) & (HANDLES | {"lots"})
            if carried - {"scheduler", "criterion"}:
                return "what catches it gets private objects"
        if isinstance(node, ast.Assert):
            if self.kinds.runs_before(node):
                return None  # a check of the form of the records, before any of them is used
            own = self.kinds.kinds(node.test) & SECRETS
            return "records decide whether it goes on" if own else None
        if isinstance(node, ast.Return | ast.Break) and self._leaves_lot(node):
            return "a lot that BatchMemoryManager splits may not run to its end"
        if test is None:
            return None
        if isinstance(node, ast.Return):
            if not self._steps_within(function):
                return None
        elif isinstance(node, ast.Break | ast.Continue):
            loop = innermost_loop(self.script, node)
            if loop is not None and not self._steps_within(loop):
                return None
        return f"records decide where it leaves ({source_text(test)})"

    def _leaves_lot(self, node: ast.AST) -> bool:
        """Whether a loop over parts of lots is left, so that gradients stay for the next lot."""
        if not self.script.calls_to("BatchMemoryManager", "wrap_data_loader"):
            return False
        loops = (next(enclosing_loops(self.values, step), None)
                 for step in optimizer_steps(self.values))  # fmt: skip
        return innermost_loop(self.script, node) in [loop for loop in loops if loop is not None]

    def _steps_within(self, place: ast.AST) -> bool:
        """Whether a loop or function may change a private object."""
        return any(
            isinstance(part, ast.Call)
            and (
                last_name(part.func) in ("step", "backward", "save", "fit")
                or bool(self.kinds.functions(part.func))
            )
            for part in ast.walk(place)
        )

    def _is_outside(self, base: ast.expr) -> bool:
        """Whether an object is made or held by a package."""
        while isinstance(base, ast.Attribute | ast.Subscript):
            base = base.value
        made = self.script.value_of(base) if isinstance(base, ast.Name) else base
        if isinstance(made, ast.Call):
            return not is_own(self.kinds, made) and bool(self.script.module_path(made.func))
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
