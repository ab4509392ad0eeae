"""Import plans from Opacus: a training script, or the saved state of an accountant.

Scripts are parsed, never run. The arguments of ``make_private`` and
``make_private_with_epsilon`` are read if they are literals, module constants or defaults of
command-line options (``script_constants``); other values must be given. The sampler is unknown
unless the script sets ``poisson_sampling=True``. ``make_private_with_epsilon`` calibrates its own
noise, which is not checked: the plan's noise is solved for instead.

``json.dump(privacy_engine.accountant.state_dict(), file)`` writes the state of an accountant. Its
history has the noise, rate and number of the steps taken, but not the sampler, which must be given.
"""

from __future__ import annotations

import ast
from typing import Any

from affidavit.gate.checking.importers.base import (
    Partial,
    is_number,
    not_imported,
    only,
    positive,
    share,
    whole,
)
from affidavit.gate.checking.importers.script_constants import Constants, bound

KIND = "Opacus script"
CALLS = ("make_private", "make_private_with_epsilon")
NOISE_SCHEDULERS = frozenset({"ExponentialNoise", "LambdaNoise", "StepNoise"})
POISSON = ("poisson", "truncated_poisson", "cyclic_poisson")
NUMBERS = ("noise_multiplier", "epochs", "target_epsilon", "target_delta")


def read(raw: bytes) -> Partial | None:
    """The plan fields of the script's only private call; None if there is none.

    Raises ``MalformedPlan`` if the script is not Python, has several private calls, or may call
    another method, or use other arguments or noise than the text shows.
    """
    if not any(name.encode() in raw for name in CALLS):
        return None
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise not_imported(KIND, f"it is not Python: {error}.", "Correct it.") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node.func)]
    if not calls:
        return None
    if sum(_called(node) is not None for node in ast.walk(tree)) > 1:
        raise not_imported(KIND, "it has several private calls.", "Write a plan for each.")
    _require_unambiguous(tree, calls[0])
    return _partial(calls[0], Constants.of(tree))


def _require_unambiguous(tree: ast.Module, call: ast.Call) -> None:
    """Refuse a call that may not be Opacus' own with the arguments and noise in the text."""
    name = _called(call.func)
    if not isinstance(call.func, ast.Attribute) or not bound(tree).keys().isdisjoint(CALLS):
        raise not_imported(KIND, f"its {name} may not be Opacus'.", "Write a plan.")
    if not _imports_opacus(tree):
        raise not_imported(KIND, f"{name} is called, but opacus is not imported.", "Write a plan.")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise not_imported(
            KIND,
            f"{name} has arguments without a name.",
            "Name each argument in the call, or write a plan.",
        )
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="noise_multiplier", ctx=ast.Store() | ast.Del()):
                change = "noise_multiplier is set elsewhere"
            case ast.Attribute(attr=used) | ast.alias(name=used) if used in NOISE_SCHEDULERS:
                change = f"{used} changes the noise during training"
            case _:
                continue
        raise not_imported(KIND, f"{change}.", "Write a plan with the lowest noise.")


def _partial(call: ast.Call, known: Constants) -> Partial:
    arguments = {keyword.arg: keyword for keyword in call.keywords if keyword.arg is not None}
    value = {name: known.look_up(node.value) for name, node in arguments.items()}
    for name in NUMBERS:
        if not is_number(value.get(name)):
            value[name] = None
    release = {"name": "all", "clip_norm": value.get("max_grad_norm")}
    lines = [("", call.lineno)]
    if value.get("noise_multiplier") is not None:
        release["noise_multiplier"] = value["noise_multiplier"]
        lines.append(("/releases/0/noise_multiplier", arguments["noise_multiplier"].value.lineno))
    elif _called(call.func) == "make_private":
        raise not_imported(
            KIND,
            "noise_multiplier cannot be read without running the script.",
            "Write it as a number, or write a plan.",
        )
    if not is_number(release["clip_norm"]):
        release["clip_norm"] = 1.0
    data: dict[str, Any] = {"releases": [release]}
    if value.get("poisson_sampling") is True:
        data["sampling"] = {"scheme": "poisson"}
        lines.append(("/sampling/scheme", arguments["poisson_sampling"].value.lineno))
    if value.get("epochs") is not None:
        data["epochs"] = value["epochs"]
        lines.append(("/epochs", arguments["epochs"].value.lineno))
    target = {
        key: value[f"target_{key}"]
        for key in ("epsilon", "delta")
        if value.get(f"target_{key}") is not None
    }
    if target:
        data["target"] = target
        lines += [(f"/target/{key}", arguments[f"target_{key}"].value.lineno) for key in target]
    return Partial(
        kind=KIND,
        data=data,
        assumed=_assumed(call, arguments, value),
        lines=tuple(lines),
        excluded=(("scheme", POISSON),) if value.get("poisson_sampling") is False else (),
    )


