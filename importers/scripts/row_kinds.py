"""Say what computing with kinds gives: one value for each record still, or one of several."""

from __future__ import annotations

import ast
from collections.abc import Callable

from affidavit.importers.scripts.syntax import keywords_of, last_name
from affidavit.importers.scripts.use_table import HANDLES, SECRETS, Use

Kinds = frozenset[str]
NOTHING: Kinds = frozenset()
VALUE: Kinds = frozenset({"value"})
COUNTS: Kinds = frozenset({"size", "count"})


def as_value(kinds: Kinds) -> Kinds:
    """Return the kinds of a single value of what has these."""
    return (kinds - SECRETS) | VALUE if kinds & SECRETS else kinds


def computed(*parts: Kinds) -> Kinds:
    """Return the kinds of what is computed element by element."""
    taken = frozenset().union(*parts)
    held = taken & HANDLES - {"model", "criterion", "scheduler"}
    if held:  # as of ``[optimizer] + others``
        return taken
    secrets = (taken & SECRETS) - COUNTS
    if not secrets:
        return frozenset({"count"}) if taken & COUNTS else taken & {"model", "scheduler"}
    if secrets == {"lot"} and sum(1 for part in parts if part & SECRETS) == 1:
        return frozenset({"lot"})
    if len(secrets) == 1 and secrets != {"lots"} and secrets != {"lot"}:
        return secrets
    if secrets <= {"lot", "rows"} and all("lot" not in part or part == {"lot"} for part in parts):
        return frozenset({"rows"})
    return VALUE


def loss_of(kinds: Kinds) -> Kinds:
    """Return the kinds of a loss of these arguments: of one lot, or of something else."""
    secrets = kinds & SECRETS
    if not secrets:
        return NOTHING
    return frozenset({"loss"}) if secrets <= {"rows", "lot", "loss"} | COUNTS else VALUE


def arithmetic(node: ast.BinOp, op: ast.operator, left: Kinds, right: Kinds) -> Kinds:
    """Return the kinds of an arithmetic expression, which may join what it computes with."""
    taken = left | right
    if "data" in taken:
        made = last_name(getattr(node.left, "func", op)) in ("list", "tuple")
        whole = made or isinstance(node.left, ast.List | ast.Tuple)
        if whole or isinstance(op, ast.MatMult) or (left & right & {"data"}):
            return VALUE
    linear = isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div)
    both = "loss" in left and "loss" in right and isinstance(op, ast.Mult | ast.Div)
    if "loss" in taken and (not linear or both or "rows" in taken or (
        isinstance(op, ast.Div) and "loss" in right)):  # fmt: skip
        return VALUE
    return computed(left, right)


def applied(
    use: Use, call: ast.Call, place: int, passed: list[Kinds], kinds: Callable[[ast.expr], Kinds]
) -> Kinds:
    """Return what a listed function or method of rows gives; its options start at ``place``."""
    name, options, named = last_name(call.func), call.args[place:], keywords_of(call)
    taken, made, first = frozenset().union(*passed), computed(*passed), next(iter(options), None)
    if use.gives == "same":
        return VALUE if "loss" in taken and name in ("detach", "numpy") else taken
    if not made & SECRETS:
        return made
    if use.gives == "along":
        return _along_axis(call, made, place)
    match name:
        case "unsqueeze" | "expand_dims":
            keeps = is_later_axis(named.get("dim", named.get("axis", first)))
        case "transpose" | "swapaxes" if len(options) == 2:
            keeps = all(map(is_later_axis, options))
        case "transpose" | "swapaxes" | "permute":
            first = next(iter(getattr(first, "elts", ())), first)
            keeps = isinstance(first, ast.Constant) and first.value == 0
        case "view_as" | "reshape_as":
            keeps = first is not None and kinds(first) in ({"rows"}, {"lot"})
        case "view" | "reshape":
            others = frozenset().union(*map(kinds, options[1:]))
            rest = first is not None and ast.unparse(first) == "-1"
            keeps = not others if rest else first is not None and kinds(first) == {"size"}
        case _:
            keeps = True
    return made if keeps and "loss" not in made else VALUE


def _along_axis(call: ast.Call, made: Kinds, place: int) -> Kinds:
    """Keep rows that are computed along another axis than the first."""
    sums = last_name(call.func) in ("mean", "sum")
    place += last_name(call.func) in ("norm", "chunk", "split")  # which take a number before it
    named = keywords_of(call)
    axis = named.get("dim", named.get("axis", next(iter(call.args[place:]), None)))
    if "loss" in made or axis is None:
        keeps = sums or last_name(call.func) == "stack"
        return made if keeps and axis is None and made <= {"loss", "model"} else VALUE
    axes = axis.elts if isinstance(axis, ast.Tuple | ast.List) else [axis]
    return made if all(map(is_later_axis, axes)) else VALUE


def is_later_axis(axis: ast.expr | None) -> bool:
    """Whether an axis is not that of the records, for arrays of any number of axes."""
    match axis:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            return True
        case ast.Constant(value=int(number)):
            return number > 0
    return False


def shape_of(base: Kinds, name: str) -> Kinds:
    """Return the kind of what tells sizes: a shape is a ``size``, others are a ``count``."""
    if "value" in base and name in (
        "dim",
        "ndim",
        "keys",
        "columns",
    ):  # also of what one record is left of
        return VALUE
    if name not in ("shape", "size", "numel") or not base & {"lot", "rows", "loss", "value"}:
        return NOTHING
    return VALUE if "value" in base else frozenset({"count" if name == "numel" else "size"})


def size_at(index: ast.expr) -> Kinds:
    """Return the kind of a part of a shape: that of a later axis is public."""
    if isinstance(index, ast.Slice):
        first, inner = index.lower is None and index.step is None, index.lower
    else:
        first, inner = isinstance(index, ast.Constant) and index.value == 0, index
    if first:
        return frozenset({"size"})
    return NOTHING if is_later_axis(inner) else frozenset({"count"})


def keeps_rows(indices: list[ast.expr]) -> bool:
    """Whether the first of several indices leaves all rows, as the first axis."""
    match indices:
        case [ast.Slice(lower=None, upper=None, step=None), *_]:
            return True
        case [ast.Constant(value=first), _]:
            return first is Ellipsis
    return False


def is_key(index: ast.expr) -> bool:
    """Whether an index names a column."""
    return isinstance(index, ast.Constant) and isinstance(index.value, str)
