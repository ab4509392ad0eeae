"""Contradictions within correlated noise, participation and workload.

What each form of ``noise`` needs beside its kind, a participation that says one thing, and
a workload with what its kind needs. Whether a strategy suits the sampler and the steps is
not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from affidavit.plan.diagnostics import Reason
from affidavit.plan.strategies import (
    Bidiagonal,
    Matrix,
    SquareRoot,
    Toeplitz,
    ToeplitzInverse,
)

if TYPE_CHECKING:
    from affidavit.plan.document import Plan

LARGEST, LEAST = 1e100, 1e-100
"""Coefficients beyond these have squares that are not doubles."""


def contradictions(plan: Plan) -> Iterator[Reason]:
    """What does not agree with itself, phase by phase, and then the workload."""
    for index in range(len(plan.phases)):
        yield from _noise(plan, index)
        yield from _participation(plan, index)
    yield from _workload(plan)


def _noise(plan: Plan, index: int) -> Iterator[Reason]:
    match plan.phases[index].noise:
        case Toeplitz(coefficients=given) | ToeplitzInverse(coefficients=given):
            yield from _column(plan.pointer(index, "noise", "coefficients"), given)
        case SquareRoot(kind=kind, bands=bands):
            pointer = plan.pointer(index, "noise", "bands")
            if kind == "sqrt" and bands is not None:
                yield _conflict(pointer, "sqrt has all its bands.", "Remove bands, or write bsr.")
            if kind != "sqrt" and bands is None:
                yield Reason(
                    code="missing_field",
                    pointer=pointer,
                    message=f"{kind} has a number of bands.",
                    remedy="Give bands.",
                )
        case Bidiagonal(lambda_=None, normalized=True):
            yield Reason(
                code="missing_field",
                pointer=plan.pointer(index, "noise", "lambda"),
                message="the best lambda is found without normalized columns only.",
                remedy="Give lambda, or remove normalized.",
            )
        case Matrix(rows=rows) if rows is not None:
            yield from _rows(plan.pointer(index, "noise", "rows"), rows)
        case _:
            pass


def _column(pointer: str, given: tuple[float, ...]) -> Iterator[Reason]:
    if not LEAST <= abs(given[0]) <= LARGEST:
        yield _invalid(
            f"{pointer}/0",
            "the first coefficient is each step's own noise and must not be zero, nor beyond "
            "1e-100 to 1e100.",
            "Correct it.",
        )
    for place, value in enumerate(given):
        if abs(value) > LARGEST:
            yield _invalid(f"{pointer}/{place}", "the coefficient is above 1e100.", "Correct it.")
            return


def _rows(pointer: str, rows: tuple[tuple[float, ...], ...]) -> Iterator[Reason]:
    """The first row that is not one of a lower-triangular matrix with a diagonal."""
    for place, row in enumerate(rows):
        if len(row) != len(rows):
            yield _invalid(
                f"{pointer}/{place}",
                f"the row has {len(row)} entries in a matrix of {len(rows)} rows.",
                "Give a square matrix.",
            )
            return
        if not LEAST <= abs(row[place]) <= LARGEST:
            yield _invalid(
                f"{pointer}/{place}/{place}",
                "the diagonal is each step's own noise and must not be zero, nor beyond 1e-100 "
                "to 1e100.",
                "Correct it.",
            )
            return
        later = next((at for at in range(place + 1, len(row)) if row[at] != 0), None)
        if later is not None:
            yield _invalid(
                f"{pointer}/{place}/{later}",
                "the noise of a step uses noise that is drawn later.",
                "Give a lower-triangular matrix.",
            )
            return
        if max(map(abs, row)) > LARGEST:
            yield _invalid(f"{pointer}/{place}", "an entry is above 1e100.", "Correct it.")
            return


def _participation(plan: Plan, index: int) -> Iterator[Reason]:
    given = plan.phases[index].participation
    if given is None:
        return
    at_most, apart = (
        plan.pointer(index, "participation", name) for name in ("participations", "separation")
    )
    if given.schema_ != "single":
        if given.separation is None:
            yield Reason(
                code="missing_field",
                pointer=apart,
                message=f"{given.schema_} is a number of steps between participations.",
                remedy="Give separation.",
            )
        return
    if given.participations not in (None, 1):
        yield _conflict(at_most, "single is one participation.", "Write fixed_epoch, or remove it.")
    if given.separation is not None:
        yield _conflict(apart, "one participation has no separation.", "Remove it.")


def _workload(plan: Plan) -> Iterator[Reason]:
    given = plan.workload
    if given is None:
        return
    for name in ("momentum", "learning_rates"):
        if given.kind == "prefix_sum" and getattr(given, name) is not None:
            yield _conflict(
                f"/workload/{name}",
                f"prefix_sum has no {name}.",
                "Remove it, or write kind: momentum.",
            )
    if given.kind == "momentum" and given.momentum is None:
        yield Reason(
            code="missing_field",
            pointer="/workload/momentum",
            message="the workload of momentum has a momentum.",
            remedy="Give momentum; 0 is plain SGD with learning rates.",
        )


def _conflict(pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code="conflict", pointer=pointer, message=message, remedy=remedy)


def _invalid(pointer: str, message: str, remedy: str) -> Reason:
    return Reason(code="invalid_value", pointer=pointer, message=message, remedy=remedy)