def _assumed(call: ast.Call, arguments: dict[str, Any], value: dict[str, Any]) -> tuple[str, ...]:
    notes = ["Opacus: all trainable parameters are taken as one release."]
    if _called(call.func) == "make_private_with_epsilon":
        notes.append(
            "Opacus: make_private_with_epsilon calibrates its own noise multiplier, which is not "
            "checked; the noise calculated here is certified instead."
        )
    if isinstance(value.get("max_grad_norm"), list) or value.get("clipping") == "per_layer":
        notes.append(
            "Opacus: with per-layer clipping the noise multiplier is taken over the norm of all "
            "layers' clip norms together, which is what its optimiser does."
        )
    options = [
        name
        for name, node in arguments.items()
        if isinstance(node.value, ast.Attribute) and value[name] is not None
    ]
    if options:
        notes.append(f"Opacus: command line options at their defaults: {', '.join(options)}.")
    return tuple(notes)


def _called(node: ast.AST) -> str | None:
    """The method of Opacus that a node names, if any."""
    name = getattr(node, "attr", None) or getattr(node, "id", None)
    return name if name in CALLS else None


def _imports_opacus(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(_is_opacus(name.name) for name in names):
                return True
            case ast.ImportFrom(module=str(module), level=0) if _is_opacus(module):
                return True
    return False


def _is_opacus(module: str) -> bool:
    return module.partition(".")[0] == "opacus"


STATE_KIND = "Opacus accountant state"
ENTRY = 3
"""Values in an entry of the history: noise, rate and steps."""


def recognises_state(document: Any) -> bool:
    """Whether a document is the state of an Opacus accountant."""
    return isinstance(document, dict) and {"history", "mechanism"} <= document.keys()


def read_state(document: dict[str, Any]) -> Partial:
    """A phase for each entry of the history; raises ``MalformedPlan``."""
    only(STATE_KIND, document, ("history", "mechanism"))
    if not isinstance(document["mechanism"], str):
        raise not_imported(STATE_KIND, "mechanism is not a name.", "Save it with Opacus.")
    history = document["history"]
    if not isinstance(history, list) or not history:
        raise not_imported(STATE_KIND, "its history is empty.", "Save it after training.")
    if not all(isinstance(entry, list) and len(entry) == ENTRY for entry in history):
        raise not_imported(
            STATE_KIND, "its history is not a list of [noise, rate, steps].", "Save it with Opacus."
        )
    phases = [_phase(f"history {index}", *entry) for index, entry in enumerate(history)]
    return Partial(
        kind=STATE_KIND,
        data=dict(phases[0]) if len(phases) == 1 else {"phases": phases},
        assumed=(
            "Opacus: all parameters are taken as one release with one clip norm; with per-layer "
            "clipping that is right if max_grad_norm was the norm of all layers together.",
        ),
    )


def _phase(where: str, noise: Any, rate: Any, steps: Any) -> dict[str, Any]:
    multiplier = positive(STATE_KIND, f"{where}: noise_multiplier", noise)
    return {
        "sampling": {"probability": share(STATE_KIND, f"{where}: sample_rate", rate)},
        "steps": whole(STATE_KIND, f"{where}: num_steps", steps),
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": multiplier}],
    }
