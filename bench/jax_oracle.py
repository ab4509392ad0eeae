"""Answer requests with jax-privacy, in a separate environment: one JSON request per line.

Runs under ``.venv-jax`` (created by ``make crosscheck``) and imports nothing of this project. An
answer has the result and its CPU seconds, including compilation, because every call of
jax-privacy's optimisers compiles again.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import json
import sys
import time
from functools import partial
from typing import Any

import jax
import numpy as np
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import sample_generation
from jax_privacy.matrix_factorization import buffered_toeplitz, dense, sensitivity, toeplitz


def optimise_toeplitz(steps: int, bands: int) -> Any:
    return np.asarray(toeplitz.optimize_banded_toeplitz(steps, bands)).tolist()


def optimise_blt(**arguments: Any) -> Any:
    result = buffered_toeplitz.optimize(**arguments)
    return {
        "decays": np.asarray(result.buf_decay).tolist(),
        "scales": np.asarray(result.output_scale).tolist(),
    }


def optimise_dense(steps: int, epochs: int) -> Any:
    return np.asarray(dense.optimize(steps, epochs=epochs)).tolist()


def minsep_of_toeplitz(column: list[float], steps: int, separation: int, most: int) -> Any:
    squared = toeplitz.minsep_sensitivity_squared(
        np.asarray(column), min_sep=separation, max_participations=most, n=steps
    )
    return float(squared) ** 0.5


def epochs_of_matrix(matrix: list[list[float]], epochs: int) -> Any:
    return float(sensitivity.fixed_epoch_sensitivity(np.asarray(matrix), epochs))


def minsep_of_matrix(matrix: list[list[float]], separation: int, most: int) -> Any:
    return float(
        sensitivity.get_min_sep_sensitivity_upper_bound(np.asarray(matrix), separation, most)
    )


def banded_of_matrix(matrix: list[list[float]], separation: int, most: int) -> Any:
    return float(sensitivity.get_sensitivity_banded(np.asarray(matrix), separation, most))


def errors_of_matrix(matrix: list[list[float]]) -> Any:
    return np.asarray(dense.per_query_error(strategy_matrix=np.asarray(matrix))).tolist()


def errors_of_column(column: list[float], steps: int) -> Any:
    return np.asarray(toeplitz.per_query_error(strategy_coef=np.asarray(column), n=steps)).tolist()


def column_of_blt(decays: list[float], scales: list[float], steps: int) -> Any:
    created = buffered_toeplitz.BufferedToeplitz.build(output_scale=scales, buf_decay=decays)
    return np.asarray(created.toeplitz_coefs(steps)).tolist()


def losses_of_draws(
    strategy: str,
    steps: int,
    apart: int,
    probability: float,
    noise: float,
    column: list[float],
    present: bool,
    count: int,
) -> Any:
    if strategy == "b_min_sep":
        lots = batch_selection.BMinSepSampling(probability, steps, apart)
    else:
        lots = batch_selection.BallsInBinsSampling(steps, apart)
    draw = partial(
        sample_generation.get_privacy_loss_sample,
        lots,
        noise,
        np.asarray(column),
        positive_sample=present,
    )
    if strategy == "b_min_sep":
        return draw(seed=1 + present, num_samples=count)[0].tolist()
    source = np.random.default_rng(1 + present)  # its losses of bins take one run at a time
    return [float(draw(seed=source)[0]) for _ in range(count)]


TASKS = {
    task.__name__: task
    for task in (
        optimise_toeplitz,
        optimise_blt,
        optimise_dense,
        minsep_of_toeplitz,
        epochs_of_matrix,
        minsep_of_matrix,
        banded_of_matrix,
        errors_of_matrix,
        errors_of_column,
        column_of_blt,
        losses_of_draws,
    )
}


def main() -> None:
    """Answer requests until the input ends."""
    with jax.enable_x64():
        jax.block_until_ready(jax.numpy.ones(3) + 1)
        for line in sys.stdin:
            request = json.loads(line)
            started = time.process_time()
            try:
                answer = {"result": TASKS[request["task"]](**request["arguments"])}
            except Exception as error:
                answer = {"failed": f"{type(error).__name__}: {error}"}
            answer["seconds"] = time.process_time() - started
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
