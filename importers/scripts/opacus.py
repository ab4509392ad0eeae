"""Read scripts that use Opacus: its loader, its rounded rates, its calibrated noise.

``make_private`` samples with q = 1/⌈N/B⌉, and divides by ⌊qN⌋, which ``guard.opacus`` makes public.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

from affidavit.importers.libraries import FAULTS, Library
from affidavit.importers.names import NAMES
from affidavit.importers.partial_plan import NoiseCalibration, PartialPlan
from affidavit.importers.scripts.plan_reader import LIGHTNING, ScriptPlanReader, conflict
from affidavit.importers.scripts.quantities import PLAN_POINTERS
from affidavit.importers.scripts.step_count import enclosing_loops, optimizer_steps, runs_once
from affidavit.importers.scripts.syntax import Script, find_import, keywords_of, last_name
from affidavit.importers.scripts.use_table import SECRETS
from affidavit.plan import MalformedPlan

BY_CRITERION = "ghost clipping only clips the loss of the criterion that make_private returns"
CLIPPING_MODES = ("flat", "per_layer", "adaptive")
STATE_NOISE_REMEDY = (
    '"# affidavit: noise_multiplier=..." with the value of optimizer.noise_multiplier.'
)


class OpacusPlanReader(ScriptPlanReader):
    """Read the plan fields of a script that calls Opacus."""

    def __init__(
        self, library: Library, script: Script, call: ast.Call, stated: dict[str, Any]
    ) -> None:
        super().__init__(library, script, call, stated)
        statement = script.parents[call]
        self.values.private_statement = statement if isinstance(statement, ast.Assign) else None
        self.calibrates = last_name(call.func) == "make_private_with_epsilon"
        self.drop_last = self.stated.get("drop_last")

    def partial(self) -> PartialPlan:
        """Return the plan fields; raises ``MalformedPlan``."""
        clipping = self.values.known_value(self.arguments.get("clipping"))
        if isinstance(clipping, str) and clipping not in CLIPPING_MODES:
            message = f"its {last_name(self.call.func)} may not be Opacus's: clipping={clipping}."
            raise self.refusal(message, "Write a plan.")
        shown = not self._is_guarded(), self._makes_several_engines(), self._may_be_skipped()
        keys = "private_divisor", "accountant_reset", "private_call_skipped"
        self.broken += [FAULTS[key] for key, holds in zip(keys, shown, strict=True) if holds]
        steps = [(step, getattr(step.func, "value", None)) for step in optimizer_steps(self.values)]
        self.values.other_steps = frozenset(step for step, owner in steps if owner is not None and (
            self.kinds.kinds(owner) == {"optimizer"} or self.kinds.is_of_other_call(owner)
        ))  # fmt: skip
        return super().partial()

    def find_faults(self, lot: Any) -> None:
        """Add also the faults in how the script uses the private objects."""
        super().find_faults(lot)
        reduced = self.values.known_value(self.arguments.get("loss_reduction")) or "mean"
        if ({"mean", "sum"} - {reduced}) & set(self._reductions()):
            self.broken.append(FAULTS["other_reduction"])

    def _reductions(self) -> Iterator[str]:
        """Yield how losses are reduced, where the text shows it: ``sum`` or ``mean``."""
        for call in self.script.calls:
            stated = self.values.known_value(keywords_of(call).get("reduction"))
            base = call.func.value if isinstance(call.func, ast.Attribute) else None
            if isinstance(stated, str) and self.kinds.kinds(call) & {"criterion", "loss"}:
                yield stated
            elif base is not None and not call.args and "loss" in self.kinds.kinds(base):
                yield last_name(call.func) or ""

    # ---- the parts of a plan ------------------------------------------------------------

    def scheme(self) -> str | None:
        """Return ``poisson``, or the loader's scheme if Poisson sampling is turned off."""
        name = "poisson_sampling"
        node = self.arguments.get(name)
        own = True if node is None else self.read(node, "/sampling/scheme", name, bool)
        poisson = self.resolve(name, own)
        if poisson is False:
            self.is_poisson = False
            self.unread["/sampling/scheme"] = "poisson_sampling=False does not draw Poisson lots."
            loader = self._loader()
            shuffle = None if loader is None else keywords_of(loader).get("shuffle")
            return "shuffled" if self.values.known_value(shuffle) is True else None
        return "poisson" if poisson else None

    def lot_size(self) -> Any:
        """Return the batch size of the loader, if the text shows it; raises ``MalformedPlan``."""
        loader = self._loader()
        if loader is None:
            return None
        options = keywords_of(loader)
        samplers = (options[name] for name in ("batch_sampler", "sampler") if name in options)
        if any(self.values.try_evaluate(item) is not None for item in samplers):
            if "lot_size" in self.stated and "probability" not in self.stated:
                own = "a sampler: its 1 / len(loader) is the probability to state"
                raise conflict("lot_size", self.stated["lot_size"], own, loader.lineno)
            self.unread["/sampling/lot_size"] = (
                f"line {loader.lineno}: make_private replaces the sampler of the loader: it draws "
                "from all records of the data set, with a rate of 1 / len(loader)."
            )
            return None
        node = options.get("batch_size") or (loader.args[1] if len(loader.args) > 1 else None)
        last = self.values.try_evaluate(options["drop_last"]) if "drop_last" in options else False
        self.drop_last = self.resolve("drop_last", last if isinstance(last, bool) else None)
        stores = self.script.stored_attributes.get("batch_size", ())
        if any(self.kinds.kinds(store.value) & SECRETS for store in stores):
            self.unread["/sampling/lot_size"] = "the batch size of the loader is set again."
            return None
        batch = self.read(node, "/sampling/lot_size", "batch_size")
        return batch if isinstance(batch, int) else None

    def size(self) -> Any:
        """Return the size of a torchvision training set that the loader reads whole."""
        loader = self._loader()
        if loader is None:
            return None
        node = loader.args[0] if loader.args else keywords_of(loader).get("dataset")
        length = ast.Call(func=ast.Name("len"), args=[node or ast.Constant(None)], keywords=[])
        return self.read(length, "/dataset/size", "dataset_size", line=loader.lineno)

    def is_private_loader(self, node: ast.expr) -> bool:
        """Whether a name can only be the loader of the private training."""
        return self.kinds.kinds(node) == {"lots"}

    def add_notes(self) -> None:
        """Add the notes that depend on what was read."""
        if self.calibrates and "noise_multiplier" not in self.stated:
            self.notes.append("Opacus: the noise is what its own calibration gives.")
        if ignored := sorted(self.arguments.keys() - {*NAMES["opacus_arguments"]}):
            self.notes.append(f"Opacus: it is Opacus itself, which ignores {', '.join(ignored)}.")
        super().add_notes()

    # ---- the loader ----------------------------------------------------------------------

    def _loader(self) -> ast.Call | None:
        """Return the call that makes the data loader, if the text shows it."""
        node = self.values.origin_of(self.arguments.get("data_loader"))
        if isinstance(node, ast.Call) and last_name(node.func) == "DataLoader":
            loader = self.values.with_unpacked_keywords(node)
            return None if any(item.arg is None for item in loader.keywords) else loader
        self.unread.setdefault("/sampling/lot_size", "the script does not show the data_loader.")
        return None

    # ---- what the library does not do --------------------------------------------------------

    def _is_guarded(self) -> bool:
        """Whether ``guard.opacus(...)`` runs whenever the private call does."""
        scope = self.script.scope_of(self.call)
        return any(
            self.script.module_path(module) == "affidavit.guard"
            and self.script.scope_of(call) is scope
            and self.values.always_runs(self.call, scope, call)
            for call, module in self.script.method_calls("opacus")
        )

    def _may_be_skipped(self) -> bool:
        """Whether the script catches an error of the private call and continues."""
        inner: ast.AST = self.call
        for outer in self.script.ancestors(self.call):
            if isinstance(outer, ast.Try) and inner in outer.body:
                ends = [handler.body[-1] for handler in outer.handlers]
                if outer.finalbody or not all(map(self._stops, ends)):
                    return True
            inner = outer
        return False

    def _stops(self, end: ast.stmt) -> bool:
        """Whether no step runs after a last statement, or its own private call is made."""
        if isinstance(end, ast.If):
            return bool(end.orelse) and self._stops(end.body[-1]) and self._stops(end.orelse[-1])
        value, scope = getattr(end, "value", None), self.script.scope_of(end)
        if isinstance(end, ast.Return) and value is None:
            return all(self.script.scope_of(o) is scope for o in optimizer_steps(self.values))
        called = last_name(getattr(value, "func", end)) in ("exit", "_exit", "quit")
        return isinstance(end, ast.Raise) or called or value in self.values.elsewhere

    def _is_ghost(self) -> bool:
        """Whether gradients may be clipped by a second backward pass."""
        node = self.arguments.get("grad_sample_mode")
        mode = "hooks" if node is None else self.values.known_value(node)
        if isinstance(mode, str):
            return "ghost" in mode
        # With ghost clipping four things are returned, so that three names would fail.
        targets = getattr(self.values.private_statement, "targets", ())
        return not any(isinstance(item, ast.Tuple) and len(item.elts) == 3 for item in targets)

    def questions(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield also losses that ghost clipping may not clip."""
        yield from super().questions()
        if isinstance(self.script.parents[self.call], ast.Expr):
            yield self.call, "other_optimizer"
        if find_import(self.script, LIGHTNING) is not None:
            runs = self.script.calls_to("fit", "LightningCLI")
            yield from ((call, "the loop of Lightning's trainer is not read") for call in runs)
        for call, loss in self.script.method_calls("backward") if self._is_ghost() else ():
            made = self.script.value_of(loss) if isinstance(loss, ast.Name) else loss
            function = getattr(made, "func", None)
            bound = self.script.bindings_of(function) if isinstance(function, ast.Name) else []
            own = [item for item in bound if self.values.is_set_by_private_call(item.node)]
            after = [item for item in bound if getattr(item.node, "lineno", 0) > self.call.lineno]
            if not own or not set(after) <= set(own):
                passed = any(isinstance(item.node, ast.arg) for item in bound)
                yield call, BY_CRITERION if passed else "unclipped_loss"

    def _makes_several_engines(self) -> bool:
        engines = self.script.calls_to("PrivacyEngine")
        federated = find_import(self.script, ("flwr", "flower")) is not None
        return len(engines) > 1 + len(self.values.elsewhere) or any(
            self._is_repeated(item) or (federated and self._is_of_one_round(item))
            for item in engines
        )

    def _is_of_one_round(self, node: ast.AST) -> bool:
        """Whether Flower may run a node in each round: in a client's method, or as it makes one."""
        name = getattr(self.script.scope_of(node), "name", "main")
        made = any(getattr(item, "arg", None) == "client_fn" for item in self.script.nodes)
        return name not in ("main", "__init__") or made or "client_fn" in self.script.functions

    def _is_repeated(self, node: ast.AST) -> bool:
        """Whether a loop, or a second call of its function, may run a node again."""
        called = (self.values.attempt(self.values.calls_of, o) for o in self.script.ancestors(node))
        return any(len(calls or ()) > 1 for calls in called) or any(
            isinstance(loop, ast.While) or not runs_once(self.values, loop.iter)
            for loop in enclosing_loops(self.values, node)
        )

    # ---- once everything is stated -------------------------------------------------------------

    def finish(self, plan: dict[str, Any], calibrate: NoiseCalibration | None) -> dict[str, Any]:
        """Set the sampling rate, steps and noise that Opacus computes."""
        plan = super().finish(plan, calibrate)
        size = plan.get("dataset", {}).get("size")
        sampling = plan.get("sampling", {})
        lot, scheme = sampling.get("lot_size"), sampling.get("scheme")
        lots = fewest = None
        if isinstance(size, int) and isinstance(lot, int) and 0 < lot <= size:
            # Where nothing says whether the last lot is dropped, the higher rate and more steps.
            lots = size // lot if self.drop_last is True else -(-size // lot)
            fewest = lots if self.drop_last is False else size // lot
        if self.calibrates:
            self._calibrate(plan, lots, calibrate)
        if lots is not None and scheme == "poisson" and size % lot and not self._is_guarded():
            # make_private samples with 1/⌈N/B⌉; every pass has that many steps.
            rate = math.nextafter(1 / (fewest or 1), 1)
            plan["sampling"] = {"scheme": scheme, "probability": rate}
            if plan.get("epochs"):
                plan["steps"] = math.ceil(plan.pop("epochs") * lots)
        return plan

    def _calibrate(
        self, plan: dict[str, Any], lots: int | None, calibrate: NoiseCalibration | None
    ) -> None:
        """Set the calibrated noise, or refuse a directive that states more noise."""
        release = plan["releases"][0]
        stated = release.get("noise_multiplier")
        try:
            own = self._calibrated(self._of_epsilon(plan, lots), calibrate)
        except MalformedPlan:
            if stated is None:
                raise
            return  # what it calibrates is not settled
        if stated is None:
            release["noise_multiplier"] = own
        elif stated > own and not self.values.alternatives:  # else another call may add it
            raise conflict("noise_multiplier", stated, f"{own:.6g} calibrated", self.call.lineno)

    def _calibrated(self, arguments: dict[str, Any], calibrate: NoiseCalibration | None) -> float:
        """Return the noise that Opacus' own function calibrates."""
        try:
            if calibrate is None:
                raise ImportError
            return calibrate(**arguments)
        except ImportError:
            message = "its noise is calibrated with Opacus, which is not installed here."
            raise self.refusal(message, f"Install opacus, or {STATE_NOISE_REMEDY}") from None
        except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
            message = f"Opacus' calibration failed: {error}."
            raise self.refusal(message, "Change the target.") from None

    def _of_epsilon(self, plan: dict[str, Any], lots: int | None) -> dict[str, Any]:
        """Return the calibration arguments of ``make_private_with_epsilon``."""
        target = plan.get("target", {})
        epochs = self.read(self.arguments.get("epochs"), "/epochs", "epochs")
        known = {
            "dataset_size": plan.get("dataset", {}).get("size"),
            "lot_size": plan.get("sampling", {}).get("lot_size"), "epochs": epochs,
            "target_epsilon": target.get("epsilon"), "target_delta": target.get("delta"),
        }  # fmt: skip
        lacking = [key for key, value in known.items() if value is None]
        if lots is None or lacking:
            whys = (f"{key} ({self.unread.get(PLAN_POINTERS[key], 'unknown')})" for key in lacking)
            stated = " ".join(f"{key}=..." for key in lacking if epochs is not None)
            why = ", ".join(whys) or "the lots are larger than the data set"
            message = f"what make_private_with_epsilon calibrates cannot be read: {why}."
            remedy = f'Add "# affidavit: {stated}", or ' if stated else "Add "
            raise self.refusal(message, remedy + STATE_NOISE_REMEDY)
        rate = 1 / lots
        return {
            "epsilon": target["epsilon"], "delta": target["delta"], "steps": int(epochs / rate),
            "sampling_probability": rate, "mechanism": self._accountant(),
        }  # fmt: skip

    def _accountant(self) -> str:
        engines = self.script.calls_to("PrivacyEngine")
        nodes = [next(iter(call.args), keywords_of(call).get("accountant")) for call in engines]
        names = ["prv" if node is None else self.values.known_value(node) for node in nodes]
        if names and isinstance(names[0], str) and names.count(names[0]) == len(names):
            return names[0]
        message = "the accountant of its PrivacyEngine cannot be read from the script."
        raise self.refusal(message, f"Add {STATE_NOISE_REMEDY}")
