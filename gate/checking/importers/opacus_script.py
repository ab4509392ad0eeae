"""The privacy arguments of an Opacus training script, read without running it.

``make_private`` and ``make_private_with_epsilon`` are looked for in the syntax tree. An
argument counts if it is a literal, a constant of the module, or a command line option's
default; anything else is asked for. Of the sampler nothing is known unless the script says
``poisson_sampling=True``.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from affidavit.gate.checking.importers.partial import Partial, not_taken

KIND = "Opacus script"
CALLS = ("make_private", "make_private_with_epsilon")


def read(raw: bytes) -> Partial | None:
    """What the script's one private call says; None where there is none.

    Raises ``MalformedPlan`` if it is no Python, or makes several things private.
    """
    if not any(name.encode() in raw for name in CALLS):
        return None
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise not_taken(KIND, f"it is not Python: {error}.", "Correct it.") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node)]
    if not calls:
        return None
    if len(calls) > 1:
        raise not_taken(KIND, "it makes several trainings private.", "Write a plan for each.")
    return _partial(calls[0], _Values.of(tree))


@dataclass(frozen=True, slots=True)
class _Values:
    """What names and command line options of a script stand for, where that is plain."""

    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ast.Module) -> _Values:
        found = cls()
        assigned: dict[str, int] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    assigned[target.id] = assigned.get(target.id, 0) + 1
                    if (value := _literal(node.value)) is not None:
                        found.constants[target.id] = value
            elif isinstance(node, ast.Call) and _attribute(node.func) == "add_argument":
                found._option(node)
        for name, times in assigned.items():
            if times > 1:  # which of the values it has is not known without running it
                found.constants.pop(name, None)
        return found

    def _option(self, node: ast.Call) -> None:
        names = [str(_literal(each)) for each in node.args if _literal(each) is not None]
        default = next((each.value for each in node.keywords if each.arg == "default"), None)
        long = next((each for each in names if each.startswith("--")), None)
        if long is not None and default is not None and (value := _literal(default)) is not None:
            self.options[long.lstrip("-").replace("-", "_")] = value

    def look_up(self, node: ast.expr | None) -> Any:
        """The value of an argument, or None."""
        if node is None:
            return None
        if (value := _literal(node)) is not None:
            return value
        if isinstance(node, ast.Name):
            return self.constants.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return self.options.get(node.attr)
        return None


def _partial(call: ast.Call, values: _Values) -> Partial:
    given = {each.arg: each for each in call.keywords if each.arg is not None}
    value = {name: values.look_up(node.value) for name, node in given.items()}
    release = {"name": "all", "clip_norm": value.get("max_grad_norm")}
    lines = [("", call.lineno)]
    if value.get("noise_multiplier") is not None:
        release["noise_multiplier"] = value["noise_multiplier"]
        lines.append(("/releases/0/noise_multiplier", given["noise_multiplier"].value.lineno))
    elif _called(call) == "make_private":
        raise not_taken(
            KIND,
            "noise_multiplier is not a number that can be read without running it.",
            "Write it as a number, or write a plan.",
        )
    if release["clip_norm"] is None or isinstance(release["clip_norm"], list):
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
    return Partial(kind=KIND, data=data, assumed=_assumed(given, value), lines=tuple(lines))


def _assumed(given: dict[str, Any], value: dict[str, Any]) -> tuple[str, ...]:
    found = ["Opacus: all trainable parameters are taken as one release."]
    if isinstance(value.get("max_grad_norm"), list) or value.get("clipping") == "per_layer":
        found.append(
            "Opacus: with per-layer clipping the noise multiplier is taken over the norm of all "
            "layers' clip norms together, which is what its optimiser does."
        )
    options = [name for name, node in given.items() if isinstance(node.value, ast.Attribute)]
    if options:
        found.append(f"Opacus: command line options at their defaults: {', '.join(options)}.")
    return tuple(found)


def _called(node: ast.Call) -> str | None:
    name = _attribute(node.func)
    return name if name in CALLS else None


def _attribute(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
