"""Read the plan fields of one training script, by its library's entry in ``libraries``.

Directives and pyproject.toml state what the text does not show, and may not contradict it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from affidavit.importers.directives import DIRECTIVE_FIELDS
from affidavit.importers.libraries import (
    FAULTS,
    NOT_SHUFFLED,
    Library,
    LotSampler,
    satisfies_requirement,
)
from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import (
    BrokenObligation,
    NoiseCalibration,
    OpenUse,
    PartialPlan,
    is_number,
    malformed_plan,
)
from affidavit.importers.scripts.conditions import branch, exclude_each_other
from affidavit.importers.scripts.loop_faults import FAULT_FINDERS
from affidavit.importers.scripts.object_kinds import ObjectKinds
from affidavit.importers.scripts.quantities import (
    PLAN_POINTERS,
    Quantities,
    arguments_of,
    attributes_used_of,
)
from affidavit.importers.scripts.record_sources import RecordSources
from affidavit.importers.scripts.step_count import (
    UnreadNumber,
    count_passes,
    enclosing_loops,
    find_resumed_run,
    optimizer_steps,
    passes_around,
)
from affidavit.importers.scripts.syntax import Script, find_import, keywords_of, last_name
from affidavit.importers.scripts.use_table import SECRETS
from affidavit.importers.scripts.uses import find_uses
from affidavit.importers.scripts.values import Unreadable, is_left_out, source_text
from affidavit.plan import MalformedPlan

LIGHTNING = ("lightning", "pytorch_lightning")
ONLY_THE_MODEL = (
    "only the model is released; losses, metrics and statistics of its records are not."
)
BY_METRIC = "it may stop, or choose a model or rate, by a metric of the records"


class ScriptPlanReader(Quantities):
    """Read the plan fields of one script, with its comment directives and line numbers."""

    def __init__(
        self, library: Library, script: Script, call: ast.Call, stated: dict[str, Any]
    ) -> None:
        super().__init__(library, script, call)
        self.values.is_private_loader = self.is_private_loader
        self.values.assume_runs(call)
        self.stated = stated
        notes = (*library.notes, *([ONLY_THE_MODEL] if library.trains else []))
        self.notes = [f"{library.name}: {note}" for note in notes]
        self.broken: list[BrokenObligation] = list(library.broken)
        self.is_poisson: bool | None = None
        self.calibrates = False
        self.drop_last: bool | None = None
        """Whether the script leaves out the records that do not fill a last lot."""
        self.open_uses: tuple[OpenUse, ...] = ()

    def partial(self) -> PartialPlan:
        """Return the plan fields; raises ``MalformedPlan``."""
        self.values.updates = tuple(self._updates())
        sampling = self.sampling()
        data: dict[str, Any] = {"releases": [self.release()]}
        if sampling:
            data["sampling"] = sampling
        self._set_field(data, "dataset", "size", self.resolve("dataset_size", self.size()))
        self._set_field(data, "dataset", "unit", self.stated.get("unit"))
        if "adjacency" in self.stated:
            data["adjacency"] = self.stated["adjacency"]
        self._length(data)
        for key in ("epsilon", "delta"):
            value = self.resolve(f"target_{key}", self.quantity(f"target_{key}"))
            self._set_field(data, "target", key, value)
        self.find_faults(sampling.get("lot_size"))
        self.add_notes()
        return PartialPlan(
            kind=self.kind,
            data=data,
            assumed=tuple(self.notes),
            lines=tuple(self.lines),
            literals=tuple(self.read_literals.items()),
            excluded=(("scheme", NOT_SHUFFLED),) if self.is_poisson is False else (),
            broken=tuple(self.broken),
            open_uses=self.open_uses,
            unread=tuple(self.unread.items()),
            finish=self.finish,
            adds_to=tuple(call.lineno for call in self.values.elsewhere),
        )

    def is_private_loader(self, node: ast.expr) -> bool:
        """Whether a loop over a name is one pass: over the only ``DataLoader`` that it may be."""
        made = self.values.origin_of(node)
        return isinstance(made, ast.Call) and last_name(made.func) == "DataLoader"

    @cached_property
    def kinds(self) -> ObjectKinds:
        """The kinds of private objects that expressions of the script may be."""
        loader = self.arguments.get("data_loader")
        sources = RecordSources(self.values)
        for source in self._drawn_from() if loader is None else [loader]:
            sources.add(source)
        kinds = ObjectKinds(self.values, self.library, self.call, sources)
        kinds.spread()
        return kinds

    def _drawn_from(self) -> Iterator[ast.expr]:
        """Yield the iterables, and the arrays with an index, that lots are drawn from."""
        steps = optimizer_steps(self.values)
        loops = {loop: 0 for step in steps for loop in enclosing_loops(self.values, step)}
        for loop in loops:
            if isinstance(loop, ast.For):
                yield loop.iter
            for node in ast.walk(loop):
                match node:
                    case ast.Subscript(ast.Name() as base, slice=at, ctx=ast.Load()):
                        around = map(self.script.ancestors, self.script.places_of(base))
                        varies = not isinstance(at, ast.Constant)
                        drawn = varies and self.values.known_value(base) is None
                        if drawn and all(map(loops.keys().isdisjoint, around)):
                            yield base
        for call in self.script.calls:
            fits = last_name(call.func) == "fit"
            yield from call.args[:2] if fits else ()
            named = ("train_dataset", "train_dataloaders", *(("x", "y") if fits else ()))
            yield from (value for key, value in keywords_of(call).items() if key in named)

    # ---- the parts of a plan ------------------------------------------------------------

    def release(self) -> dict[str, Any]:
        """Return the only release; raises ``MalformedPlan`` if nothing tells its noise."""
        clip = self.quantity("clip_norm")
        noise = self.resolve("noise_multiplier", self.quantity("noise_multiplier"))
        release = {"name": "all", "clip_norm": clip if is_number(clip) and clip > 0 else 1.0}
        if noise is None and self.calibrates:
            return release
        if noise is None:
            other = " ".join(("it is not an argument.", *self.library.notes))
            why = self.unread.get(PLAN_POINTERS["noise_multiplier"], other)
            remedy = 'Write a number, or add "# affidavit: noise_multiplier=..." with what is used.'
            raise self.refusal(f"noise_multiplier cannot be read from the script: {why}", remedy)
        if noise <= 0:
            message = f"noise_multiplier is {noise}, which adds no noise."
            raise self.refusal(message, "Add noise.")
        return release | {"noise_multiplier": noise}

    def sampling(self) -> dict[str, Any]:
        """Return the sampling fields that are known; raises ``MalformedPlan`` on a conflict."""
        keys = ("scheme", "probability", "max_lot_size")
        sampling: dict[str, Any] = {key: self.stated[key] for key in keys if key in self.stated}
        scheme = self.scheme()
        if scheme == "shuffled":
            self.is_poisson = False
        if scheme is not None and sampling.setdefault("scheme", scheme) != scheme:
            raise conflict("scheme", sampling["scheme"], scheme, self.call.lineno)
        rate = self.quantity("probability")
        rate = self.quantity("expected_rate") if rate is None else rate
        rate = self.resolve("probability", rate)
        if rate is not None and sampling.get("scheme") in (None, *NOT_SHUFFLED):
            return sampling | {"probability": rate}
        if (why := self.unread.get(PLAN_POINTERS["probability"])) is not None:
            self.unread.setdefault(PLAN_POINTERS["lot_size"], why)
        lot = self.resolve("lot_size", self.lot_size())
        return sampling if lot is None else sampling | {"lot_size": lot}

    def scheme(self) -> str | None:
        """Return the scheme of the library, sampler or loader; raises ``MalformedPlan``."""
        scheme = self._scheme_of_library()
        for sampler, call in self._samplers():
            name = sampler.names[0]
            whole = self.values.with_unpacked_keywords(call)
            arguments = arguments_of(whole, sampler, self.kind) if sampler.holds else {}
            holds = all(
                satisfies_requirement(self.values.try_evaluate(arguments[key]), requirement, None)
                for key, requirement in sampler.holds.items()
                if key in arguments
            )
            if sampler.scheme is None or not holds:
                remedy = sampler.remedy
                raise self.refusal(f"the lots of {name} are not read.", remedy, call.lineno)
            if scheme not in (None, sampler.scheme):
                message = f"{name} draws {sampler.scheme} lots, and not {scheme} lots."
                raise self.refusal(message, "Write a plan with the lots it draws.", call.lineno)
            scheme = sampler.scheme
        return scheme

    def _samplers(self) -> Iterator[tuple[LotSampler, ast.Call]]:
        """Yield the classes of the library that draw lots, with the calls that make them."""
        known = {name: item for item in self.library.samplers for name in item.names}
        for call in self.script.calls if known else ():
            name = self.script.module_path(call.func).rpartition(".")[2]
            if name in known and not is_left_out(self.values, call):
                yield known[name], call

    def _scheme_of_library(self) -> str | None:
        if self.library.poisson is not None:
            name, default = self.library.poisson
            node = self.arguments.get(name)
            value = default if node is None else self.read(node, "/sampling/scheme", name, bool)
            if value is None:
                return None
            return "poisson" if value else self.library.scheme
        own = "shuffled" if self._loaders_shuffle() else None
        if any(call.trains for call in self.library.beside):
            return self.library.scheme if any(self.trainings()) else own
        return own if self.library.scheme is None else self.library.scheme

    def lot_size(self) -> Any:
        """Return the lot size, if the text shows it."""
        return self.quantity("lot_size")

    def size(self) -> Any:
        """Return the number of records, if the text shows it."""
        return self.quantity("dataset_size")

    def passes(self) -> tuple[str, float, int]:
        """Return ``epochs`` or ``steps``, their number and its line; raises ``Unreadable``."""
        for name in ("steps", "epochs"):
            if (value := self.quantity(name)) is not None:
                return name, value, self.call.lineno
        drawing = self.script.method_calls(self.library.draws or "")
        draws = [one for one, owner in drawing if self.values.origin_of(owner) is self.call]
        every = [*self.trainings()] or draws
        trainings = [call for call in every if not is_left_out(self.values, call)]
        if trainings:
            if not exclude_each_other(self.script, *trainings):
                again = max(trainings, key=lambda call: call.lineno)
                raise Unreadable(again, "it trains again")
            try:
                _, around, _ = passes_around(self.values, trainings[0])
            except UnreadNumber as reason:
                raise Unreadable(reason.node, reason.why) from None
            why = "the length of training cannot be determined"
            raise (UnreadNumber if around == 1 else Unreadable)(trainings[0], why)
        updates = self.values.updates
        runs = len(updates) == 1 and not any(call.trains for call in self.library.beside)
        return passes_around(self.values, updates[0]) if runs else count_passes(self.values)

    def _updates(self) -> list[ast.Call]:
        """Return the calls that apply private updates where no ``step()`` does, as Flax'."""
        methods = self.library.methods
        uses = (use for use in attributes_used_of(self.script, self.call) if use.attr in methods)
        calls = [call for use in uses if isinstance(call := self.script.parents[use], ast.Call)]
        held = self.script.calls_to("apply_gradients") if methods else []
        return calls + [call for call in held if "grads" in keywords_of(call)]

    def _length(self, data: dict[str, Any]) -> None:
        own: dict[str, Any] = {"epochs": None, "steps": None}
        self.values.read_literals.clear()
        try:
            self._require_one_run()
            name, count, line = self.passes()
        except Unreadable as reason:
            at = getattr(reason.node, "lineno", self.call.lineno)
            why = self.unread.get("/steps", f"line {at}: {reason.why}.")
            self.unread["/steps"] = self.unread.setdefault("/epochs", why)
            if not isinstance(reason, UnreadNumber):
                self.uncounted = self.uncounted or reason
            if not {"epochs", "steps"}.isdisjoint(self.stated):
                self.notes.append(
                    f"{self.library.name}: the length that comments state is that of all runs of "
                    f"the training, which the text does not show ({why.rstrip('.')})."
                )
        else:
            self.uncounted = None
            own[name] = int(count) if count == int(count) else count
            self.lines.append((f"/{name}", line))
            self.note_literal(f"/{name}", count)
            if count <= 0:
                raise self.refusal("its training loop runs 0 times.", "Write a plan.")
        resolved = {name: self.resolve(name, value) for name, value in own.items()}
        data |= {name: value for name, value in resolved.items() if value is not None}

    def _require_one_run(self) -> None:
        """Raise ``Unreadable`` if an earlier run or another training counts too."""
        if (node := find_resumed_run(self.values)) is not None:
            raise Unreadable(node, "it continues a run, whose steps count too")
        searches = [] if optimizer_steps(self.values) else self.script.calls_to(*NAMES["searches"])
        for search in (item for item in searches if not is_left_out(self.values, item)):
            raise Unreadable(search, f"{last_name(search.func)} trains several times")
        for step in optimizer_steps(self.values) if any(self.trainings()) else []:
            raise Unreadable(step, "it steps an optimiser too")

    def find_faults(self, lot: Any) -> None:
        """Add the obligations that the library or the training loop breaks."""
        for find_fault in FAULT_FINDERS:
            self._add_fault(find_fault.__name__.removeprefix("find_"), find_fault(self.values))
        if self.library.trains:
            draws, others = self.is_poisson is not False, self.questions()
            self.open_uses, known = find_uses(self.kinds, self.call, others, draws_lots=draws)
            for node, key in known:
                self._add_fault(key, node)
        for rule in self.library.rules:
            needs = ((o, need) for key, need in rule.holds.items() for o in self._values_of(key))
            failing = [o for o, need in needs if not satisfies_requirement(o, need, lot)]
            if failing and all(isinstance(value, Unreadable) for value in failing):
                line = self.call.lineno
                use = OpenUse(line=line, message=f"line {line}: {rule.broken.message}")
                self.open_uses += () if line in self.script.harmless else (use,)
            elif failing:
                self.broken.append(rule.broken)

    def questions(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield what else of the script is not understood, with the reason."""
        for node in self.script.dynamic:
            yield node, "it may change or read what the text does not show"
        targets = getattr(self.script.parents[self.call], "targets", [None])
        used = slice(1, 2 if self.is_poisson is False else None)
        parts = targets[0].elts[used] if isinstance(targets[0], ast.Tuple) else targets
        for name in (part for part in parts if isinstance(part, ast.Name)):
            reads = self.script.reads_of(name.id)
            if all(self.call in self.script.ancestors(read) for read in reads):
                yield name, "nothing uses the private object"
        if (reason := self.uncounted) is not None:
            node = self.call if isinstance(reason.node, ast.Module) else reason.node
            yield node, f"its length is not read: {reason.why}"
        for node in self.script.nodes:
            metric: ast.expr | None = None
            match node:
                case ast.Call(func=function) if last_name(function) in NAMES["choosers"]:
                    metric = keywords_of(node).get("monitor", next(iter(node.args), node))
                case ast.keyword(arg=str(key), value=item) if key in NAMES["choosing_options"]:
                    options = getattr(self.script.parents[node], "keywords", ())
                    named = {option.arg: option.value for option in options}
                    if self.values.known_value(named.get("save_best_only")) is not False:
                        metric = item
                case ast.Dict(keys=keys, values=items):
                    places = [getattr(key, "value", None) for key in keys]
                    metric = items[places.index("monitor")] if "monitor" in places else None
            value = self.values.known_value(metric)
            if metric is not None and value is not False:
                other = not isinstance(value, str) or value.startswith(("val", "eval", "test"))
                yield node, BY_METRIC if other else "data_dependent_stop"

    def _add_fault(self, key: str, node: ast.AST | None) -> None:
        """Add a fault of the lots with the line of ``node``, unless it is there or it is None."""
        fault = FAULTS[key]
        holds = node is not None and (self.is_poisson is not False or fault.schemes is None)
        if holds and all(fault.code != other.code for other in self.broken):
            message = f"line {getattr(node, 'lineno', '?')}: {fault.message}"
            line = getattr(node, "lineno", None)
            self.broken.append(fault.model_copy(update={"message": message, "line": line}))

    def _values_of(self, argument: str) -> Iterator[Any]:
        """Yield all values of an argument of the private call, or None if there is none."""
        values = [self.values.try_evaluate(node) for node in self.settings(argument)] or [None]
        for name in (argument, f"_{argument}"):
            stores = self.script.stored_attributes.get(name, [])
            values += [item for item in stores if getattr(item.value, "id", "") != "self"]
        keys = [k for k, v in self.library.private.quantities.items() if v == argument]
        stated = next((self.stated[key] for key in keys if key in self.stated), None)
        for value in values:
            yield stated if isinstance(value, Unreadable) and stated is not None else value

    def add_notes(self) -> None:
        """Add the notes that depend on what was read."""
        name = self.library.name
        if find_import(self.script, ("accelerate", *LIGHTNING)) and self.script.calls_to(
            *NAMES["wrappers_of_the_same"], "Trainer"
        ):
            self.notes.append(f"{name}: one process trains.")
        for line in dict.fromkeys(call.lineno for call in self._loads()):
            self.notes.append(f"{name}: the weights that line {line} loads are public.")
        if PLAN_POINTERS["clip_norm"] in self.unread:
            self.notes.append(f"{name}: the clip norm is not set by the records.")
        inner: ast.AST = self.call
        for outer in self.script.ancestors(self.call):
            test = source_text(outer.test) if isinstance(outer, ast.If | ast.IfExp) else ""
            if test and "__name__" not in test:
                side = branch(self.script, outer, inner)
                holds = "holds" if side == "body" else "does not hold"
                self.notes.append(f"{name}: it trains with privacy where {test} {holds}.")
            inner = outer
        for argument, value, note in self.library.remarks:
            if self.values.known_value(self.arguments.get(argument)) == value:
                self.notes.append(f"{name}: {note}")
        if self.values.defaults:
            names = [n for n, node in self.arguments.items() if isinstance(node, ast.Attribute)]
            read = ", ".join(names or sorted(self.values.defaults))
            self.notes.append(f"{name}: command line options at their defaults: {read}.")
        for line, reason in self.script.harmless.items():
            self.notes.append(f"{name}: line {line} is stated to be harmless: {reason}.")
        if self.stated:
            read = ", ".join(f"{key}={value}" for key, value in self.stated.items())
            self.notes.append(f"{name}: stated in comments: {read}.")

    def _loads(self) -> Iterator[ast.Call]:
        """Yield calls that may load weights before the last step."""
        last = max((step.lineno for step in optimizer_steps(self.values)), default=self.call.lineno)
        for call in self.script.calls_to(*NAMES["loads"]):
            torch = self.script.comes_from(call.func, ("torch",))
            other = last_name(call.func) == "load" and not torch
            scope = self.script.scope_of(call)
            after = scope is self.script.tree and call.lineno > last
            data = bool(self.kinds.kinds(call) & SECRETS)
            if not (other or after or data or is_left_out(self.values, call)):
                yield call

    def finish(self, plan: dict[str, Any], _: NoiseCalibration | None) -> dict[str, Any]:
        """Complete the plan: a loader keeps a smaller last lot, unless it is said to drop it."""
        size, sampling = plan.get("dataset", {}).get("size"), dict(plan.get("sampling", {}))
        lot = sampling.get("lot_size")
        divides = isinstance(size, int) and isinstance(lot, int) and lot > 0 and size % lot == 0
        if sampling.get("scheme") == "shuffled" and not (divides or self.drop_last):
            plan["sampling"] = {"drop_last": False} | sampling
        return plan

    def _loaders_shuffle(self) -> bool:
        """Whether each record occurs once per pass, as in a ``DataLoader`` without a sampler."""
        options = {getattr(node, "arg", None) for node in self.script.nodes}
        named = {last_name(node) for node in self.script.nodes}
        if options & {"batch_sampler", "sampler"} or named & {*NAMES["poisson_samplers"]}:
            return False
        # Of a tf.data.Dataset, not random.shuffle(list).
        orders = (last_name(base) for _, base in self.script.method_calls("shuffle"))
        return (
            any(self.kinds.kinds(call) & SECRETS for call in self.script.calls_to("DataLoader"))
            or any(self.values.known_value(item.value) is True for item in self.script.nodes
                   if isinstance(item, ast.keyword) and item.arg == "shuffle")
            or any(name not in ("random", "rng", "np") for name in orders)
        )  # fmt: skip

    def resolve(self, key: str, own: Any) -> Any:
        """Return the script's value, or a directive's; raises ``MalformedPlan`` if they differ."""
        stated = self.stated.get(key)
        if own is not None and stated is not None and own != stated:
            raise conflict(key, stated, own, self.call.lineno)
        return stated if own is None else own

    def _set_field(self, data: dict[str, Any], part: str, key: str, value: Any) -> None:
        if value is not None:
            data.setdefault(part, {})[key] = value


def conflict(key: str, stated: Any, own: Any, line: int) -> MalformedPlan:
    """Return the error for a directive that differs from the script."""
    message = f"a comment states {key}={stated}, but the script has {own}."
    at = "/" + "/".join(DIRECTIVE_FIELDS[key])
    return malformed_plan("given_conflict", message, "Correct the comment or the script.", line, at)
