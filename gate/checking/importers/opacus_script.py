"""The privacy arguments of an Opacus training script, read without running it.

``make_private`` and ``make_private_with_epsilon`` are looked for in the syntax tree. An
argument counts if it is a literal, a constant of the module, or a command line option's
default, where the text leaves no doubt (``script_names``); anything else is asked for. Of the
sampler nothing is known unless the script says ``poisson_sampling=True``.

``make_private_with_epsilon`` leaves the noise to Opacus, which calibrates its own: the plan is
solved for, and Opacus' number is not what is certified.
"""

from __future__ import annotations

import ast
from typing import Any

from affidavit.gate.checking.importers.fields import is_number
from affidavit.gate.checking.importers.partial import Partial, not_taken
from affidavit.gate.checking.importers.script_names import Known, bound

KIND = "Opacus script"
CALLS = ("make_private", "make_private_with_epsilon")
NOISE_SCHEDULERS = frozenset({"ExponentialNoise", "LambdaNoise", "StepNoise"})
POISSON = ("poisson", "truncated_poisson", "cyclic_poisson")
NUMBERS = ("noise_multiplier", "epochs", "target_epsilon", "target_delta")


def read(raw: bytes) -> Partial | None:
    """What the script's one private call says; None where there is none.

    Raises ``MalformedPlan`` if it is no Python, makes several things private, or may have
    another method called than Opacus' own, with other arguments or other noise than it says.
    """
    if not any(name.encode() in raw for name in CALLS):
        return None
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise not_taken(KIND, f"it is not Python: {error}.", "Correct it.") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node.func)]
    if not calls:
        return None
    if sum(_called(node) is not None for node in ast.walk(tree)) > 1:
        raise not_taken(KIND, "it makes several trainings private.", "Write a plan for each.")
    _refuse_doubts(tree, calls[0])
    return _partial(calls[0], Known.of(tree))


def _refuse_doubts(tree: ast.Module, call: ast.Call) -> None:
    """Refuse what may not be Opacus' own method with the arguments and noise that are written."""
    name = _called(call.func)
    if not isinstance(call.func, ast.Attribute) or not bound(tree).keys().isdisjoint(CALLS):
        raise not_taken(KIND, f"its {name} may not be Opacus'.", "Write a plan.")
    if not _imports_opacus(tree):
        raise not_taken(KIND, f"{name} is called, and opacus not imported.", "Write a plan.")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise not_taken(
            KIND,
            f"{name} has arguments that are not written by name.",
            "Write each argument in the call, or write a plan.",
        )
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="noise_multiplier", ctx=ast.Store() | ast.Del()):
                change = "noise_multiplier is set elsewhere"
            case ast.Attribute(attr=used) | ast.alias(name=used) if used in NOISE_SCHEDULERS:
                change = f"{used} changes the noise as it trains"
            case _:
                continue
        raise not_taken(KIND, f"{change}.", "Write a plan with the least noise.")


def _partial(call: ast.Call, known: Known) -> Partial:
    given = {keyword.arg: keyword for keyword in call.keywords if keyword.arg is not None}
    value = {name: known.look_up(node.value) for name, node in given.items()}
    for name in NUMBERS:
        if not is_number(value.get(name)):
            value[name] = None
    release = {"name": "all", "clip_norm": value.get("max_grad_norm")}
    lines = [("", call.lineno)]
    if value.get("noise_multiplier") is not None:
        release["noise_multiplier"] = value["noise_multiplier"]
        lines.append(("/releases/0/noise_multiplier", given["noise_multiplier"].value.lineno))
    elif _called(call.func) == "make_private":
        raise not_taken(
            KIND,
            "noise_multiplier is not a number that can be read without running it.",
            "Write it as a number, or write a plan.",
        )
    if not is_number(release["clip_norm"]):
        release["clip_norm"] = 1.0
    data: dict[str, Any] = {"releases": [release]}
    if value.get("poisson_sampling") is True:
        data["sampling"] = {"scheme": "poisson"}
        lines.append(("/sampling/scheme", given["poisson_sampling"].value.lineno))
    if value.get("epochs") is not None:
        data["epochs"] = value["epochs"]
        lines.append(("/epochs", given["epochs"].value.lineno))
    target = {
        key: value[f"target_{key}"]
        for key in ("epsilon", "delta")
        if value.get(f"target_{key}") is not None
    }
    if target:
        data["target"] = target
        lines += [(f"/target/{key}", given[f"target_{key}"].value.lineno) for key in target]
    return Partial(
        kind=KIND,
        data=data,
        assumed=_assumed(call, given, value),
        lines=tuple(lines),
        excluded=(("scheme", POISSON),) if value.get("poisson_sampling") is False else (),
    )


def _assumed(call: ast.Call, given: dict[str, Any], value: dict[str, Any]) -> tuple[str, ...]:
    found = ["Opacus: all trainable parameters are taken as one release."]
    if _called(call.func) == "make_private_with_epsilon":
        found.append(
            "Opacus: make_private_with_epsilon calibrates its own noise multiplier, which is not "
            "checked; what is certified is the noise that is found here."
        )
    if isinstance(value.get("max_grad_norm"), list) or value.get("clipping") == "per_layer":
        found.append(
            "Opacus: with per-layer clipping the noise multiplier is taken over the norm of all "
            "layers' clip norms together, which is what its optimiser does."
        )
    options = [
        name
        for name, node in given.items()
        if isinstance(node.value, ast.Attribute) and value[name] is not None
    ]
    if options:
        found.append(f"Opacus: command line options at their defaults: {', '.join(options)}.")
    return tuple(found)


def _called(node: ast.AST) -> str | None:
    """Which of Opacus' two methods a node names, or an object that is called so."""
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
