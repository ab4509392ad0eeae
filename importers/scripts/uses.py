"""Ask about every use of a private object that is not on the allow-list.

A script is only certified if each use of its model, optimiser, loader, records and engine is one of
``uses.toml``: everything else may train more, release records, or change what the private call set
up. It is an open question at its line, which a comment about that line, or a replay, answers::

    warm_up(model)  # affidavit: harmless=reads_no_records
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from affidavit.importers.libraries import FAULTS, OPACUS
from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import OpenUse, line_in_script
from affidavit.importers.scripts.conditions import exclude_each_other, is_reached
from affidavit.importers.scripts.object_kinds import ObjectKinds
from affidavit.importers.scripts.row_code import open_uses_of_row_code
from affidavit.importers.scripts.row_kinds import NOTHING, Kinds
from affidavit.importers.scripts.seeds import KNOWN_SEED, may_know_lots, may_know_seed
from affidavit.importers.scripts.step_count import enclosing_loops, runs_once, unwrap_iterable
from affidavit.importers.scripts.syntax import (
    Script,
    calls_any,
    innermost_loop,
    keywords_of,
    last_name,
    names_in,
    package_of,
    root_of,
)
from affidavit.importers.scripts.use_table import (
    HANDLES,
    SECRETS,
    Use,
    find_function,
    find_method,
)
from affidavit.importers.scripts.values import is_left_out, source_text


def find_uses(
    kinds: ObjectKinds, call: ast.Call, *, draws_lots: bool
) -> tuple[tuple[OpenUse, ...], list[tuple[ast.AST, str]]]:
    """Return the uses that are not understood, in the order of their lines, and known faults.

    A fault is a node with its key in ``faults.toml``. ``draws_lots`` is whether the private loader
    must draw the lots of each step, so that sampling amplifies privacy.
    """
    questions, faults = dict[int, OpenUse](), list[tuple[ast.AST, str]]()
    values, script = kinds.values, kinds.script
    known = script.dynamic is None and script.dynamic_getattr is None
    followed = known and is_reached(script, call)
    for node, why in Uses(kinds, draws_lots=draws_lots).open_uses():
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
            questions.setdefault(line, OpenUse(line=line_in_script(line), message=message))
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
        self.draws_lots = draws_lots
        self.kinds, self.script, self.values = kinds, kinds.script, kinds.values

    def open_uses(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield the nodes that are no understood use, with the reason."""
        yield from open_uses_of_row_code(self.kinds)
        for node in self.script.nodes:
            match node:
                case ast.Call():
                    why = self._of_call(node)
                case ast.Assign(targets=targets, value=value):
                    yield from self._of_stores(targets, value)
                    continue
                case (
                    ast.AugAssign(target=target, value=value)
                    | ast.AnnAssign(target=target, value=ast.expr() as value)
                ):
                    yield from self._of_stores([target], value)
                    continue
                case ast.Expr(value=ast.Call() as call):
                    why = self._of_effect(call)
                case ast.Expr(value=value) if self.kinds.kinds(value) & SECRETS:
                    why = "records decide whether it fails"
                case ast.Attribute(ctx=ast.Del()) | ast.Subscript(ctx=ast.Del()):
                    why = self._of_other_store(node)
                case (
                    ast.For(target=target)
                    | ast.comprehension(target=target)
                    | ast.withitem(optional_vars=ast.expr() as target)
                ):
                    stored = (part for part in ast.walk(target)
                              if isinstance(part, ast.Attribute | ast.Subscript))  # fmt: skip
                    whys = [(part, self._of_other_store(part)) for part in stored]
                    yield from ((part, why) for part, why in whys if why is not None)
                    continue
                case ast.Attribute(attr=name) | ast.alias(name=name) if name in NAMES["reflection"]:
                    why = "it may reach any object"
                case ast.Attribute(ctx=ast.Load()):
                    why = self._of_attribute(node)
                case ast.Name(ctx=ast.Load()):
                    why = self._of_reference(node)
                case ast.Lambda():
                    why = self._of_code(node, node)
                case ast.Global(names=names) | ast.Nonlocal(names=names):
                    why = self._of_shared(node, names)
                case ast.Subscript(ctx=ast.Load()):
                    why = self._of_lot(node)
                case ast.Break() | ast.Continue() | ast.Return() | ast.Raise() | ast.Assert():
                    why = self._of_exit(node)
                case (
                    ast.FunctionDef(name=str(name))
                    | ast.ClassDef(name=str(name))
                    | ast.ExceptHandler(name=str(name))
                    | ast.MatchAs(name=str(name))
                    | ast.alias(asname=str(name))
                    | ast.alias(name=name)
                ) if self._is_private_name(node, name) or self._rebinds_import(node, name):
                    why = "it gives a name another meaning"
                case ast.FunctionDef():
                    why = self._of_definition(node)
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

    # ---- calls ---------------------------------------------------------------------------

    def _of_call(self, call: ast.Call) -> str | None:
        passed = list(self._arguments(call))
        taken = frozenset().union(*(self.kinds.kinds(item) for _, item in passed))
        function = call.func
        name = last_name(function) or ""
        base = (
            self.kinds.kinds(function.value) if isinstance(function, ast.Attribute) else NOTHING
        ) - {"undefined"}
        if self.kinds.is_private(call):
            return self._of_private_call(call)
        builtin = isinstance(function, ast.Name) and not self.script.bindings_of(function)
        if builtin and name in NAMES["runs_text"] and not _is_constant(call):
            return "what it runs is not in the text"
        if (test := self._decides(call, base | taken)) is not None:
            return f"records decide whether it runs ({source_text(test)})"
        if not isinstance(function, ast.Attribute) and self.kinds.kinds(function) & SECRETS:
            return "records decide what it runs"
        changed = keywords_of(call).get("out")
        if changed is not None and self.kinds.kinds(changed) & SECRETS:
            return "it changes the records"
        if name == "setattr" and (base | taken or self._is_imported(call.args[:1])):
            return "it may change any part of the object"
        if name in NAMES["writers"] and any(map(self._is_raw, (item for _, item in passed))):
            return "it writes records"
        if name == "print" and "file" in keywords_of(call) and any(map(self._is_raw, call.args)):
            return "it writes records"
        if self._starts_program(call, name):
            return "the program that it runs is not read"
        if self._is_along_records(call, name):
            return "without batch_first=True it goes along the records of a lot"
        callee = self.kinds.kinds(function)
        if self.kinds.is_part(function, callee):
            bad = taken - SECRETS - {"model", "criterion", "undefined"}
            return f"it is given the {_words(bad)}" if bad else None
        if builtin and name in ("next", "iter") and taken & {"data", "lots"}:
            around = (o for o in self.script.ancestors(call) if isinstance(o, ast.For))
            if any(call not in ast.walk(o.iter) and self.kinds.kinds(o.iter) & {"lots", "lot"}
                   for o in around):  # fmt: skip
                return "it draws another lot in the step of one"
        if (why := self._of_keras(call, name)) is not None:
            return why
        if taken & {"lots"} and builtin and name in ("list", "tuple", "sorted", "set", "dict"):
            return "it keeps lots, which may be used again"
        if taken & {"lots", "data"} and name in ("cycle", "tee", "repeat"):
            return "it repeats lots"
        if name == "DataLoader" and self._is_other_loader(call):
            return None
        if name == "DataLoader" and self._joins(call):
            return "what its collate_fn makes of a lot is not known"
        if self._is_own(call):
            handed = taken & HANDLES - {"model", "criterion", "holder"}
            return f"it is given the {_words(handed)}" if handed and self._keeps(call) else None
        if (
            base == {"holder"}
            and name not in NAMES["container_methods"]
            and not self._is_imported([function])
        ):
            return f"it may use what {source_text(root_of(function))} holds"
        if isinstance(function, ast.Attribute) and base:
            return self._of_method(call, base, name, passed)
        if "differentiator" in callee:
            bad = taken & {"value", "private", "optimizer"}
            return f"it is given the {_words(bad)}" if bad else None
        if "model" in callee or "criterion" in callee:
            bad = taken - SECRETS - {"model", "criterion", "undefined"}
            return f"it is given the {_words(bad)}" if bad else None
        taken -= {"undefined"}
        use = find_function(self.script, call)
        if use is not None and use.keywords:
            return self._taken(use, passed)
        if use is not None and use.gives == "model" and self._names_lot(call):
            return "its shape is that of a lot"
        if not taken or "undefined" in callee:
            return None
        return self._of_function(call, passed, taken)

    def _is_raw(self, node: ast.AST, rows: frozenset[str] = frozenset(), depth: int = 0) -> bool:
        """Whether an expression is records themselves, in whatever form.

        ``rows`` are names of single records in a comprehension.
        """
        match node:
            case ast.Name(id=name):
                if name in rows or self.kinds.kinds(node) & {"data", "lots", "lot", "rows"}:
                    return True
                if depth > 5 or not self.kinds.kinds(node) & SECRETS:
                    return False
                made = [
                    getattr(self.script.parents[item.node], "iter", item.value)
                    for item in self.script.bindings_of(node)
                ]
                return any(item is not None and self._is_raw(item, depth=depth + 1)
                           for item in made)  # fmt: skip
            case ast.Attribute(value=base, attr=name):
                return name not in NAMES["sizes"] and self._is_raw(base, rows, depth)
            case ast.Call(func=function, args=args):
                own = [function.value] if isinstance(function, ast.Attribute) else []
                return last_name(function) in NAMES["forms"] and any(
                    self._is_raw(item, rows, depth) for item in [*own, *args]
                )
            case ast.Subscript(value=base):
                return self._is_raw(base, rows, depth)
            case (
                ast.ListComp(elt=element, generators=[loop])
                | ast.GeneratorExp(elt=element, generators=[loop])
            ) if self._is_raw(loop.iter, rows, depth):
                return self._is_raw(element, rows | names_in(loop.target), depth)
            case ast.Compare() | ast.Lambda():
                return False
        return any(self._is_raw(part, rows, depth) for part in ast.iter_child_nodes(node))

    def _names_lot(self, call: ast.Call) -> bool:
        """Whether an argument is made of a lot, or of its size."""
        return any(
            isinstance(part, ast.Name) and bool(self.kinds.kinds(part) & {"lot", "rows"})
            for _, item in self._arguments(call)
            for part in ast.walk(item)
        )

    def _of_effect(self, call: ast.Call) -> str | None:
        """Say why a call whose result is not used may write or change records.

        It only runs for what it does, so that a function of values alone does not explain it.
        """
        function, name = call.func, last_name(call.func) or ""
        if isinstance(function, ast.Attribute) and self.kinds.kinds(function.value):
            known = name in (*NAMES["container_methods"], "backward") or name.endswith("_")
            base = self.kinds.kinds(function.value)
            raw = base <= SECRETS and self._is_raw(function.value)
            changes = raw and find_method("data", name) is None and not known
            return "it may write or change records" if changes else None
        if (
            self.script.comes_from(function, NAMES["numerical_packages"])
            and find_function(self.script, call) is None
        ):
            raw = any(self._is_raw(item) for _, item in self._arguments(call))
            return "it may write or change records" if raw else None
        return None

    def _starts_program(self, call: ast.Call, name: str) -> bool:
        """Whether a call starts a program that may train, or release records."""
        if name not in NAMES["program_starters"] or not self.script.comes_from(
            call.func, ("os", "subprocess", "pty")
        ):
            return False
        first = call.args[0] if call.args else keywords_of(call).get("args")
        if isinstance(first, ast.List | ast.Tuple) and first.elts:
            first = first.elts[0]
        text = str(getattr(first, "value", "")).split()
        return not text or text[0] not in NAMES["other_programs"]

    def _is_along_records(self, call: ast.Call, name: str) -> bool:
        """Whether a recurrent or attention layer takes records for places of a sequence."""
        if name not in NAMES["sequence_layers"] or not self.script.comes_from(
            call.func, ("torch", "opacus")
        ):
            return False
        first = self.values.known_value(keywords_of(call).get("batch_first"))
        of_all = self.values.known_value(keywords_of(self.kinds.call).get("batch_first"))
        return first is not True and of_all is not False

    def _of_keras(self, call: ast.Call, name: str) -> str | None:
        """Say why Keras may train with another optimiser, loss or layer than one that is known."""
        if not self.kinds.library.key.startswith(("tensorflow", "jax_keras")):
            return None
        named = keywords_of(call)
        if name == "compile":
            rule = named.get("optimizer", next(iter(call.args), None))
            private = (
                self.kinds.returned_by_private_call() == {"private"}
                and self.kinds.library.key != "jax_keras"  # whose steps replace those of the model
            )
            if private and not self._is_private_rule(rule):
                others = (c for c in self.script.calls_to("compile") if c.lineno > call.lineno)
                if not any(self._is_private_rule(keywords_of(c).get("optimizer")) for c in others):
                    return "other_optimizer"
            loss = named.get("loss", next(iter(call.args[1:]), None))
            if loss is not None and not self._is_listed_loss(loss):
                return "a loss of its own may join the records of a lot"
        if name == "Lambda":
            return "a layer of its own may join the records of a lot"
        return None

    def _is_listed_loss(self, loss: ast.expr, depth: int = 0) -> bool:
        """Whether a loss is one of Keras' own, or of what a part of a script leaves out."""
        if isinstance(loss, ast.Constant):
            return True
        if isinstance(loss, ast.Call):
            loss = loss.func
        if self.script.comes_from(loss, ("tensorflow", "keras")):
            return True
        bound = self.script.bindings_of(loss) if isinstance(loss, ast.Name) else [None]
        return depth < 5 and all(
            item is not None
            and item.value is not None
            and self._is_listed_loss(item.value, depth + 1)
            for item in bound
        )

    def _is_private_rule(self, node: ast.expr | None) -> bool:
        """Whether the optimiser that a model is compiled with may be the private one."""
        own = NOTHING if node is None else self.kinds.kinds(node)
        return bool(own & {"private", "undefined"})

    def _is_other_loader(self, call: ast.Call) -> bool:
        """Whether the private call takes another loader, so that no step is over this one's."""
        lots = self.values.origin_of(keywords_of(self.kinds.call).get("data_loader"))
        made = isinstance(lots, ast.Call) and last_name(lots.func) == "DataLoader"
        return made and lots is not call

    def _joins(self, call: ast.Call) -> bool:
        """Whether a function of the script makes the lots of a loader of the records."""
        function = keywords_of(call).get("collate_fn")
        made = self.script.value_of(function) if isinstance(function, ast.Name) else function
        made = getattr(made or function, "func", made or function)
        if made is not None and self.script.comes_from(made, ("transformers", "torch")):
            return False
        data = frozenset().union(*(self.kinds.kinds(item) for item in call.args[:1]))
        data |= frozenset().union(
            *(self.kinds.kinds(item) for key, item in keywords_of(call).items() if key == "dataset")
        )
        return (
            function is not None
            and not isinstance(function, ast.Constant)
            and "undefined" not in self.kinds.kinds(function)
            and bool(data & SECRETS)
        )

    def _is_outside(self, base: ast.expr) -> bool:
        """Whether an object is made or held by a package."""
        while isinstance(base, ast.Attribute | ast.Subscript):
            base = base.value
        made = self.script.value_of(base) if isinstance(base, ast.Name) else base
        if isinstance(made, ast.Call):
            return not self._is_own(made) and bool(self.script.module_path(made.func))
        return self._is_imported([base])

    def _replaces_import(self, target: ast.Attribute, value: ast.expr) -> bool:
        """Whether a part of a package, or of a class of one, is replaced by other code."""
        path = self.script.module_path(target)
        return (
            bool(path)
            and package_of(path) not in NAMES["telling_packages"]
            and not path.startswith(("torch.backends.", "sys.std"))
            and self.values.known_value(value) is None
        )

    def _is_imported(self, nodes: list[ast.expr]) -> bool:
        roots = [root_of(node) for node in nodes]
        return any(
            isinstance(item.node, ast.alias)
            for root in roots
            if isinstance(root, ast.Name)
            for item in self.script.bindings_of(root)
        )

    def _is_own(self, call: ast.Call) -> bool:
        """Whether a call runs functions or classes of this file alone, whose uses are read."""
        function = call.func
        if isinstance(function, ast.Name):
            made = [item.node for item in self.script.bindings_of(function)]
            return bool(made) and all(
                isinstance(item, ast.FunctionDef | ast.ClassDef) for item in made
            )
        base = self.kinds.kinds(function.value) if isinstance(function, ast.Attribute) else NOTHING
        return bool(self.kinds.functions(function)) and base <= {"model", "holder", "data"}

    def _keeps(self, call: ast.Call) -> bool:
        """Whether a call makes an object of a class whose constructor is not in this file."""
        made = self.kinds.functions(call.func)
        name = last_name(call.func)
        classes = [
            item.node for item in self.script.bindings_of(call.func)
            if isinstance(item.node, ast.ClassDef)
        ] if isinstance(call.func, ast.Name) else []  # fmt: skip
        return bool(classes) and not any(item.name in ("__init__", name) for item in made)

    def _of_private_call(self, call: ast.Call) -> str | None:
        module = keywords_of(call).get("module")
        own = self.kinds.library is OPACUS and module is not None and self._is_bound(module)
        if own and module is not None and "model" not in self.kinds.kinds(module):
            return f"the model {source_text(module)} is not made by code that is read"
        if self.kinds.library.key == "jax_keras" and not self.script.calls_to("make_private"):
            return "no model is made private with it"
        secret = ("noise_multiplier", "max_grad_norm", "target_epsilon", "target_delta", "epochs")
        for key, item in keywords_of(call).items():
            if key == "seed" and self.values.known_value(item) is not None:
                return KNOWN_SEED
            if key in secret and self.kinds.kinds(item) & SECRETS:
                return f"records decide {key}"
            if key == "data_loader" and "value" in self.kinds.kinds(item):
                return "its records are computed together"
        return None

    def _is_bound(self, node: ast.expr) -> bool:
        root = root_of(node)
        return isinstance(root, ast.Name) and bool(self.script.bindings_of(root))

    def _decides(self, call: ast.Call, own: Kinds) -> ast.expr | None:
        """Return the condition on records under which a call runs that is more than a message."""
        test = self.kinds.deciding(call)
        if test is None or self._only_tells(call, own):
            return None
        return test

    def _only_tells(self, call: ast.Call, own: Kinds) -> bool:
        """Whether a call only computes values of records, prints or logs."""
        name = last_name(call.func) or ""
        if own & HANDLES - {"model"} or name == "backward":
            return False
        if isinstance(call.func, ast.Name) and not self.script.bindings_of(call.func):
            return name in NAMES["reading_builtins"]
        use = find_function(self.script, call)
        if use is not None:
            return use.gives in ("value", "same", "each", "along", "loss", "")
        base = (
            self.kinds.kinds(call.func.value) if isinstance(call.func, ast.Attribute) else NOTHING
        )
        if "model" in base:
            return False
        return bool(base & SECRETS) or name in ("append", "get", "format", "join", "items")

    def _of_method(
        self, call: ast.Call, base: Kinds, name: str, passed: list[tuple[int | str, ast.expr]]
    ) -> str | None:
        if base <= SECRETS - {"data", "lots", "loss"} or (
            base <= SECRETS and name != "backward" and not base & {"data", "lots"}
        ):
            if name == "backward":
                return "its loss is not one term for each record"
            bad = frozenset().union(*(self.kinds.kinds(item) for _, item in passed)) - SECRETS
            bad -= {"model", "undefined"}
            return f"it is given the {_words(bad)}" if bad else None
        for kind in sorted(base - {"holder"}):
            if kind in ("value", "rows", "count", "lot") and name != "backward":
                continue
            use = find_method(kind, name)
            if use is None:
                if kind in ("data", "lots") and name in ("size", "numel", "dim"):
                    continue
                if kind in ("data", "lots"):
                    return f"{name} of the records is not a use that is understood"
                return f"{name} of the {_words(frozenset([kind]))} is not a use that is understood"
            if (why := self._taken(use, passed)) is not None:
                return why
            if name == "load_state_dict" and not any(
                "model" in self.kinds.kinds(item) for _, item in passed
            ):
                return "the weights that it loads may be of records"
            if name == "map" and self._may_cut(call):
                return "it may make several rows of one"
        if name == "step" and (why := self._of_step(call, base)) is not None:
            return why
        gradients = self.kinds.kinds(call.args[0]) if call.args else NOTHING
        of_jax = name == "update" and "private" in base and self.kinds.library.methods
        if of_jax and not gradients & {"grads", "undefined"}:
            return "what it is given is not known to be one gradient for each record"
        if name == "backward":
            return self._of_backward(call)
        return None

    def _may_cut(self, call: ast.Call) -> bool:
        """Whether rows that a function of the script gets together may come out as others."""
        batched = keywords_of(call).get("batched")
        if batched is None or self.values.known_value(batched) is False:
            return False
        function = self.script.function_of(call.args[0]) if call.args else None
        parts = [part for part in ast.walk(function or call) if isinstance(part, ast.Call)]
        named = [last_name(part.func) or "" for part in parts]
        cuts = any("return_overflowing_tokens" in keywords_of(part) for part in parts)
        return cuts or not any("tokenizer" in name.lower() for name in named)

    def _of_step(self, call: ast.Call, base: Kinds) -> str | None:
        """Say why a step is not one over the lots of the private loader."""
        if "private" not in base:
            return None
        loops = list(enclosing_loops(self.values, call))
        over = [
            self.kinds.kinds(unwrap_iterable(loop.iter)) if isinstance(loop, ast.For) else NOTHING
            for loop in loops
        ]
        if any("value" in own for own in over):
            return "it steps over what is computed of records together"
        drawing = [i for i, own in enumerate(over) if own & {"data", "lots"}]
        inner = loops[: drawing[0]] if drawing else []
        if any(
            not (isinstance(loop, ast.For) and runs_once(self.values, loop.iter))
            and not calls_any(loop, "next")
            for loop in inner
        ):
            return "reused_lots"
        unknown = any("undefined" in own for own in over)
        if self.kinds.library is not OPACUS or not self.draws_lots or not loops or unknown:
            return None
        if drawing and not any("lots" in own for own in over):
            return "other_loader"
        drawn = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call)
                 and last_name(node.func) == "next" and node.args]  # fmt: skip
        if not drawing and not any("lots" in self.kinds.kinds(node.args[0]) for node in drawn):
            return "its lots are not known to be those of the private loader"
        return None

    def _of_backward(self, call: ast.Call) -> str | None:
        place = innermost_loop(self.script, call)
        scope = self.script.scope_of(call)
        for step, owner in self.script.method_calls("step"):
            if "private" in self.kinds.kinds(owner) or step in self.values.updates:
                same = innermost_loop(self.script, step) is place
                if (same and self.script.scope_of(step) is scope) or place is None:
                    return None
                if self._calls_within(place, step):
                    return None
        if not any(self.script.method_calls("step")):
            return None
        return "it forms gradients outside of the private step"

    def _calls_within(self, place: ast.AST | None, step: ast.AST) -> bool:
        """Whether a loop calls the function that steps."""
        function = self.script.scope_of(step)
        return place is not None and any(
            isinstance(node, ast.Call) and function in self.kinds.functions(node.func)
            for node in ast.walk(place)
        )

    def _taken(self, use: Use, passed: list[tuple[int | str, ast.expr]]) -> str | None:
        """Say why an argument is not one that a use may be given."""
        known = use.keywords.split()
        for place, item in passed:
            if known and isinstance(place, str) and place not in known:
                return f"its option {place} is not known to be harmless"
            own = self.kinds.kinds(item)
            bad = [kind for kind in sorted(own - {"undefined"}) if not use.accepts(kind, place)]
            if bad:
                return f"it is given the {_words(frozenset(bad))}"
        return None

    def _of_function(
        self, call: ast.Call, passed: list[tuple[int | str, ast.expr]], taken: Kinds
    ) -> str | None:
        name = last_name(call.func) or ""
        root = root_of(call.func)
        bound = self.script.bindings_of(root) if isinstance(root, ast.Name) else [None]
        if not bound:
            # A builtin, or an error when it runs, unless a star import binds it.
            known = name in NAMES["reading_builtins"] or not self.script.star_import_lines
            return None if known else f"it is given the {_words(taken)}"
        if name in NAMES["iterators"] and self.script.comes_from(
            call.func, ("tqdm", "rich", "itertools")
        ):
            return None
        if self.kinds.is_source(call):
            return None
        use = find_function(self.script, call)
        if use is not None:
            return self._taken(use, passed)
        if isinstance(call.func, ast.Attribute):
            if name in ("append", "extend", "add", "update", "insert", "setdefault", "get", "pop"):
                made = [item for item in bound if item is not None]
                if made and not any(isinstance(item.node, ast.alias) for item in made):
                    return None  # of a list or dictionary
            if taken <= SECRETS | {"model"} and name in NAMES["loggers"]:
                return None
        if taken <= {"differentiator"} & self.kinds.kinds(call):
            return None
        if taken <= SECRETS and self.script.comes_from(call.func, NAMES["numerical_packages"]):
            if name in ("save", "savez", "savetxt", "dump", "to_csv", "DataLoader"):
                return f"it is given the {_words(taken)}"
            return None
        return f"it is given the {_words(taken)}"

    def _arguments(self, call: ast.Call) -> Iterator[tuple[int | str, ast.expr]]:
        for i, item in enumerate(call.args):
            yield i, item.value if isinstance(item, ast.Starred) else item
        for keyword in call.keywords:
            yield keyword.arg or "**", keyword.value

    # ---- lots that a script draws itself -------------------------------------------------

    def _of_lot(self, node: ast.Subscript) -> str | None:
        """Say why a lot that a loop takes from the records may be that of another step."""
        if "data" not in self.kinds.kinds(node.value) or not self.values.updates:
            return None
        loops = [o for o in self.script.ancestors(node) if isinstance(o, ast.For | ast.While)]
        inner = next(iter(loops), None)
        if inner is None or self.script.scope_of(inner) is not self.script.scope_of(node):
            return None
        if not any(step in ast.walk(inner) for step in self.values.updates):
            return None
        drawn: list[ast.expr | None] = [node.slice]
        if isinstance(node.slice, ast.Name):
            drawn += [item.value for item in self.script.bindings_of(node.slice)]
        if any(self.kinds.may_repeat(item) for item in drawn if item is not None):
            return "it may take a record twice"
        if any(may_know_lots(self.values, item) for item in drawn if item is not None):
            return "a reader of the seed knows the lots"
        if self._depends(node.slice, inner, 0):
            return None
        return "it takes the same records in each step"

    def _depends(self, node: ast.expr, loop: ast.For | ast.While, depth: int) -> bool:
        """Whether an index is drawn, or counted, in each turn of a loop."""
        targets = names_in(loop.target) if isinstance(loop, ast.For) else set()
        for part in ast.walk(node):
            if isinstance(part, ast.Call):
                return True
            if not isinstance(part, ast.Name):
                continue
            if part.id in targets:
                return True
            for item in self.script.bindings_of(part):
                around = loop in self.script.ancestors(item.node)
                if around and (item.value is None or (depth < 5 and
                               self._depends(item.value, loop, depth + 1))):  # fmt: skip
                    return True
        return False

    # ---- names, attributes and code ------------------------------------------------------

    def _of_stores(self, targets: list[ast.expr], value: ast.expr) -> Iterator[tuple[ast.AST, str]]:
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
                        yield target, f"records decide what the {_words(kinds & HANDLES)} gets"
                    elif kinds & {"private", "engine", "optimizer"}:
                        yield target, f"it changes the {_words(kinds)}"
                    elif not kinds & HANDLES and (
                        changed := self._whole(target) & {"private", "engine", "optimizer"}
                    ):
                        yield target, f"it changes the {_words(changed)}"
                    elif self._is_outside(base) and self._is_raw(value):
                        yield target, "it writes records"
                    elif kinds & {"data", "lots"} and own & SECRETS:
                        yield target, "it changes the records"
                case ast.Name():
                    if (why := self._of_rebinding(target)) is not None:
                        yield target, why

    def _of_other_store(self, target: ast.Attribute | ast.Subscript) -> str | None:
        """Say why deleting a part of an object, or storing one by a loop, may change it."""
        changed = self._whole(target) & (HANDLES | {"lots", "data"}) - {"holder", "criterion"}
        return f"it changes the {_words(changed)}" if changed else None

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
            return f"it changes the {_words(changed)}"
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
        if own & SECRETS and self._is_imported([target]):
            return "another file may read it"
        keras = self.kinds.library.key.startswith("tensorflow")
        if keras and name == "optimizer" and not own_part:
            return "a model may get another optimiser"
        return None

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
        return f"it gives the name of the {_words(was)} another object"

    def _of_attribute(self, node: ast.Attribute) -> str | None:
        if may_know_seed(self.values, node):
            return KNOWN_SEED
        if node.attr == "fork_rng" and not self._is_with(node):
            return "the noise may be that of another step"
        base = self.kinds.kinds(node.value)
        outer = self.script.parents[node]
        if isinstance(outer, ast.Call) and outer.func is node:
            return None
        named = node.attr == "__class__" and getattr(outer, "attr", "") == "__name__"
        if node.attr in ("__dict__", "__class__") and base and not named:
            return "it may change any part of the object"
        if node.attr in NAMES["gradients"] and not self._is_imported([node]):
            harmless = isinstance(outer, ast.Compare) or self._is_printed(node)
            return None if harmless else "it reads gradients that no noise covers"
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

    def _is_with(self, node: ast.AST) -> bool:
        """Whether a call of a reference is only what a ``with`` statement enters."""
        return isinstance(self.script.parents.get(self.script.parents[node]), ast.withitem)

    def _is_printed(self, node: ast.AST) -> bool:
        """Whether an expression is only a part of what is printed or logged."""
        calls = [o for o in self.script.ancestors(node) if isinstance(o, ast.Call)]
        return any(
            last_name(call.func) in (*NAMES["loggers"], "print") and node not in ast.walk(call.func)
            for call in calls
        )

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

    def _of_reference(self, node: ast.Name) -> str | None:
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
        return self._of_code(node, definition)

    def _of_namespace(self, node: ast.Name) -> str | None:
        call = self.script.parents[node]
        outer = self.script.parents.get(call)
        if not isinstance(call, ast.Call) or call.func is not node:
            return "it may change any name"
        if call.args:
            own = self.kinds.kinds(call.args[0])
            return "it may change any part of the object" if own else None
        reads = isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Load)
        prints = isinstance(outer, ast.Call) and last_name(outer.func) in ("print", "info", "dict")
        return None if reads or prints else "it may change any name"

    def _of_code(self, node: ast.expr, code: ast.AST) -> str | None:
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

    def _of_shared(self, node: ast.AST, names: list[str]) -> str | None:
        own = self.script.scope_of(node)
        for name in names:
            for (scope, bound), bindings in self.script.bindings.items():
                if bound != name:
                    continue
                kinds = frozenset().union(*(self.kinds.bound[item.node] for item in bindings))
                if (kinds | self.kinds.held[scope, name]) & (HANDLES | {"lots"}):
                    return f"{name} is set in {getattr(own, 'name', 'a function')}, at any time"
        return None

    def _of_definition(self, node: ast.FunctionDef) -> str | None:
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

    def _of_exit(self, node: ast.AST) -> str | None:
        test = self.kinds.deciding(node)
        function = self.script.scope_of(node)
        layer = getattr(function, "name", "") in ("forward", "call")
        owner = self.script.parents.get(function)
        if isinstance(node, ast.Return) and layer and self.kinds.is_model_class(owner or function):
            made = NOTHING if node.value is None else self.kinds.kinds(node.value)
            if "value" in made:
                return "a layer may join the records of a lot"
        if isinstance(node, ast.Return) and node.value is not None:
            handed = self.kinds.kinds(node.value)
            name = getattr(function, "name", "")
            if name == "configure_optimizers" and "optimizer" in handed:
                return "other_optimizer"
        if isinstance(node, ast.Raise) and node.exc is not None:
            carried = self.kinds.kinds(node.exc) & (HANDLES | {"lots"})
            if carried - {"scheduler", "criterion"}:
                return "what catches it gets private objects"
        if isinstance(node, ast.Assert):
            if self.kinds.runs_before(node):
                return None  # a check of the form of the records, before any of them is used
            own = self.kinds.kinds(node.test) & SECRETS
            return "records decide whether it goes on" if own else None
        if test is None:
            return None
        if isinstance(node, ast.Return):
            function = self.script.scope_of(node)
            if not self._steps_within(function):
                return None
        elif isinstance(node, ast.Break | ast.Continue):
            loop = innermost_loop(self.script, node)
            if loop is not None and not self._steps_within(loop):
                return None
        return f"records decide where it leaves ({source_text(test)})"

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


WORDS = {"private": "private optimiser", "optimizer": "optimiser", "data": "records",
         "lots": "private loader", "lot": "lot", "rows": "lot", "value": "values of records",
         "count": "size of a lot", "code": "function"}  # fmt: skip


def _words(kinds: Kinds) -> str:
    """Return the names of kinds in words."""
    return " and ".join(dict.fromkeys(WORDS.get(kind, kind) for kind in sorted(kinds)))


def _is_constant(call: ast.Call) -> bool:
    return all(isinstance(item, ast.Constant) for item in call.args) and last_name(
        call.func
    ) not in ("exec", "eval")
