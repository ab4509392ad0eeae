"""Import plans from training scripts that use Opacus. Scripts are parsed, never run.

Read are the arguments of ``make_private`` and ``make_private_with_epsilon``, the loader's batch
size, and the loops around ``optimizer.step()``, as far as the text settles them
(``script_values``); ``# affidavit:`` lines and pyproject.toml state the rest, and may not differ
from what is read. The noise of ``make_private_with_epsilon`` is what Opacus' own calibration gives.

What Opacus 1.6 is known not to do, so that no claim may rest on it:

* ``make_private`` samples with q = 1/⌈N/B⌉ and divides by ⌊qN⌋, which differs between data sets
  that differ by a record; under add_remove the divisor must be public (``guard.opacus`` fixes it).
* With ``poisson_sampling=False`` its accountant still reports the ε of Poisson lots.
* A new ``PrivacyEngine`` starts an accountant anew, as do assignments to its history.
"""

from __future__ import annotations

import ast
import importlib
import math
import warnings
from pathlib import Path
from typing import Any

from affidavit.gate.checking.importers.base import Broken, Partial, is_number, not_imported
from affidavit.gate.checking.importers.directives import FIELDS, stated_in
from affidavit.gate.checking.importers.script import Binding, Script, last_name
from affidavit.gate.checking.importers.script_options import READERS
from affidavit.gate.checking.importers.script_values import Unreadable, Values, text_of
from affidavit.gate.checking.importers.training_loop import Passes, passes_of
from affidavit.plan import MalformedPlan, Reason

KIND = "Opacus script"
CALLS = ("make_private", "make_private_with_epsilon")
NOISE_SCHEDULERS = frozenset({"ExponentialNoise", "LambdaNoise", "StepNoise"})
NOT_SHUFFLED = ("poisson", "truncated_poisson", "cyclic_poisson", "balls_in_bins", "fixed_size")
SIZES = {"MNIST": 60_000, "FashionMNIST": 60_000, "KMNIST": 60_000, "CIFAR10": 50_000,
         "CIFAR100": 50_000}  # fmt: skip
"""Records of torchvision's training sets."""
PRIVATE_DIVISOR = Broken(
    code="private_divisor",
    adjacencies=("add_remove",),
    message="Opacus divides each sum by ⌊qN⌋, which is another number when a record is added or "
    "removed, so add_remove is not what this script provides (opacus#571, arXiv:2605.15648).",
    remedy="Call guard.opacus(...) after make_private, which fixes the divisor, or claim "
    "adjacency zero_out, under which the number of records is public.",
)
NEW_ACCOUNTANT = Broken(
    code="accountant_reset",
    message="A PrivacyEngine is made more than once, and each starts its ε at 0: the ε that this "
    "script reports leaves out what was spent before.",
    remedy="Make one PrivacyEngine before the first round, or keep its accountant's history.",
)


def read(raw: bytes, folder: Path | None = None) -> Partial | None:
    """The plan fields of the script's only private call; None if there is none.

    Raises ``MalformedPlan`` if the script is not Python, has several private calls, or may call
    another method, or use other arguments or noise than the text shows.
    """
    if not any(name.encode() in raw for name in CALLS):
        return None
    try:
        tree = ast.parse(raw)
        source = raw.decode("utf-8", "replace")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise not_imported(KIND, f"it is not Python: {error}.", "Correct it.") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node.func)]
    if not calls:
        return None
    script = Script(tree, folder)
    if not _imports(script, "opacus"):
        name = _called(calls[0].func)
        raise not_imported(KIND, f"{name} is called, but opacus is not imported.", "Write a plan.")
    named = [node for node in ast.walk(tree) if _called(node) is not None]
    if len(named) > 1:
        lines = ", ".join(str(getattr(node, "lineno", "?")) for node in named)
        raise not_imported(
            KIND, f"it has several private calls (lines {lines}).", "Write a plan for each."
        )
    _require_unambiguous(script, calls[0])
    return _Reading(script, calls[0], stated_in(source)).partial()


