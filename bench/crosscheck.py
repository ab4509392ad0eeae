"""Compare our sensitivities and errors with jax-privacy's, on random strategies of every family.

jax-privacy is not a dependency. Without ``.venv-jax`` this program says so and exits with 0.
Its numbers are doubles without outward rounding, so they are compared to a relative 1e-9. Two
known differences are not compared: the error metric of ``toeplitz.loss`` for
columns shorter than the run, and anything for signed or increasing columns, which it refuses.

    make crosscheck
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax_client import Oracle

from affidavit.mechanisms.strategies import Dense, Participation, Workload
from affidavit.mechanisms.strategies.blt import Blt
from affidavit.mechanisms.strategies.optimal.dense import optimal_banded, optimal_dense
from affidavit.mechanisms.strategies.optimal.toeplitz import optimal_toeplitz
from affidavit.mechanisms.strategies.toeplitz import Toeplitz

STEPS, MOST, SEPARATION = 60, 4, 15
APART = Participation.min_separation(participations=MOST, separation=SEPARATION)
EPOCHS = Participation.fixed_epoch(participations=MOST, separation=SEPARATION)
AGREE = 1e-9


class Check(NamedTuple):
    """A number, or list of numbers, from both sides. With ``bound``, ours may be smaller."""

    name: str
    ours: float | list[float]
    theirs: float | list[float]
    bound: bool = False


def toeplitz_checks(oracle: Oracle) -> Iterator[Check]:
    """Yield sensitivity and errors of Toeplitz columns, random and optimal."""
    generator = np.random.default_rng(1)
    falling = np.sort(generator.uniform(0, 1, (5, STEPS)), axis=1)[:, ::-1]
    columns = [*falling, optimal_toeplitz(STEPS, Workload(), APART, bands=SEPARATION)]
    for place, column in enumerate(columns):
        own = Toeplitz.from_strategy(column, STEPS)
        theirs = oracle.ask(
            "minsep_of_toeplitz",
            column=column.tolist(),
            steps=STEPS,
            separation=SEPARATION,
            most=MOST,
        ).result
        yield Check(f"Toeplitz {place}: sensitivity", own.sensitivity(APART).value, theirs)
        errors = oracle.ask("errors_of_column", column=column.tolist(), steps=STEPS).result
        ours = own.errors(Workload()).per_step ** 2
        yield Check(f"Toeplitz {place}: variance of every step", ours.tolist(), errors)


def matrix_checks(oracle: Oracle) -> Iterator[Check]:
    """Yield sensitivity and errors of matrices, random and optimal."""
    generator = np.random.default_rng(2)
    random = np.tril(generator.uniform(0, 1, (3, STEPS, STEPS))) + np.eye(STEPS)
    matrices = [*random, optimal_dense(np.tri(STEPS), EPOCHS)[0]]
    for place, matrix in enumerate(matrices):
        own, rows = Dense.from_strategy(matrix), matrix.tolist()
        epochs = oracle.ask("epochs_of_matrix", matrix=rows, epochs=MOST).result
        yield Check(f"matrix {place}: fixed epochs", own.sensitivity(EPOCHS).value, epochs)
        apart = oracle.ask("minsep_of_matrix", matrix=rows, separation=SEPARATION, most=MOST).result
        ours = own.sensitivity(APART).value
        yield Check(f"matrix {place}: minimum separation", ours, apart, bound=True)
        errors = oracle.ask("errors_of_matrix", matrix=rows).result
        ours_errors = own.errors(Workload()).per_step ** 2
        yield Check(f"matrix {place}: variance of every step", ours_errors.tolist(), errors)
    banded = optimal_banded(np.tri(STEPS), SEPARATION)
    theirs = oracle.ask(
        "banded_of_matrix", matrix=banded.tolist(), separation=SEPARATION, most=MOST
    ).result
    yield Check("banded: sensitivity", Dense.from_strategy(banded).sensitivity(APART).value, theirs)


def blt_checks(oracle: Oracle) -> Iterator[Check]:
    """Yield coefficients of buffered strategies."""
    for decays, scales in (([0.9], [0.3]), ([0.99, 0.8, 0.3], [0.05, 0.2, 0.3])):
        column = oracle.ask("column_of_blt", decays=decays, scales=scales, steps=STEPS).result
        own = Blt.of(decays, scales, STEPS)
        yield Check(f"BLT {len(decays)}: coefficients", own.strategy_coefficients.tolist(), column)


def agrees(check: Check) -> bool:
    """Whether both sides agree, or ours is the smaller of two bounds."""
    ours, theirs = np.asarray(check.ours), np.asarray(check.theirs)
    if check.bound:
        return bool(np.all(ours <= theirs * (1 + AGREE)))
    return bool(np.allclose(ours, theirs, rtol=AGREE, atol=1e-12))


def main() -> int:
    """Compare, print every disagreement, and return 1 if there is one."""
    if not Oracle.available():
        return 0
    failed = total = 0
    with Oracle() as oracle:
        for checks in (toeplitz_checks, matrix_checks, blt_checks):
            for check in checks(oracle):
                total += 1
                if not agrees(check):
                    failed += 1
                    sys.stdout.write(f"{check.name}: ours {check.ours}, theirs {check.theirs}\n")
    sys.stdout.write(f"{total - failed} of {total} comparisons with jax-privacy 2.0.0 agree\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
