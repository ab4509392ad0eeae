"""Find seeds of the noise or the lots that a reader of the script may know.

A seed is secret if it comes from the system's entropy, or from an option or a setting that the
text gives no value. Every other seed is an open question.
"""

from __future__ import annotations

import ast

from affidavit.importers.names import NAMES
from affidavit.importers.scripts.syntax import keywords_of, last_name
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


def _is_secret(values: Evaluator, seed: ast.expr | None) -> bool:
    """Whether no reader of the script knows a seed."""
    if seed is None or values.known_value(seed) is not None:
        return seed is None
    script, made = values.script, values.origin_of(seed) or seed
    if isinstance(made, ast.BinOp):
        joins = isinstance(made.op, ast.Add | ast.Mod | ast.BitAnd | ast.BitXor)
        return joins and _is_secret(values, made.left)
    calls = [part for part in ast.walk(made) if isinstance(part, ast.Call)]
    drawn = [call for call in calls if script.module_path(call.func) in NAMES["entropy"]]
    if calls:
        computes = any(isinstance(part, ast.BinOp) for part in ast.walk(made))
        return bool(drawn) and not computes and all(
            call in drawn or last_name(call.func) in NAMES["same_number"]
            or isinstance(getattr(call.func, "value", None), ast.Call) for call in calls
        )  # fmt: skip
    # An option or setting, and not a constant of another package.
    return isinstance(made, ast.Subscript | ast.Attribute) and not script.module_path(made)


def _seeds_splits(values: Evaluator, call: ast.Call) -> bool:
    """Whether a generator of its own is seeded, in a script whose generators only split records."""
    if not isinstance(call.func, ast.Attribute) or values.script.module_path(call.func):
        return False
    return all(
        last_name(item.func) in NAMES["splits"]
        for item in values.script.calls
        if not keywords_of(item).keys().isdisjoint(("generator", "noise_generator"))
    )
