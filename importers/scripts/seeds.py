"""Find seeds of the noise or the lots that a reader of the script may know.

A seed is secret if it comes from the system's entropy, or from an option or a setting that the
text gives no value. Every other seed is an open question.
"""

from __future__ import annotations

import ast
import builtins

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.syntax import keywords_of, last_name, root_of
from affidavit.importers.scripts.values import Evaluator

KNOWN_SEED = "a reader of the seed knows the noise"


def may_know_seed(values: Evaluator, node: ast.expr) -> bool:
    """Whether a reference to a function that seeds generators may give a seed that others know."""
    script, call = values.script, values.script.parents[node]
    name = last_name(node) or ""
    own = isinstance(node, ast.Name) and (
        not script.bindings_of(node)
        or any(not isinstance(item.node, ast.alias) for item in script.bindings_of(node))
    )
    jax_key = name == "key" and script.module_path(node) == "jax.random.key"
    if (name not in NAMES["seeds"] and not jax_key) or own:
        return False
    engines = script.calls_to("PrivacyEngine")
    if any(values.known_value(keywords_of(item).get("secure_mode")) for item in engines):
        return False
    if not isinstance(call, ast.Call) or call.func is not node:
        return True  # what it is passed to, or named, may call it with any seed
    seed = next(iter(call.args), keywords_of(call).get("seed"))
    return not _is_secret(values, seed) and not _seeds_splits(values, call)


def may_know_lots(values: Evaluator, drawn: ast.expr) -> bool:
    """Whether a lot is drawn by a generator of Python or NumPy whose seed the script shows."""
    for call in (part for part in ast.walk(drawn) if isinstance(part, ast.Call)):
        root = root_of(call.func)
        bindings = values.script.bindings_of(root) if isinstance(root, ast.Name) else []
        made = [item.value for item in bindings if isinstance(item.value, ast.Call)]
        made = [item for item in made if last_name(item.func) in NAMES["generators"]]
        if made:
            seeds = [next(iter(item.args), keywords_of(item).get("seed")) for item in made]
        elif values.script.module_path(call.func).startswith(("numpy.random.", "random.")):
            seeding = values.script.calls_to("seed")
            seeds = [item.args[0] for item in seeding if item.args]
        else:
            continue
        if not all(_is_secret(values, seed) for seed in seeds):
            return True
    return False


def _is_secret(values: Evaluator, seed: ast.expr | None, depth: int = 0) -> bool:
    """Whether no reader of the script knows a seed."""
    if seed is None or depth > 10:
        return seed is None
    if values.known_value(seed) is not None:
        return False
    match seed:
        case ast.Call(func=function, args=args):
            path = values.script.module_path(function)
            undefined = isinstance(function, ast.Name) and not (
                values.script.bindings_of(function) or hasattr(builtins, function.id)
            )
            return undefined or path in NAMES["entropy"] or (
                last_name(function) in NAMES["same_number"]
                and bool(args)
                and _is_secret(values, args[0], depth + 1)
            ) or (
                isinstance(function, ast.Attribute)
                and isinstance(function.value, ast.Call)
                and _is_secret(values, function.value, depth + 1)
            )  # fmt: skip
        case ast.BinOp(left=left, op=ast.Add() | ast.Mod() | ast.BitAnd() | ast.BitXor()):
            return _is_secret(values, left, depth + 1)
        case ast.Attribute():
            # An option or setting, and not a constant of another package.
            return not values.script.module_path(seed)
        case ast.Name():
            bindings = values.script.bindings_of(seed)
            if any(isinstance(item.node, ast.arg) for item in bindings):
                passed = [item for binding in bindings if isinstance(binding.node, ast.arg)
                          for item in values.known_arguments(seed, binding.node)]  # fmt: skip
                return all(_is_secret(values, item, depth + 1) for item in passed)
            return all(
                item.value is not None and _is_secret(values, item.value, depth + 1)
                for item in bindings
            )
    return isinstance(seed, ast.Constant | ast.Subscript)


def _seeds_splits(values: Evaluator, call: ast.Call) -> bool:
    """Whether a generator of its own is seeded, that only splits the records."""
    script = values.script
    if not isinstance(call.func, ast.Attribute):
        return False
    root = root_of(call.func.value)
    if isinstance(root, ast.Name) and script.module_path(root):
        return False
    outer = script.parents[call]
    named = [item for item in getattr(outer, "targets", ()) if isinstance(item, ast.Name)]
    if isinstance(call.func.value, ast.Name):
        named = [call.func.value]
    uses: list[ast.AST] = [use for item in named for use in script.reads_of(item.id)]
    calls = [
        next((o for o in script.ancestors(use) if isinstance(o, ast.Call)), use)
        for use in uses or [call]
    ]
    return all(
        item is call or last_name(getattr(item, "func", item)) in NAMES["splits"] for item in calls
    )
