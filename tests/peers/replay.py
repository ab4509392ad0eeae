"""A loop of jax-privacy passes a replay unchanged, and faults that are planted in it are named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from affidavit import Plan
from affidavit.evidence import ReplayRecord
from affidavit.replay import ReplayRefused, replay_command, to_text
from affidavit.replay.driver import PACKAGES, Launch, interpreter
from tests.replay.faults import Fault

LOOP = """\
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from jax_privacy import batch_selection, noise_addition

SIZE, RATE, STEPS, CLIP_NORM, NOISE_MULTIPLIER = 200, 0.1, 6, 1.0, 1.1


def loss_of(params, x, y):
    return optax.sigmoid_binary_cross_entropy(x @ params["w"] + params["b"], y).mean()


def main():
    x = jax.random.normal(jax.random.key(1), (SIZE, 6))
    y = (x[:, 0] > 0).astype(float)
    params = {"w": jnp.zeros(6), "b": jnp.zeros(())}
    # before
    clipped = jax_privacy.clipped_grad(
        loss_of, l2_clip_norm=CLIP_NORM, batch_argnums=(1, 2), return_values=True
    )
    noise = noise_addition.gaussian_privatizer(
        stddev=NOISE_MULTIPLIER * clipped.sensitivity(), prng_key=3
    )
    optimizer = optax.sgd(0.1)
    noise_state, state = noise.init(params), optimizer.init(params)

    @jax.jit
    def step(params, noise_state, state, x, y, is_padding_example):
        # begun
        total, aux = clipped(params, x, y, is_padding_example=is_padding_example)
        # clipped
        noisy, noise_state = noise.update(total, noise_state)
        updates, state = optimizer.update(noisy, state)
        params = optax.apply_updates(params, updates)
        # updated
        return params, noise_state, state, aux.values.mean()

    lots = batch_selection.CyclicPoissonSampling(sampling_prob=RATE, iterations=STEPS)
    for lot in lots.batch_iterator(SIZE):
        lot = batch_selection.pad_to_multiple_of(lot, 16)
        params, noise_state, state, loss = step(
            params, noise_state, state, x[lot], y[lot], lot == -1
        )
        print(loss)
        # stepped
    np.savez("model.npz", **params)


main()
"""
BEFORE, BEGUN, CLIPPED = "    # before\n", "        # begun\n", "        # clipped\n"
UPDATED, STEPPED, PADDED = "        # updated\n", "        # stepped\n", "        lot = batch_selec"
PLAN = Plan.dp_sgd(
    adjacency="add_remove",
    sampling="poisson",
    size=200,
    lot_size=20,
    steps=6,
    noise_multiplier=1.1,
    delta=1e-5,
)
FAULTS = [
    Fault(
        "the noise is smaller than the plan's",
        {"stddev=NOISE": "stddev=0.5 * NOISE"},
        "noise_below_plan",
        "noise.update",
    ),
    Fault(
        "gradients are not clipped",
        {CLIPPED: "        total = jax.grad(lambda p: len(x) * loss_of(p, x, y))(params)\n"},
        "sensitivity_exceeded",
        "noise.update",
    ),
    Fault(
        "the batch's mean is clipped",
        {
            CLIPPED: "        total = jax.grad(loss_of)(params, x, y)\n"
            "        norm = optax.tree.norm(total)\n"
            "        total = jax.tree.map(lambda g: g * len(x) / jnp.maximum(1, norm), total)\n"
        },
        "sensitivity_exceeded",
        "noise.update",
    ),
    Fault(
        "statistics of the batch scale its records",
        {BEGUN: "        x = (x - x.mean(0)) / x.std(0)\n"},
        "sensitivity_exceeded",
        "noise.update",
    ),
    Fault(
        "a record is used twice",
        {PADDED: "        lot = np.concatenate([lot, lot])\n" + PADDED},
        "sensitivity_exceeded",
        "noise.update",
    ),
    Fault(
        "a raw gradient is added beside",
        {UPDATED: "        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, total)\n"},
        "state_differs",
        "p - 0.1 * g",
        "b",
    ),
    Fault(
        "initial weights are means of the records",
        {BEFORE: "    params['w'] = x.mean(0)\n"},
        "state_differs",
        "x.mean(0)",
        "w",
    ),
    Fault(
        "each step has the same noise",
        {"noisy, noise_state = noise": "noisy, _ = noise"},
        "noise_repeated",
        "noise.update",
    ),
    Fault(
        "training stops by a private score",
        {STEPPED: "        if jnp.abs(x @ params['w']).max() > 50:\n            break\n"},
        "steps_differ",
        "if jnp.abs",
    ),
    Fault(
        "a file has raw values",
        {STEPPED: "        np.save('loss.npy', loss)\n"},
        "file_differs",
        "loss.npy",
        "loss.npy",
    ),
]


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    """An interpreter that has imported jax-privacy once."""
    packages = [*PACKAGES["jax"], *PACKAGES["jax_privacy"]]
    with interpreter(sys.executable, packages) as started:
        yield started


def replayed(folder: Path, launch: Launch, loop: str) -> ReplayRecord:
    """A replay of ``loop`` on the plan."""
    (folder / "train.py").write_text(loop)
    command = [sys.executable, "train.py"]
    return replay_command(command, folder=folder, records=1, plan=PLAN, launch=launch)


def test_an_honest_loop_is_not_refuted(tmp_path: Path, launch: Launch) -> None:
    record = replayed(tmp_path, launch, LOOP)
    assert record.verdict == "not_refuted", to_text(record)
    assert {check for _, check in record.checks} == {"shown"}
    assert record.steps == 6
    assert record.largest_move is not None
    assert 0.5 < record.largest_move <= 1.001
    assert {item.code for item in record.findings} == {"raw_value_logged"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named(tmp_path: Path, launch: Launch, fault: Fault) -> None:
    loop = fault.planted(LOOP)
    record = replayed(tmp_path, launch, loop)
    assert fault.is_named(record, loop), to_text(record)


@pytest.mark.parametrize(("lot", "verdict"), [("lot", "not_refuted"), ("[*lot, *lot]", "refuted")])
def test_batches_of_another_loader_are_found_by_their_rows(
    tmp_path: Path, launch: Launch, lot: str, verdict: str
) -> None:
    start, end = LOOP.index("    lots = "), LOOP.index("        params, noise_state, state, loss =")
    drawn = (
        "    rng = np.random.default_rng(1)\n"
        "    for _ in range(STEPS):\n"
        "        lot = rng.permutation(SIZE)[:16]\n"
        f"        lot = np.array({lot})\n"
    )
    (tmp_path / "train.py").write_text(LOOP[:start] + drawn + LOOP[end:])
    command = [sys.executable, "train.py"]
    record = replay_command(command, folder=tmp_path, records=2, launch=launch)
    assert record.verdict == verdict, to_text(record)
    assert record.checks.non_interference == "shown"
    assert record.checks.sensitivity == ("shown" if verdict == "not_refuted" else "refuted")


def test_records_that_no_variable_holds_have_to_be_marked(tmp_path: Path, launch: Launch) -> None:
    loop = LOOP.replace("batch_iterator(SIZE)", "batch_iterator(SIZE - 1)")
    with pytest.raises(ReplayRefused, match="no variable with the 199 records") as refused:
        replayed(tmp_path, launch, loop)
    assert refused.value.code == "loop_failed"