def _require_unambiguous(script: Script, call: ast.Call) -> None:
    """Refuse a call that may not be Opacus' own with the arguments and noise in the text."""
    name = _called(call.func)
    bound = {key for _, key in script.bindings}
    if (
        not isinstance(call.func, ast.Attribute)
        or not bound.isdisjoint(CALLS)
        or not script.stored_attributes.keys().isdisjoint(CALLS)
    ):
        raise not_imported(KIND, f"its {name} may not be Opacus'.", "Write a plan.")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise not_imported(
            KIND,
            f"{name} has arguments without a name.",
            "Name each argument in the call, or write a plan.",
        )
    for node in script.nodes:
        match node:
            case ast.Attribute(attr="noise_multiplier", ctx=ast.Store() | ast.Del()) if not (
                isinstance(node.value, ast.Name) and node.value.id == "self"
            ):
                change = "noise_multiplier is set elsewhere"
            case ast.Attribute(attr=used) | ast.alias(name=used) if used in NOISE_SCHEDULERS:
                change = f"{used} changes the noise during training"
            case ast.Call(func=ast.Name(id="setattr"), args=[_, name_of, *_]) if not (
                isinstance(name_of, ast.Constant) and name_of.value != "noise_multiplier"
            ):
                change = "setattr may set noise_multiplier"
            case _:
                continue
        line = getattr(node, "lineno", None)
        raise not_imported(KIND, f"{change}.", "Write a plan with the lowest noise.", line)


