"""Ask about every use of a private object that is not on the allow-list.

Everything but the uses in ``uses.toml`` may train more, release records, or change what the private
call set up. It is an open question, which a comment about its line, or a replay, answers::

    warm_up(model)  # affidavit: harmless=reads_no_records
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache, cached_property

from affidavit.importers.libraries import FAULTS, OPACUS
from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import OpenUse
from affidavit.importers.scripts.conditions import is_reached
from affidavit.importers.scripts.loop_faults import divided_losses
from affidavit.importers.scripts.model_parts import ModelParts
from affidavit.importers.scripts.object_kinds import ObjectKinds, is_own, whole_of
from affidavit.importers.scripts.repository import leading_definitions, modules_of
from affidavit.importers.scripts.row_code import TOKENIZERS, uses_of_row_code
from affidavit.importers.scripts.row_kinds import NOTHING, VALUE, Kinds
from affidavit.importers.scripts.step_count import (
    enclosing_loops,
    optimizer_steps,
    passes_around,
    runs_once,
    unwrap_iterable,
)
from affidavit.importers.scripts.syntax import (
    KNOWN_PACKAGES,
    Binding,
    Script,
    calls_any,
    innermost_loop,
    keywords_of,
    last_name,
    loops_around,
    package_of,
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
from affidavit.importers.scripts.values import Evaluator, NotSet, is_left_out, source_text

Passed = list[tuple[int | str, ast.expr]]
KNOWN_SEED = "a reader of the seed knows the noise"
SEEDING = ("seed", "determinis", "reproduc")
"""Parts of the names of functions, or of the files, that seed generators."""


def find_uses(
    kinds: ObjectKinds, call: ast.Call, others: Iterable[tuple[ast.AST, str]], *, draws_lots: bool
) -> tuple[tuple[OpenUse, ...], list[tuple[ast.AST, str]]]:
    """Return the uses that are not understood, by line, with ``others``, and keys of faults."""
    questions, faults = dict[ast.AST, dict[str, int]](), list[tuple[ast.AST, str]]()
    """What is asked of each statement, which one comment answers."""
    values, script = kinds.values, kinds.script
    followed = not script.dynamic and is_reached(script, call)
    reached = cache(lambda scope: is_reached(script, next(ast.iter_child_nodes(scope), scope)))
    for node, why in (*Uses(kinds, draws_lots=draws_lots).open_uses(), *others):
        line = getattr(node, "lineno", call.lineno)
        unreached = followed and not reached(script.scope_of(node))
        answered = script.harmless.keys() & {*_lines_of(kinds.statement(node))}
        if unreached or answered or is_left_out(values, node):
            continue
        if why in FAULTS:
            faults.append((node, why))
        else:
            texts = questions.setdefault(kinds.statement(node), {})
            texts.setdefault(f"line {line}: {source_text(node)}: {why}", line)
    uses = [OpenUse(line=min(texts.values()), message="; ".join(texts) + ".")
            for texts in questions.values()]  # fmt: skip
    return tuple(sorted(uses, key=lambda use: use.line)), faults


def _lines_of(outer: ast.AST) -> range:
    """Return the lines of a statement, without the statements inside it."""
    body, first = getattr(outer, "body", None), getattr(outer, "lineno", 1)
    last = body[0].lineno - 1 if body else getattr(outer, "end_lineno", 1)
    return range(first, max(first, last or first) + 1)


class Uses:
    """The uses of private objects in a script."""

    def __init__(self, kinds: ObjectKinds, *, draws_lots: bool) -> None:
        self.kinds, self.script, self.values = kinds, kinds.script, kinds.values
        self.draws_lots = draws_lots
        """Whether the private loader must draw the lots of each step."""

    def open_uses(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield the nodes that are no understood use, with the reason."""
        yield from uses_of_row_code(self.kinds)
        yield from ModelParts(self.kinds).questions()
        yield from divided_losses(self.values)
        if "" in self._seeding:
            yield self.kinds.call, f"another file seeds as it is imported: {KNOWN_SEED}"
        for call in self.kinds.sources.unread:
            yield call, "what another file computes of the records is not read"
        for origin, line in self.kinds.joined.items():
            yield origin, f"it computes records that line {line} takes"
        for node in self.script.nodes:
            match node:
                case ast.Call():
                    why = self.of_call(node)
                case ast.Expr(value=ast.Call() as call):
                    why = self.of_effect(call)
                case ast.Expr(value=value) if self.kinds.kinds(value) & SECRETS and not (
                    isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant)
                    and self.kinds.kinds(value.value) <= {"data", "lots"}
                ):  # fmt: skip
                    why = "records decide whether it fails"
                case ast.Attribute(ctx=ast.Del()) | ast.Subscript(ctx=ast.Del()):
                    whole = self.kinds.kinds(whole_of(node)) & (HANDLES | {"lots", "data"})
                    changed = whole - {"holder", "criterion"}
                    why = f"it changes the {words_of(changed)}" if changed else None
                case ast.Attribute(attr=name) | ast.alias(name=name) if name in NAMES["reflection"]:
                    why = "it may reach or change any object"
                case ast.Name(ctx=ctx) | ast.Attribute(ctx=ctx) | ast.Subscript(ctx=ctx) if (
                    isinstance(ctx, ast.Store)
                ):
                    why = self.of_store(node)
                case ast.Attribute() | ast.Name(ctx=ast.Load()):
                    why = self.of_reference(node)
                case ast.Lambda():
                    why = self.of_code(node, node)
                case ast.Global(names=names) | ast.Nonlocal(names=names):
                    why = self.of_shared(node, names)
                case ast.Subscript(ctx=ast.Load()):
                    why = self.of_lot(node)
                case ast.Break() | ast.Continue() | ast.Return() | ast.Raise() | ast.Assert():
                    why = self.of_exit(node)
                case _ if self.gives_another_meaning(node):
                    why = "it gives a name another meaning"
                case ast.FunctionDef():
                    why = self.of_definition(node)
                case ast.AsyncFor() | ast.AsyncWith():
                    why = "what it waits for is not followed"
                case ast.While(test=test) if self.kinds.kinds(test) & SECRETS:
                    why = "records decide how often it runs"
                case ast.Match(part) | ast.Yield(part) | ast.YieldFrom(part) | ast.Await(part) if (
                    part and self.kinds.kinds(part)
                ):
                    why = "what takes it is not followed"
                case _:
                    why = None
            if why is not None:
                yield node, why

    def of_call(self, call: ast.Call) -> str | None:
        """Say why a call is no understood use, if it is none."""
        passed = list(arguments_of(call))
        taken = self.kinds.of_arguments(call)
        function = call.func
        name = last_name(function) or ""
        base = self.kinds.kinds(function.value) if isinstance(function, ast.Attribute) else NOTHING
        if self.kinds.is_private(call):
            return self._of_private_call(call)
        if call in self.values.elsewhere:
            other = taken & {"private", "lots", "lot", "rows", "loss", "value"}
            return f"it is given the {words_of(other)}" if other else None
        builtin = isinstance(function, ast.Name) and not self.script.bindings_of(function)
        tells = name in NAMES["tells"] and not self.kinds.functions(function)
        numerical = self.script.comes_from(function, NAMES["numerical_packages"])
        tells |= numerical and not isinstance(self.script.parents[call], ast.Expr)
        tells |= isinstance(self.script.parents[call], ast.Raise)
        tells &= name not in NAMES["folder_makers"] or not self._looks_elsewhere(call)
        tells = tells and not (base | taken) & HANDLES
        if not tells and (test := self._deciding(call)) is not None:
            return f"records decide whether it runs ({source_text(test)})"
        callee, named = self.kinds.kinds(function), not isinstance(function, ast.Attribute)
        if named and callee & SECRETS:
            return "records decide what it runs"
        if self.kinds.draws(function) and name not in NAMES["pictures"] and not (
            taken & HANDLES - {"model", "holder"}
        ):  # fmt: skip
            return None
        batched = name == "map" and "batched" in keywords_of(call) and not self._tokenizes(passed)
        if batched and "data" in base | self.kinds.kinds(call):
            return "it may make several rows of one"
        if "out" in keywords_of(call):
            return "it changes what it is given"
        if self._is_given_folder(call, name):
            return "it is given the files of the records"
        writes = name in NAMES["writers"] or (name == "print" and "file" in keywords_of(call))
        if (writes and taken & SECRETS) or (name in NAMES["pictures"] and self._drawn & SECRETS):
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
        if callee & {"model", "criterion"} and (named or self.kinds.is_part(function, callee)):
            bad = taken - SECRETS - {"model", "criterion"}
            return f"it is given the {words_of(bad)}" if bad else None
        if builtin and name in ("next", "iter") and taken & {"data", "lots"}:
            around = (o for o in self.script.ancestors(call) if isinstance(o, ast.For))
            if any(call not in ast.walk(o.iter) and self.kinds.kinds(o.iter) & {"lots", "lot"}
                   for o in around):  # fmt: skip
                return "it draws another lot in the step of one"
        fits = self.script.method_calls("fit", "fit_transform") if name == "transform" else ()
        fitted = {place for _, owner in fits for place in self.script.places_of(owner)}
        places = self.script.places_of(getattr(function, "value", call))
        if "data" not in base and fitted & {*places}:
            return None  # it is asked what it fits
        if (why := self._of_keras(call)) is not None:
            return why
        if taken & {"lots"} and builtin and name in ("list", "tuple", "sorted", "set", "dict"):
            return "it keeps lots, which may be used again"
        if is_own(self.kinds, call):
            handed = taken & HANDLES - {"model", "criterion", "holder"}
            # A class without a constructor in this file keeps what it is given.
            keeps = handed and not self.kinds.functions(function)
            return f"it is given the {words_of(handed)}" if keeps else None
        known = name in NAMES["container_methods"] or self.script.is_imported(function)
        if base == {"holder"} and not known:
            return f"it may use what {source_text(root_of(function))} holds"
        if isinstance(function, ast.Attribute) and base:
            return self._of_method(call, base, name, passed)
        text = isinstance(getattr(function, "value", None), ast.Constant)  # "...".format(...)
        return self._of_function(call, passed, taken) if taken and not text else None

    def of_effect(self, call: ast.Call) -> str | None:
        """Say why a call that only runs for what it does may write or change records."""
        function, name, script = call.func, last_name(call.func) or "", self.script
        base = self.kinds.kinds(function.value) if isinstance(function, ast.Attribute) else NOTHING
        if self.kinds.draws(function):
            return None
        if base:
            known = name in (*NAMES["container_methods"], "backward") or name.endswith("_")
            changes = base <= SECRETS and find_method("data", name) is None and not known
        else:
            only_tells = script.comes_from(function, NAMES["telling_packages"])
            computes = script.comes_from(function, NAMES["numerical_packages"]) and not only_tells
            taken = computes and self.kinds.of_arguments(call) & SECRETS
            changes = bool(taken) and find_function(script, call) is None
        return "it may write or change records" if changes else None

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
        known = NAMES["other_programs"]
        starts = self.script.comes_from(call.func, ("os", "subprocess", "pty"))
        if name == "get_ipython":  # whose shell runs programs, files and texts by its methods
            outer = self.script.parents[self.script.parents[call]]
            if not isinstance(outer, ast.Call) or not isinstance(outer.func, ast.Attribute):
                return True
            call, name = outer, outer.func.attr
            if name in ("run_line_magic", "run_cell_magic"):
                known = NAMES["plain_magics"]
            elif name not in ("system", "getoutput"):
                return True
        elif name not in NAMES["program_starters"] or not starts:
            return False
        first = call.args[0] if call.args else keywords_of(call).get("args")
        if isinstance(first, ast.List | ast.Tuple) and first.elts:
            first = first.elts[0]
        return not _starts_listed(first, known)

    def _of_keras(self, call: ast.Call) -> str | None:
        """Say why Keras may train with another optimiser, loss or layer than one that is known."""
        library = self.kinds.library.key
        if not library.startswith(("tensorflow", "jax_keras")):
            return None
        compiles = filter(self._may_train, self.script.calls_to("compile"))
        if call is not max(compiles, key=lambda item: item.lineno, default=None):
            return None
        rule, loss = (keywords_of(call).get(key, next(iter(call.args[i : i + 1]), None))
                      for i, key in enumerate(("optimizer", "loss")))  # fmt: skip
        # The steps of jax_privacy's make_private replace those of the model.
        private = self.kinds.returned_by_private_call() == {"private"} and library != "jax_keras"
        own = NOTHING if rule is None else self.kinds.kinds(rule)
        if private and "private" not in own and not self.kinds.is_of_other_call(rule):
            return "other_optimizer"
        bound = self.script.bindings_of(loss) if isinstance(loss, ast.Name) else [Binding(call)]
        for made in (self.values.origin_of(item.value or loss) or loss for item in bound):
            if not isinstance(made, ast.Constant | None) and not self.script.comes_from(
                getattr(made, "func", made), ("tensorflow", "keras")
            ):
                return "a loss of its own may join the records of a lot"
        return None

    def _may_train(self, compiled: ast.Call) -> bool:
        """Whether a model may train after a call of ``compile``, and not only be evaluated."""
        script, scope, names = self.script, self.script.scope_of(compiled), NAMES["other_training"]
        fits = [node for node in script.nodes
                if isinstance(node, ast.Attribute) and node.attr in ("fit", *names)]  # fmt: skip
        once = self.values.attempt(passes_around, self.values, compiled) or ()
        return not fits or once[:2] != ("steps", 1) or any(
            node.lineno > compiled.lineno or script.scope_of(node) is not scope
            or getattr(script.parents[node], "func", None) is not node for node in fits
        )  # fmt: skip

    def _may_know_seed(self, node: ast.Name | ast.Attribute) -> bool:
        """Whether a reference to a function that seeds generators may give a known seed."""
        values, script, call = self.values, self.script, self.script.parents[node]
        run = call if isinstance(call, ast.Call) and call.func is node else None
        named = [node, *(item.value for item in script.bindings_of(node) if item.value and run)]
        paths = [path for item in named for path in script.paths_of(item)]
        if not (paths or isinstance(node, ast.Name)) and node.attr in NAMES["seeds"]:
            paths = [node.attr]  # of a generator
        if not any(self._seeds(path, run) for path in paths):
            return False
        if self.kinds.library.key.startswith("optax") and (
            node not in self.kinds.sources.made_of(self.kinds.call)
        ):
            return False  # it seeds weights, and not what the private call is given
        engines = script.calls_to("PrivacyEngine")
        if any(values.known_value(keywords_of(item).get("secure_mode")) for item in engines):
            return False
        outer = script.parents[script.parents[call]] if isinstance(call, ast.Call) else call
        if isinstance(outer, ast.Call) and last_name(outer.func) == "random_split":
            return not isinstance(getattr(node, "value", None), ast.Call)  # its own generator
        if run is None:
            return True  # what it is passed to, or named, may call it with any seed
        return not _is_secret(values, next(iter(run.args), keywords_of(run).get("seed")))

    def _seeds(self, path: str, call: ast.Call | None) -> bool:
        """Whether what has a path in a package, or another file, may seed generators of noise."""
        name, package = path.rpartition(".")[2], package_of(path)
        other = self.kinds.library.key.startswith(("tensorflow", "jax", "optax", "objax"))
        if path.startswith(() if other else ("tensorflow.random.", "jax.random.")):
            return False
        if name in NAMES["seeds"] or path == "jax.random.key":
            return True
        if call is None or package in (*NAMES["numerical_packages"], *sys.stdlib_module_names):
            return False
        if any(name in module.functions for module in self._modules):
            return name in self._seeding
        texts = (str(o) for place, item in arguments_of(call) for o in (place, last_name(item)))
        taken = package not in KNOWN_PACKAGES and any("seed" in text for text in texts)
        return taken or any(part in path.lower() for part in SEEDING)

    @cached_property
    def _seeding(self) -> set[str]:
        """The functions of other files that seed generators, and "" if importing one does."""
        names = set[str]()
        for module in self._modules:
            for call in module.calls:
                if any(self._seeds(path, None) for path in module.paths_of(call.func)):
                    names |= {getattr(top, "name", "") for top in leading_definitions(module, call)}
                    within = (ast.FunctionDef, ast.ClassDef, ast.If)  # if it is the main program
                    names |= {""} - {"" for o in module.ancestors(call) if isinstance(o, within)}
        return names

    def _of_private_call(self, call: ast.Call) -> str | None:
        engine = call.func.value if isinstance(call.func, ast.Attribute) else call
        if self.kinds.library is OPACUS and "engine" not in self.kinds.kinds(engine):
            return f"the engine {source_text(engine)} is not made by code that is read"
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

    def _of_method(self, call: ast.Call, base: Kinds, name: str, passed: Passed) -> str | None:
        known = {"data", "lots"} | ({"loss"} if name == "backward" else NOTHING)
        if base <= SECRETS - known:
            if name == "backward":
                return "its loss is not one term for each record"
            made = getattr(self.values.origin_of(getattr(call.func, "value", call)), "func", call)
            alone = last_name(made) in ("sum", "mean") and not self.kinds.functions(made)
            if name.endswith("_") and not alone and "value" in self.kinds.kinds(call):
                return "it may join the records of a lot"
            bad = self.kinds.of_arguments(call) - SECRETS - {"model"}
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
            if kind == "data" and (
                (name == "replace" and _fills(self.values, call))
                or (name == "dropna" and _drops_columns(call))
            ):
                return "it may take or drop values by those of other rows"
            if name == "fit" and self.kinds.are_shifted([item for _, item in passed]):
                return "its records start at different rows"
            of_model = any("model" in self.kinds.kinds(item) for _, item in passed)
            if name == "load_state_dict" and not of_model:
                return "the weights that it loads may be of records"
            foreign = kind == "model" and name.endswith("_") and any(
                module.calls_to(*NAMES["file_readers"]) for module in self._modules)  # fmt: skip
            if foreign and any(self.kinds.sources.imported(part)
                               for _, item in passed for part in self.kinds.sources.made_of(item)
                               if isinstance(part, ast.Name)):  # fmt: skip
                return "what another file reads may set it"
            paths = (path for _, item in passed for path in self.script.paths_of(item))
            if name == "apply" and not all(package_of(path) in KNOWN_PACKAGES for path in paths):
                return "it runs code that is not read"
        if name == "step" and (why := self._of_step(call, base)) is not None:
            return why
        if name == "update" and "private" in base and self.kinds.library.methods:
            return "whether it is given one gradient for each record is not read"
        if name == "backward":
            return self._of_backward(call)
        return None

    def _looks_elsewhere(self, call: ast.Call) -> bool:
        """Whether a script looks for files other than to decide if a folder is made."""
        around = {part for outer in self.script.ancestors(call) if isinstance(outer, ast.If)
                  for part in ast.walk(outer.test)}  # fmt: skip
        return not {*self.script.calls_to(*NAMES["folder_facts"])} <= around

    def _tokenizes(self, passed: Passed) -> bool:
        """Whether the first argument is a function that only applies a tokeniser to its own."""
        code = self.script.function_of(passed[0][1]) or passed[0][1]
        made = self.script.returns_of(code)
        result = made[0].value if len(made) == 1 else getattr(code, "body", None)
        if not isinstance(result, ast.Call):
            return False
        options = {item.arg for item in result.keywords}
        columns = (isinstance(item, ast.Subscript) and isinstance(item.value, ast.Name)
                   and not isinstance(item.slice, ast.Slice) for item in result.args)  # fmt: skip
        if not all(columns) or options & {None, "return_overflowing_tokens", "text", "text_pair"}:
            return False
        maker = self.values.origin_of(result.func)
        return isinstance(maker, ast.Call) and find_function(self.script, maker) is TOKENIZERS

    def _of_step(self, call: ast.Call, base: Kinds) -> str | None:
        """Say why a step is not one over the lots of the private loader."""
        if "private" not in base:
            return None
        loops = list(enclosing_loops(self.values, call))
        over = [self.kinds.kinds(unwrap_iterable(loop.iter)) if isinstance(loop, ast.For)
                else NOTHING for loop in loops]  # fmt: skip
        if any("value" in own for own in over):
            return "it steps over what is computed of records together"
        drawn = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call)
                 and last_name(node.func) == "next" and node.args]  # fmt: skip
        turns = {innermost_loop(self.script, node) for node in drawn}
        drawing = [i for i, own in enumerate(over) if own & {"data", "lots"}]
        fresh = [i for i, loop in enumerate(loops) if i in drawing or loop in turns]
        inner = loops[: fresh[0]] if fresh else []
        once = [loop for loop in inner if calls_any(loop, "next")
                or (isinstance(loop, ast.For) and runs_once(self.values, loop.iter))]  # fmt: skip
        if once != inner:
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
        own = [step for step, owner in steps
               if "private" in self.kinds.kinds(owner) or step in self.values.updates]  # fmt: skip
        near = any(place is None or (self.script.scope_of(step) is scope
                   and innermost_loop(self.script, step) is place) for step in own)  # fmt: skip
        if (loop := self._lot_loop(call)) is not None:
            for part in self.kinds.sources.made_of(call):
                if isinstance(part, ast.expr) and "loss" in self.kinds.kinds(part):
                    # What adds to a name keeps what it was.
                    sets = [item for item in self.script.places_of(part) if not isinstance(
                        self.script.parents[item], ast.AugAssign)]  # fmt: skip
                    if sets and not any(loop in self.script.ancestors(item) for item in sets):
                        return "its loss may be of earlier lots"
        return None if near or not steps else "it forms gradients outside of the private step"

    def _lot_loop(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost loop over lots around a node."""
        return next((outer for outer in loops_around(self.script, node) if any(
            self.kinds.kinds(part) & {"data", "lots"} for part in ast.walk(outer)
            if isinstance(part, ast.expr))), None)  # fmt: skip

    def _taken(self, use: Use, passed: Passed) -> str | None:
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

    def _of_function(self, call: ast.Call, passed: Passed, taken: Kinds) -> str | None:
        name, script = last_name(call.func) or "", self.script
        reason, root = f"it is given the {words_of(taken)}", root_of(call.func)
        places = script.places_of(root)
        if not places and isinstance(root, ast.Name):
            # A builtin, or an error when it runs, unless a star import binds it.
            known = name in NAMES["reading_builtins"] or "*" not in script.imported
            return None if known else reason
        of_tools = script.comes_from(call.func, ("tqdm", "rich", "itertools"))
        iterates = of_tools and name in NAMES["iterators"]
        if iterates or self.kinds.sources.reads(call):
            return None
        if (use := find_function(script, call)) is not None:
            if "data" in use.gives and not self.kinds.makes_records(call):
                passed = [(at, item) for at, item in passed if self.kinds.kinds(item) != VALUE]
            return self._taken(use, passed)
        if isinstance(call.func, ast.Attribute) and (
            (name in NAMES["container_methods"] and places and not script.is_imported(root))
            or (name in NAMES["loggers"] and taken <= SECRETS | {"model"})
        ):
            return None
        if taken <= SECRETS and script.comes_from(call.func, NAMES["numerical_packages"]):
            return reason if name in NAMES["savers"] else None
        return reason

    @cached_property
    def _modules(self) -> list[Script]:
        """The other files of the repository that the script may import."""
        return modules_of(self.script, self.kinds.library.modules)[0]

    @cached_property
    def _drawn(self) -> Kinds:
        """The kinds of what matplotlib draws."""
        calls = (call for call in self.script.calls if self.kinds.draws(call.func))
        return frozenset().union(*map(self.kinds.of_arguments, calls))

    def of_lot(self, node: ast.Subscript) -> str | None:
        """Say why a lot that a loop takes from the records may be that of another step."""
        if "data" not in self.kinds.kinds(node.value) or isinstance(node.slice, ast.Constant):
            return None
        steps = optimizer_steps(self.values)
        loops = {loop for step in steps for loop in enclosing_loops(self.values, step)}
        if loops.isdisjoint(self.script.ancestors(node)):
            return None
        return "how it draws the records of a lot is not known"

    def of_store(self, target: ast.Name | ast.Attribute | ast.Subscript) -> str | None:
        """Say why what a name, an attribute or an item gets changes an object."""
        outer, value = self.kinds.sources.holder_of(target)
        if value is None:
            return None
        own = self.kinds.kinds(value)
        match target:
            case ast.Attribute():
                return self._of_attribute_store(target, value) or self._of_rebinding(target)
            case ast.Subscript():
                return self._of_item_store(target, own)
        changed = self.kinds.kinds(target) if isinstance(outer, ast.AugAssign) else NOTHING
        passed = any(isinstance(item, ast.arg) for item in self.script.places_of(target))
        if changed & SECRETS and passed:
            return "it changes what is passed to it"
        if "model" in changed and own & SECRETS:
            return "records decide a part of the model"
        return self._of_rebinding(target)

    def _of_item_store(self, target: ast.Subscript, own: Kinds) -> str | None:
        base = self.kinds.kinds(target.value)
        decided = own & SECRETS or self.kinds.deciding(target) is not None
        if base & (HANDLES - {"holder"}) and decided:
            return f"records decide what the {words_of(base & HANDLES)} gets"
        whole = base if base & HANDLES else self.kinds.kinds(whole_of(target))
        if changed := whole & {"private", "engine", "optimizer"}:
            return f"it changes the {words_of(changed)}"
        if own & SECRETS and self._is_outside(target.value):
            return "it writes records"
        return "it changes the records" if own & SECRETS and base & {"data", "lots"} else None

    def _of_attribute_store(self, target: ast.Attribute, value: ast.expr) -> str | None:
        name, own = target.attr, self.kinds.kinds(value)
        whole = self.kinds.kinds(whole_of(target))
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
        """Whether a definition or import binds a name of the private call, or another import's."""
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
        if node.attr == "fork_rng":
            return "the noise may be that of another step"
        tells = self.script.comes_from(node, NAMES["telling_packages"])
        if tells and node.attr in NAMES["told_again"]:
            return "it may read what the training logged"
        base, outer = self.kinds.kinds(node.value), self.script.parents[node]
        if isinstance(outer, ast.Call) and outer.func is node:
            return None
        if node.attr == "__class__" and base and getattr(outer, "attr", "") != "__name__":
            return "it may change any part of the object"
        if node.attr in NAMES["gradients"] and not self.script.is_imported(node):
            compared = isinstance(outer, ast.Compare)
            return None if compared else "it reads gradients that no noise covers"
        if base & {"private", "optimizer"} and node.attr in NAMES["optimizer_parts"]:
            return f"{node.attr} of the optimiser is not a use that is understood"
        if "engine" in base and node.attr not in ("accountant", "secure_mode"):
            return f"{node.attr} of the engine is not a use that is understood"
        return None

    def _is_carried(self, node: ast.Name | ast.Attribute) -> bool:
        """Whether a loop reads a part of a lot before it sets it: that of an earlier turn."""
        if not self.kinds.kinds(node) & {"lot", "rows", "loss"}:
            return False
        loop = self._lot_loop(node)
        around = {item: [*self.script.ancestors(item)] for item in self.script.places_of(node)}
        stores = [item for item, outer in around.items() if loop in outer
                  and not any(isinstance(other, ast.comprehension) for other in outer)]  # fmt: skip
        return bool(stores) and all(
            (getattr(item, "lineno", 0), getattr(item, "col_offset", 0))
            > (node.lineno, node.col_offset)
            or node in ast.walk(getattr(self.kinds.statement(item), "value", None) or item)
            for item in stores
        )

    def of_reference(self, node: ast.Name | ast.Attribute) -> str | None:
        """Say why a name or an attribute is no understood use where it is read."""
        if self._may_know_seed(node):
            return KNOWN_SEED
        if self._is_carried(node):
            return "it may be of an earlier lot"
        if isinstance(node, ast.Attribute):
            return self.of_attribute(node)
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
        function, test = self.script.scope_of(node), self._deciding(node)
        layer = function in self.kinds.layers
        match node:
            case ast.Return(ast.expr() as value) if layer and "value" in self.kinds.kinds(value):
                return "a layer may join the records of a lot"
            case ast.Raise(exc=ast.expr() as carried) if self.kinds.kinds(carried) & (
                (HANDLES | {"lots"}) - {"scheduler", "criterion"}
            ):
                return "what catches it gets private objects"
            case ast.Assert(test=condition) if not self.kinds.runs_before(node):
                decides = self.kinds.kinds(condition) & SECRETS
                return "records decide whether it goes on" if decides else None
            case ast.Assert() | ast.Raise() if self.kinds.runs_before(node):
                return None  # before any record is used, it checks their form
            case ast.Return() if test is not None and self._gives_value(function, node):
                return None  # what it returns is a value of records
            case ast.Return() | ast.Break() if self._leaves_lot(node):
                return "a lot that BatchMemoryManager splits may not run to its end"
        return None if test is None else f"records decide where it leaves ({source_text(test)})"

    def _deciding(self, node: ast.AST) -> ast.expr | None:
        """Return what decides by records if a node runs, unless the training has ended by it."""
        test = self.kinds.deciding(node)
        around = [*self.script.ancestors(test)] if test is not None else []
        for outer in self.script.ancestors(node) if around else ():
            tried = self.script.parents.get(outer)
            if isinstance(tried, ast.Try) and tried in around and outer not in around:
                last = getattr(outer, "body", tried.body)[-1]
                exits = last_name(getattr(getattr(last, "value", last), "func", last)) == "exit"
                calls = [part for part in ast.walk(tried) if isinstance(part, ast.Call)]
                own = {item for part in calls for item in self.kinds.functions(part.func)}
                leading = {self.kinds.call, *leading_definitions(self.script, self.kinds.call)}
                if (exits or isinstance(last, ast.Return | ast.Raise)) and leading & {*calls, *own}:
                    return None  # as with an error that nothing catches
        return test

    def _gives_value(self, function: ast.AST, end: ast.Return) -> bool:
        """Whether a return only chooses the value of a function, which is never without one."""
        results = [item.value for item in self.script.returns_of(function)]
        always = isinstance(getattr(function, "body", [None])[-1], ast.Return) and not any(
            getattr(item, "value", item) is None for item in results
        )
        modes = (call for call, _ in self.script.method_calls("eval", "train")
                 if self.script.scope_of(call) is function)  # fmt: skip
        same = all(call.lineno < end.lineno for call in modes)
        return always and same and self._only_computes(function)

    def _only_computes(self, code: ast.AST, inside: tuple[ast.AST, ...] = ()) -> bool:
        """Whether a function only computes, draws and tells, without private objects."""
        script, inside = self.script, (*inside, code)
        for part in ast.walk(code):
            keeps = isinstance(getattr(part, "ctx", None), ast.Store | ast.Del)
            keeps &= isinstance(part, ast.Attribute | ast.Subscript)
            keeps |= isinstance(part, ast.Global | ast.Nonlocal | ast.Yield | ast.YieldFrom)
            keeps |= isinstance(part, ast.AugAssign) and any(
                isinstance(place, ast.arg) for place in script.places_of(part.target))  # fmt: skip
            kinds = self.kinds.kinds(part) if isinstance(part, ast.expr) else NOTHING
            if keeps or kinds & (HANDLES - {"model"} | {"lots"}):
                return False
            if not isinstance(part, ast.Call) or self.kinds.draws(part.func):
                continue
            name, base = last_name(part.func) or "", getattr(part.func, "value", part.func)
            own = [item for item in self.kinds.functions(part.func) if item not in inside]
            secret = self.kinds.kinds(base) & ({*SECRETS} if base is not part.func else {"model"})
            known = bool(secret) or not script.places_of(root_of(part.func))
            known |= script.comes_from(part.func, NAMES["numerical_packages"])
            computes = own or (known and not isinstance(script.parents[part], ast.Expr))
            if own and not all(self._only_computes(item, inside) for item in own):
                return False
            mode = name in ("eval", "train") and "model" in self.kinds.kinds(base)
            sets = name == "next" or name.startswith(("set_", "seed", "manual_seed"))
            if (
                sets
                or name in NAMES["mutators"]
                or not (computes or mode or name in NAMES["tells"])
            ):
                return False
        return True

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
        return self.script.is_imported(base)

    def _replaces_import(self, target: ast.Attribute, value: ast.expr) -> bool:
        """Whether a part of a package, or of a class of one, is replaced by other code."""
        path = self.script.module_path(target)
        tells = package_of(path) in NAMES["telling_packages"]
        known = tells or path.startswith(("torch.backends.", "sys.std"))
        return bool(path) and not known and self.values.known_value(value) is None


def _is_secret(values: Evaluator, seed: ast.expr | None) -> bool:
    """Whether a seed is the system's entropy, or an option that no file gives a value."""
    match made := seed and (values.origin_of(seed) or seed):
        case ast.Call(func=function) if last_name(function) in NAMES["same_number"]:
            return bool(made.args) and _is_secret(values, made.args[0])
        case ast.Call(func=ast.Attribute(value=ast.Call() as source)):
            return _is_secret(values, source)  # SystemRandom().getrandbits(31)
        case ast.Call(func=function):
            return values.script.module_path(function) in NAMES["entropy"]
        case ast.Attribute():
            return isinstance(values.try_evaluate(made), NotSet | None)
    return False


def _starts_listed(command: ast.expr | None, known: tuple[str, ...]) -> bool:
    """Whether a command of a shell is known to start programs of these alone."""
    text = str(getattr(command, "value", ""))
    parts = [part.split() for part in re.split(r"[;&|\n]+", text)]
    named = [part[0] for part in parts if part and not part[0].startswith("#")]
    return bool(named) and not set("$`") & set(text) and set(named) <= {*known}


def _fills(values: Evaluator, call: ast.Call) -> bool:
    """Whether ``replace`` of a table may fill in the values of the rows before."""
    by = [*call.args[1:2], *(item for key, item in keywords_of(call).items()
                                 if key in ("value", "repl"))]  # fmt: skip
    pairs = next(iter(call.args), keywords_of(call).get("to_replace"))
    known = [item for item in by if getattr(item, "value", item) is not None]
    return not known and not isinstance(values.origin_of(pairs), ast.Dict)


def _drops_columns(call: ast.Call) -> bool:
    """Whether ``dropna`` of a table may drop columns by what is in their rows."""
    axis = next(iter(call.args), keywords_of(call).get("axis"))
    return axis is not None and getattr(axis, "value", None) not in (0, "index", "rows")
