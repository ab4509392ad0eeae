"""Say which calls are no understood use of a private object, by the table of uses."""

from __future__ import annotations

import ast
import re

from affidavit.importers.libraries import OPACUS
from affidavit.importers.names import NAMES
from affidavit.importers.scripts.object_kinds import ObjectKinds, is_imported, is_own, is_writer
from affidavit.importers.scripts.row_kinds import NOTHING, Kinds
from affidavit.importers.scripts.step_count import (
    enclosing_loops,
    optimizer_steps,
    runs_once,
    unwrap_iterable,
)
from affidavit.importers.scripts.syntax import (
    calls_any,
    innermost_loop,
    keywords_of,
    last_name,
    root_of,
)
from affidavit.importers.scripts.use_table import (
    HANDLES,
    SECRETS,
    Use,
    arguments_of,
    find_function,
    find_method,
    words_of,
)
from affidavit.importers.scripts.values import source_text

KNOWN_SEED = "a reader of the seed knows the noise"


class CallUses:
    """The uses of private objects by the calls of a script."""

    def __init__(self, kinds: ObjectKinds, *, draws_lots: bool) -> None:
        self.kinds, self.script, self.values = kinds, kinds.script, kinds.values
        self.draws_lots = draws_lots
        """Whether the private loader must draw the lots of each step."""

    def of_call(self, call: ast.Call) -> str | None:
        """Say why a call is no understood use, if it is none."""
        passed = list(arguments_of(call))
        taken = frozenset().union(*(self.kinds.kinds(item) for _, item in passed))
        function = call.func
        name = last_name(function) or ""
        base = self.kinds.kinds(function.value) if isinstance(function, ast.Attribute) else NOTHING
        if self.kinds.is_private(call):
            return self._of_private_call(call)
        if call in self.values.elsewhere:
            other = taken & {"private", "lots", "lot", "rows", "loss", "value"}
            return f"it is given the {words_of(other)}" if other else None
        builtin = isinstance(function, ast.Name) and not self.script.bindings_of(function)
        tells = name in NAMES["tells"] and not (base | taken) & HANDLES
        if not tells and (test := self.kinds.deciding(call)) is not None:
            return f"records decide whether it runs ({source_text(test)})"
        if not isinstance(function, ast.Attribute) and self.kinds.kinds(function) & SECRETS:
            return "records decide what it runs"
        if "out" in keywords_of(call):
            return "it changes what it is given"
        if self._is_given_folder(call, name):
            return "it is given the files of the records"
        if is_writer(call) and taken & SECRETS:
            return "it writes what is of records"
        if self._reads_again(call, name):
            return "it may read what the training wrote"
        if builtin and name in ("map", "filter", "reduce") and taken & SECRETS:
            return "what it runs decides by records"
        if self._starts_program(call, name):
            return "the program that it runs is not read"
        along = self.values.known_value(keywords_of(call).get("batch_first")) is not True
        layer = name in NAMES["sequence_layers"]
        if layer and along and self.script.comes_from(function, ("torch", "opacus")):
            return "without batch_first=True it goes along the records of a lot"
        callee = self.kinds.kinds(function)
        named = not isinstance(function, ast.Attribute)
        if callee & {"model", "criterion"} and (named or self.kinds.is_part(function, callee)):
            bad = taken - SECRETS - {"model", "criterion"}
            return f"it is given the {words_of(bad)}" if bad else None
        if builtin and name in ("next", "iter") and taken & {"data", "lots"}:
            around = (o for o in self.script.ancestors(call) if isinstance(o, ast.For))
            if any(call not in ast.walk(o.iter) and self.kinds.kinds(o.iter) & {"lots", "lot"}
                   for o in around):  # fmt: skip
                return "it draws another lot in the step of one"
        if (why := self._of_keras(call, name)) is not None:
            return why
        if taken & {"lots"} and builtin and name in ("list", "tuple", "sorted", "set", "dict"):
            return "it keeps lots, which may be used again"
        if is_own(self.kinds, call):
            handed = taken & HANDLES - {"model", "criterion", "holder"}
            # A class without a constructor in this file keeps what it is given.
            keeps = handed and not self.kinds.functions(function)
            return f"it is given the {words_of(handed)}" if keeps else None
        if (
            base == {"holder"}
            and name not in NAMES["container_methods"]
            and not is_imported(self.script, [function])
        ):
            return f"it may use what {source_text(root_of(function))} holds"
        if isinstance(function, ast.Attribute) and base:
            return self._of_method(call, base, name, passed)
        if isinstance(getattr(function, "value", None), ast.Constant):
            return None  # "...".format(...)
        use = find_function(self.script, call)
        if use is not None and use.keywords:
            return self._taken(use, passed)
        if not taken:
            return None
        return self._of_function(call, passed, taken)

    def of_effect(self, call: ast.Call) -> str | None:
        """Say why a call whose result is not used may write or change records.

        It only runs for what it does, so that a function of values alone does not explain it.
        """
        function, name = call.func, last_name(call.func) or ""
        if isinstance(function, ast.Attribute) and (base := self.kinds.kinds(function.value)):
            known = name in (*NAMES["container_methods"], "backward") or name.endswith("_")
            changes = base <= SECRETS and find_method("data", name) is None and not known
            return "it may write or change records" if changes else None
        if (
            self.script.comes_from(function, NAMES["numerical_packages"])
            and not self.script.comes_from(function, NAMES["telling_packages"])
            and find_function(self.script, call) is None
        ):
            taken = frozenset().union(*(self.kinds.kinds(i) for _, i in arguments_of(call)))
            return "it may write or change records" if taken & SECRETS else None
        return None

    def _reads_again(self, call: ast.Call, name: str) -> bool:
        """Whether a call reads a file, or a log, once the training may have written it."""
        mode = next(iter(call.args[1:]), keywords_of(call).get("mode"))
        writes = name == "open" and not str(getattr(mode, "value", "r")).startswith("r")
        groups = ("file_readers", "file_facts", "log_readers")
        reads = any(name in NAMES[group] for group in groups) and not writes
        source = self.kinds.sources.reads(call) or call in self.kinds.sources.calls
        return reads and not (source or self.kinds.runs_before(call))

    def _is_given_folder(self, call: ast.Call, name: str) -> bool:
        """Whether a call that is not known to read data sets gets the path of the records."""
        sources = self.kinds.sources
        own = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        passed = [*own, *(item for _, item in arguments_of(call))]
        if not any(map(sources.names_folder, passed)):
            return False
        groups = ("paths", "path_functions", "file_facts", "reading_builtins", "loggers")
        listed = any(name in NAMES[group] for group in groups) and name not in NAMES["writers"]
        reads = self.script.comes_from(call.func, NAMES["data_packages"]) or sources.reads(call)
        return not (listed or reads or is_own(self.kinds, call))

    def _starts_program(self, call: ast.Call, name: str) -> bool:
        """Whether a call starts a program that may train, or release records."""
        known, packages = NAMES["other_programs"], ("os", "subprocess", "pty")
        if name == "get_ipython":  # whose shell runs programs, files and texts by its methods
            outer = self.script.parents[self.script.parents[call]]
            if not isinstance(outer, ast.Call) or not isinstance(outer.func, ast.Attribute):
                return True
            call, name = outer, outer.func.attr
            if name in ("run_line_magic", "run_cell_magic"):
                known = NAMES["plain_magics"]
            elif name not in ("system", "getoutput"):
                return True
        elif name not in NAMES["program_starters"] or not self.script.comes_from(
            call.func, packages
        ):
            return False
        first = call.args[0] if call.args else keywords_of(call).get("args")
        if isinstance(first, ast.List | ast.Tuple) and first.elts:
            first = first.elts[0]
        return not _starts_listed(first, known)

    def _of_keras(self, call: ast.Call, name: str) -> str | None:
        """Say why Keras may train with another optimiser, loss or layer than one that is known."""
        library = self.kinds.library.key
        if not library.startswith(("tensorflow", "jax_keras")):
            return None
        if name == "Lambda":
            return "a layer of its own may join the records of a lot"
        compiles = self.script.calls_to("compile")
        if name != "compile" or call is not max(compiles, key=lambda item: item.lineno):
            return None
        rule, loss = (
            keywords_of(call).get(key, next(iter(call.args[i : i + 1]), None))
            for i, key in enumerate(("optimizer", "loss"))
        )
        # The steps of jax_privacy's make_private replace those of the model.
        private = self.kinds.returned_by_private_call() == {"private"} and library != "jax_keras"
        own = NOTHING if rule is None else self.kinds.kinds(rule)
        if private and "private" not in own and not self.kinds.is_of_other_call(rule):
            return "other_optimizer"
        made = loss and (self.values.origin_of(loss) or loss)
        packages = ("tensorflow", "keras")
        if not isinstance(made, ast.Constant | None) and not self.script.comes_from(
            getattr(made, "func", made), packages
        ):
            return "a loss of its own may join the records of a lot"
        return None

    def _of_private_call(self, call: ast.Call) -> str | None:
        if self.kinds.library is OPACUS:
            module, engine = keywords_of(call).get("module"), getattr(call.func, "value", None)
            for kind, part in (("model", module), ("engine", engine)):
                if part is not None and not self._is_made(part, kind):
                    return f"the {kind} {source_text(part)} is not made by code that is read"
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

    def _is_made(self, node: ast.expr, kind: str) -> bool:
        """Whether code that is read makes an object, wherever its name gets a value."""
        root = root_of(node)
        if isinstance(root, ast.Name) and not self.script.bindings_of(root):
            return True  # an error, or what a part of a script leaves out
        bindings = self.script.bindings_of(node) if isinstance(node, ast.Name) else []
        values = [self.kinds.bound[item.node] for item in bindings
                  if not (self.values.is_set_by_private_call(item.node)
                          or isinstance(item.value, ast.Constant))]  # fmt: skip
        return all(kind in own for own in (self.kinds.kinds(node), *values))

    def _of_method(
        self, call: ast.Call, base: Kinds, name: str, passed: list[tuple[int | str, ast.expr]]
    ) -> str | None:
        known = {"data", "lots"} | ({"loss"} if name == "backward" else NOTHING)
        if base <= SECRETS - known:
            if name == "backward":
                return "its loss is not one term for each record"
            if name.endswith("_") and "value" in self.kinds.kinds(call):
                return "it may join the records of a lot"
            bad = frozenset().union(*(self.kinds.kinds(item) for _, item in passed)) - SECRETS
            bad -= {"model"}
            return f"it is given the {words_of(bad)}" if bad else None
        for kind in sorted(base - {"holder"}):
            if kind in ("value", "rows", "size", "count", "lot") and name != "backward":
                continue
            use = find_method(kind, name)
            if use is None:
                own = words_of(frozenset([kind]))
                return f"{name} of the {own} is not a use that is understood"
            if (why := self._taken(use, passed)) is not None:
                return why
            if name == "load_state_dict" and not any(
                "model" in self.kinds.kinds(item) for _, item in passed
            ):
                return "the weights that it loads may be of records"
            if name == "map" and "batched" in keywords_of(call):
                return "it may make several rows of one"
        if name == "step" and (why := self._of_step(call, base)) is not None:
            return why
        if name == "update" and "private" in base and self.kinds.library.methods:
            return "whether it is given one gradient for each record is not read"
        if name == "backward":
            return self._of_backward(call)
        return None

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
        drawn = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call)
                 and last_name(node.func) == "next" and node.args]  # fmt: skip
        turns = {innermost_loop(self.script, node) for node in drawn}
        drawing = [i for i, own in enumerate(over) if own & {"data", "lots"}]
        fresh = [i for i, loop in enumerate(loops) if i in drawing or loop in turns]
        inner = loops[: fresh[0]] if fresh else []
        if any(
            not (isinstance(loop, ast.For) and runs_once(self.values, loop.iter))
            and not calls_any(loop, "next")
            for loop in inner
        ):
            return "reused_lots"
        if self.kinds.library is not OPACUS or not self.draws_lots or not loops:
            return None
        if drawing and not any("lots" in own for own in over):
            return "other_loader"
        if not drawing and not any("lots" in self.kinds.kinds(node.args[0]) for node in drawn):
            return "its lots are not known to be those of the private loader"
        return None

    def _of_backward(self, call: ast.Call) -> str | None:
        place, steps = innermost_loop(self.script, call), self.script.method_calls("step")
        scope = self.script.scope_of(call)
        near = any(
            ("private" in self.kinds.kinds(owner) or step in self.values.updates)
            and (place is None or innermost_loop(self.script, step) is place)
            and (place is None or self.script.scope_of(step) is scope)
            for step, owner in steps
        )
        return None if near or not steps else "it forms gradients outside of the private step"

    def _taken(self, use: Use, passed: list[tuple[int | str, ast.expr]]) -> str | None:
        """Say why an argument is not one that a use may be given."""
        known = use.keywords.split()
        for place, item in passed:
            if known and isinstance(place, str) and place not in known:
                return f"its option {place} is not known to be harmless"
            own = self.kinds.kinds(item)
            bad = [kind for kind in sorted(own) if not use.accepts(kind, place)]
            if bad:
                return f"it is given the {words_of(frozenset(bad))}"
        return None

    def _of_function(
        self, call: ast.Call, passed: list[tuple[int | str, ast.expr]], taken: Kinds
    ) -> str | None:
        name = last_name(call.func) or ""
        root = root_of(call.func)
        bound = self.script.bindings_of(root) if isinstance(root, ast.Name) else [None]
        if not bound:
            # A builtin, or an error when it runs, unless a star import binds it.
            known = name in NAMES["reading_builtins"] or "*" not in self.script.imported
            return None if known else f"it is given the {words_of(taken)}"
        if name in NAMES["iterators"] and self.script.comes_from(
            call.func, ("tqdm", "rich", "itertools")
        ):
            return None
        if self.kinds.sources.reads(call):
            return None
        use = find_function(self.script, call)
        if use is not None:
            return self._taken(use, passed)
        if isinstance(call.func, ast.Attribute):
            places = [item.node for item in bound if item is not None]
            imported = any(isinstance(item, ast.alias) for item in places)
            if places and not imported and name in NAMES["container_methods"]:
                return None  # of a list or dictionary
            if taken <= SECRETS | {"model"} and name in NAMES["loggers"]:
                return None
        if taken <= SECRETS and self.script.comes_from(call.func, NAMES["numerical_packages"]):
            drawn = self.script.comes_from(call.func, ("matplotlib",))
            if drawn and (name not in NAMES["curves"] or self._is_made_of_records(call)):
                return "it draws what is of records"
            if name in ("save", "savez", "savetxt", "dump", "to_csv", "DataLoader"):
                return f"it is given the {words_of(taken)}"
            return None
        return f"it is given the {words_of(taken)}"

    def _is_made_of_records(self, call: ast.Call) -> bool:
        """Whether records, and not only what a model makes of them, stand in an argument."""
        parts = [part for _, item in arguments_of(call) for part in ast.walk(item)
                 if isinstance(part, ast.expr)]  # fmt: skip
        made = [part for item in filter(None, map(self.values.origin_of, parts))
                for part in ast.walk(item) if isinstance(part, ast.expr)]  # fmt: skip
        return any(self.kinds.kinds(i) & {"data", "lots", "lot", "rows"} for i in (*parts, *made))

    def of_lot(self, node: ast.Subscript) -> str | None:
        """Say why a lot that a loop takes from the records may be that of another step."""
        if "data" not in self.kinds.kinds(node.value) or isinstance(node.slice, ast.Constant):
            return None
        steps = optimizer_steps(self.values)
        loops = {loop for step in steps for loop in enclosing_loops(self.values, step)}
        if loops.isdisjoint(self.script.ancestors(node)):
            return None
        return "how it draws the records of a lot is not known"


def _starts_listed(command: ast.expr | None, known: tuple[str, ...]) -> bool:
    """Whether a command of a shell is known to start programs of these alone."""
    text = str(getattr(command, "value", ""))
    parts = [part.split() for part in re.split(r"[;&|\n]+", text)]
    named = [part[0] for part in parts if part and not part[0].startswith("#")]
    return bool(named) and not set("$`") & set(text) and set(named) <= {*known}