class _Reading:
    """What one script says, what its comments state, and where."""

    def __init__(self, script: Script, call: ast.Call, stated: dict[str, Any]) -> None:
        self.script, self.call, self.stated = script, call, stated
        self.values = Values(script, READERS, ignored=_statement(script, call))
        self.arguments = {item.arg: item.value for item in call.keywords if item.arg is not None}
        self.lines: list[tuple[str, int]] = [("", call.lineno)]
        self.unread: dict[str, str] = {}
        self.notes = ["Opacus: all trainable parameters are taken as one release."]
        self.calibrates = _called(call.func) == "make_private_with_epsilon"

    def partial(self) -> Partial:
        data: dict[str, Any] = {"releases": [self._release()]}
        sampling = self._sampling()
        if sampling:
            data["sampling"] = sampling
        self._set(data, "dataset", "size", self._pick("dataset_size", self._size()))
        for key in ("unit",):
            self._set(data, "dataset", key, self.stated.get(key))
        if "adjacency" in self.stated:
            data["adjacency"] = self.stated["adjacency"]
        self._length(data)
        for key in ("epsilon", "delta"):
            own = self._argument(f"target_{key}", f"/target/{key}")
            if key == "delta" and own is None:
                own = self._reported_delta()
            self._set(data, "target", key, self._pick(f"target_{key}", own))
        self._note_arguments()
        broken = [] if self._is_guarded() else [PRIVATE_DIVISOR]
        if self._makes_several_engines():
            broken.append(NEW_ACCOUNTANT)
        poisson = self.poisson
        return Partial(
            kind=KIND,
            data=data,
            assumed=tuple(self.notes),
            lines=tuple(self.lines),
            excluded=(("scheme", NOT_SHUFFLED),) if poisson is False else (),
            broken=tuple(broken),
            unread=tuple(self.unread.items()),
            finish=self._finish,
        )

    # ---- the parts of a plan ------------------------------------------------------------

    def _release(self) -> dict[str, Any]:
        clip = self._argument("max_grad_norm", "/releases/0/clip_norm")
        release = {"name": "all", "clip_norm": clip if _positive(clip) else 1.0}
        if self.calibrates:
            if (noise := self.stated.get("noise_multiplier")) is not None:
                release["noise_multiplier"] = noise
            return release
        noise = self._pick(
            "noise_multiplier", self._argument("noise_multiplier", "/releases/0/noise_multiplier")
        )
        if noise is None:
            raise not_imported(
                KIND,
                "noise_multiplier is not settled by the text: "
                + self.unread.get("/releases/0/noise_multiplier", "it is not an argument."),
                'Write it as a number, or add "# affidavit: noise_multiplier=..." with the noise '
                "that runs.",
                self.call.lineno,
            )
        return release | {"noise_multiplier": noise}

    def _sampling(self) -> dict[str, Any]:
        poisson: Any = True
        if "poisson_sampling" in self.arguments:
            poisson = self._pick(
                "poisson_sampling",
                self._argument("poisson_sampling", "/sampling/scheme", kind=bool),
            )
        self.poisson: bool | None = poisson if isinstance(poisson, bool) else None
        loader = self._loader()
        batch = None
        self.drop_last: bool | None = self.stated.get("drop_last")
        if loader is not None:
            options = {item.arg: item.value for item in loader.keywords if item.arg}
            if "batch_sampler" not in options and "sampler" not in options:
                node = options.get("batch_size") or (
                    loader.args[1] if len(loader.args) > 1 else None
                )
                batch = self._read(node, "/sampling/lot_size", "batch_size")
                last = (
                    self.values.attempt(options["drop_last"]) if "drop_last" in options else False
                )
                self.drop_last = self._pick("drop_last", last if isinstance(last, bool) else None)
        keys = ("scheme", "probability", "max_lot_size")
        sampling: dict[str, Any] = {key: self.stated[key] for key in keys if key in self.stated}
        if poisson is True and sampling.setdefault("scheme", "poisson") != "poisson":
            raise _conflict("scheme", sampling["scheme"], "poisson", self.call.lineno)
        if poisson is False and "scheme" not in sampling:
            self.unread["/sampling/scheme"] = "poisson_sampling=False draws no Poisson lots."
            if self._shuffles(loader):
                sampling["scheme"] = "shuffled"
        lot = self._pick("lot_size", batch if isinstance(batch, int) else None)
        return sampling if lot is None else sampling | {"lot_size": lot}

    def _loader(self) -> ast.Call | None:
        """The call that makes the data loader, if the text shows it."""
        node = self.arguments.get("data_loader")
        if isinstance(node, ast.Name):
            scope = self.script.scope_of(node)
            _, bindings = self.script.resolve(node.id, scope)
            own = [item for item in bindings if not self._is_rebinding(item)]
            node = own[0].value if len(own) == 1 else None
        if isinstance(node, ast.Call) and last_name(node.func) == "DataLoader":
            plain = all(item.arg is not None for item in node.keywords)
            return node if plain else None
        self.unread.setdefault("/sampling/lot_size", "the text does not show the data_loader.")
        return None

    def _shuffles(self, loader: ast.Call | None) -> bool:
        options = {} if loader is None else {item.arg: item.value for item in loader.keywords}
        return self.values.known(options.get("shuffle")) is True

    def _is_rebinding(self, binding: Binding) -> bool:
        return self.values.ignored is not None and (
            self.values.ignored in self.script.above(binding.node)
        )

    def _size(self) -> int | None:
        """The records of a torchvision training set that the loader reads whole."""
        loader = self._loader()
        if loader is None:
            return None
        options = {item.arg: item.value for item in loader.keywords}
        node = loader.args[0] if loader.args else options.get("dataset")
        if isinstance(node, ast.Name):
            _, bindings = self.script.resolve(node.id, self.script.scope_of(node))
            node = bindings[0].value if len(bindings) == 1 else None
        if not isinstance(node, ast.Call) or not _imports(self.script, "torchvision"):
            return None
        train = next((item.value for item in node.keywords if item.arg == "train"), None)
        whole = train is not None and self.values.known(train) is True
        return SIZES.get(last_name(node.func) or "") if whole else None

    def _length(self, data: dict[str, Any]) -> None:
        try:
            passes: Passes | None = passes_of(self.values)
        except Unreadable as reason:
            passes = None
            line = getattr(reason.node, "lineno", self.call.lineno)
            self.unread["/epochs"] = f"line {line}: {reason.why}."
        own = {"epochs": None, "steps": None}
        if passes is not None:
            field = "epochs" if passes.is_epochs else "steps"
            own[field] = int(passes.count)  # type: ignore[assignment]
            self.lines.append((f"/{field}", passes.line))
            if passes.count <= 0:
                raise not_imported(KIND, "its training loop runs 0 times.", "Write a plan.")
        argument = self._argument("epochs", "/epochs")
        if passes is None and self.calibrates:
            own["epochs"] = argument
        for field in ("epochs", "steps"):
            value = self._pick(field, own[field])
            if value is not None:
                data[field] = value

    def _reported_delta(self) -> Any:
        """The δ at which the script asks its accountant for ε, if it is one value."""
        nodes = [
            (call.args[0] if call.args else item.value)
            for call in self.script.calls
            if last_name(call.func) == "get_epsilon"
            for item in (call.keywords or [ast.keyword("delta", ast.Constant(None))])
            if call.args or item.arg == "delta"
        ]
        read = {self._read(node, "/target/delta", "delta") for node in nodes}
        return read.pop() if len(read) == 1 else None

    # ---- reading --------------------------------------------------------------------------

    def _argument(self, name: str, pointer: str, kind: type = float) -> Any:
        return self._read(self.arguments.get(name), pointer, name, kind)

    def _read(self, node: ast.expr | None, pointer: str, name: str, kind: type = float) -> Any:
        if node is None:
            return None
        try:
            value = self.values.of(node)
        except Unreadable as reason:
            at = getattr(reason.node, "lineno", getattr(node, "lineno", self.call.lineno))
            self.unread[pointer] = f"{name}={text_of(node)}: {reason.why} (line {at})."
            return None
        fits = isinstance(value, bool) if kind is bool else is_number(value)
        if not fits:
            self.unread[pointer] = f"{name}={text_of(node)} is not a {kind.__name__}."
            return None
        self.lines.append((pointer, getattr(node, "lineno", self.call.lineno)))
        return value

    def _pick(self, key: str, own: Any) -> Any:
        """The script's own value, or what a comment states; both must be the same."""
        stated = self.stated.get(key)
        if own is not None and stated is not None and own != stated:
            raise _conflict(key, stated, own, self.call.lineno)
        return stated if own is None else own

    def _set(self, data: dict[str, Any], part: str, key: str, value: Any) -> None:
        if value is not None:
            data.setdefault(part, {})[key] = value

    def _note_arguments(self) -> None:
        if self.calibrates:
            self.notes.append(
                "Opacus: the noise is what make_private_with_epsilon's own calibration gives."
            )
        layers = self.arguments.get("clipping")
        if layers is not None and self.values.known(layers) == "per_layer":
            self.notes.append(
                "Opacus: with per-layer clipping the noise multiplier is taken over the norm of "
                "all layers' clip norms together, which is what its optimiser does."
            )
        if self.values.defaults:
            names = [name for name, node in self.arguments.items() if _is_option(node)]
            read = ", ".join(names or sorted(self.values.defaults))
            self.notes.append(f"Opacus: command line options at their defaults: {read}.")
        if self.stated:
            read = ", ".join(f"{key}={value}" for key, value in self.stated.items())
            self.notes.append(f"Opacus: stated in comments: {read}.")

    # ---- what the library does not do --------------------------------------------------------

    def _is_guarded(self) -> bool:
        """Whether ``guard.opacus(...)`` runs whenever the private call does."""
        for call in self.script.calls:
            match call.func:
                case ast.Attribute(value=ast.Name() as module, attr="opacus"):
                    scope = self.script.scope_of(self.call)
                    if (
                        self.script.imports(module, "affidavit.gate", "guard")
                        and self.script.scope_of(call) is scope
                        and self.values.always_runs(self.call, scope, call)
                    ):
                        return True
        return False

    def _makes_several_engines(self) -> bool:
        engines = [item for item in self.script.calls if last_name(item.func) == "PrivacyEngine"]
        stored = self.script.stored_attributes
        changed = [*stored.get("history", ()), *stored.get("accountant", ())]
        if len(engines) > 1 or any(_mentions_engine(node.value) for node in changed):
            return True
        for engine in engines:
            if self._is_in_a_loop(engine, 0):
                return True
            federated = _imports(self.script, "flwr") or _imports(self.script, "flower")
            if federated and self.script.scope_of(engine) is not self.script.tree:
                return True
        return False

    def _is_in_a_loop(self, node: ast.AST, depth: int) -> bool:
        for outer in self.script.above(node):
            if isinstance(outer, ast.For):
                match outer.iter:
                    case ast.Call(func=ast.Name(id="range"), args=[times]) if (
                        self.values.known(times) == 1
                    ):
                        continue
                return True
            if isinstance(outer, ast.While):
                return True
            if isinstance(outer, ast.FunctionDef) and depth < 20:
                try:
                    calls = self.values.calls_of(outer)
                except Unreadable:
                    return False
                return len(calls) > 1 or any(
                    self._is_in_a_loop(call, depth + 1)
                    for call in calls
                    if call in self.script.parents
                )
        return False

    # ---- once everything is stated -------------------------------------------------------------

    def _finish(self, plan: dict[str, Any]) -> dict[str, Any]:
        """The rate and the steps that Opacus makes of batch size and epochs, and its noise."""
        size = plan.get("dataset", {}).get("size")
        sampling = plan.get("sampling", {})
        lot, scheme = sampling.get("lot_size"), sampling.get("scheme")
        lots = fewest = None
        if isinstance(size, int) and isinstance(lot, int) and 0 < lot <= size:
            # Where nothing says whether the last lot is dropped, the higher rate and more steps.
            lots = size // lot if self.drop_last is True else -(-size // lot)
            fewest = lots if self.drop_last is False else size // lot
        if self.calibrates and "noise_multiplier" not in plan["releases"][0]:
            plan["releases"][0]["noise_multiplier"] = self._calibrated(plan, lots)
        if lots is not None and scheme == "poisson" and size % lot and not self._is_guarded():
            # make_private samples with 1/⌈N/B⌉; every pass has that many steps.
            plan["sampling"] = {
                "scheme": scheme,
                "probability": math.nextafter(1 / (fewest or 1), 1),
            }
            if plan.get("epochs"):
                plan["steps"] = math.ceil(plan.pop("epochs") * lots)
        return plan

    def _calibrated(self, plan: dict[str, Any], lots: int | None) -> float:
        """The noise of ``make_private_with_epsilon``, by Opacus' own function."""
        target = plan.get("target", {})
        epochs = self._argument("epochs", "/epochs")
        if lots is None or epochs is None or not {"epsilon", "delta"} <= target.keys():
            raise not_imported(
                KIND,
                "the noise of make_private_with_epsilon depends on the batch size, the data set's "
                "size, the epochs and the target, and they are not all known.",
                'Add "# affidavit: dataset_size=... lot_size=...", or state the noise_multiplier '
                "that optimizer.noise_multiplier printed.",
                self.call.lineno,
            )
        try:
            calibrate = importlib.import_module("opacus.accountants.utils").get_noise_multiplier
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of orders and precisions that it tries on its way
                noise = calibrate(
                    target_epsilon=target["epsilon"],
                    target_delta=target["delta"],
                    sample_rate=1 / lots,
                    epochs=epochs,
                    accountant=self._accountant(),
                )
        except ImportError:
            raise not_imported(
                KIND,
                "make_private_with_epsilon calibrates its noise with Opacus, which is not "
                "installed here.",
                'Install opacus, or add "# affidavit: noise_multiplier=..." with the value of '
                "optimizer.noise_multiplier.",
                self.call.lineno,
            ) from None
        except (ValueError, ArithmeticError, RuntimeError) as error:
            raise not_imported(
                KIND, f"Opacus' calibration fails: {error}.", "Change the target.", self.call.lineno
            ) from None
        return float(noise)

    def _accountant(self) -> str:
        for call in self.script.calls:
            if last_name(call.func) == "PrivacyEngine":
                node = next(
                    (item.value for item in call.keywords if item.arg == "accountant"), None
                )
                node = call.args[0] if call.args else node
                name = self.values.known(node) if node is not None else "prv"
                if isinstance(name, str):
                    return name
        raise not_imported(
            KIND,
            "the accountant of its PrivacyEngine is not settled by the text.",
            'Add "# affidavit: noise_multiplier=..." with the value of optimizer.noise_multiplier.',
            self.call.lineno,
        )


def _called(node: ast.AST) -> str | None:
    """The method of Opacus that a node names, if any."""
    name = last_name(node)
    return name if name in CALLS else None


def _statement(script: Script, call: ast.Call) -> ast.AST | None:
    """The assignment that takes what the private call returns."""
    parent = script.parents[call]
    return parent if isinstance(parent, ast.Assign) else None


def _imports(script: Script, module: str) -> bool:
    for node in script.nodes:
        match node:
            case ast.Import(names=names) if any(_root(name.name) == module for name in names):
                return True
            case ast.ImportFrom(module=str(source), level=0) if _root(source) == module:
                return True
    return False


def _root(module: str) -> str:
    return module.partition(".")[0]


def _is_option(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute)


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _mentions_engine(node: ast.expr) -> bool:
    text = ast.unparse(node).lower()
    return "engine" in text or "accountant" in text


def _conflict(key: str, stated: Any, own: Any, line: int) -> MalformedPlan:
    pointer = "/" + "/".join(FIELDS[key])
    return MalformedPlan(
        Reason(
            code="given_conflict",
            pointer=pointer,
            message=f"a comment states {key}={stated}, but the script has {own}.",
            remedy="Correct the comment or the script.",
            line=line,
            column=1,
        )
    )
