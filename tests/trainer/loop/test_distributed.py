"""Two processes share a run: disjoint shards, one noise, the same parameters, one fate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from affidavit.evidence import check_conformance, read_losses
from affidavit.trainer import mlp
from affidavit.trainer.data.numeric_data import CANARIES, LOSSES
from affidavit.trainer.loop import train
from tests.support.forked_processes import fork
from tests.support.free_ports import free_port
from tests.support.polling import TIMEOUT_SECONDS
from tests.support.trust import trusting
from tests.trainer.loop.small_run import (
    KEY,
    STEPS,
    FinishedRun,
    bundle_of,
    entries_of,
    entropy_of,
    plan_with,
)
from tests.trainer.loop.test_loop import lots_of, predicate_of

ROOT = Path(__file__).parents[3]
FORKED = "tests.trainer.loop.forked_ranks"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where two ranks find their certificate and leave what they come to."""
    (tmp_path / "bundle.json").write_bytes(bundle_of(plan_with()))
    (tmp_path / "keys.json").write_text(json.dumps(KEY.public.as_record()))
    return tmp_path


def both(folder: Path, *what: str) -> list[int]:
    """Two ranks as ``torchrun`` starts them, without its own process; how each ended."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (folder / "log").open("wb") as log:
        ranks = [
            fork(FORKED, ["rank", str(folder), *what], environment(rank, meeting), log.fileno())
            for rank in (0, 1)
        ]
        return [rank.wait(TIMEOUT_SECONDS) for rank in ranks]


def environment(rank: int, meeting: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def torchrun(folder: Path) -> list[int]:
    """The same ranks, started by the program; how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    rank = ["-m", "tests.trainer.loop.rank", str(folder)]
    done = subprocess.run([*command, *rank], check=False, cwd=ROOT, env={**os.environ, **changes})
    return [done.returncode] * 2


@pytest.mark.parametrize("start", [both, pytest.param(torchrun, marks=pytest.mark.soak)])
def test_two_ranks_train_as_one_process_does(
    run: Callable[..., FinishedRun], folder: Path, start: Callable[[Path], list[int]]
) -> None:
    assert start(folder) == [0, 0]
    one, other = (torch.load(folder / f"values.{rank}") for rank in (0, 1))
    # A process that keeps them aborts, now and then, while Python ends.
    assert [(folder / f"threads.{rank}").read_text() for rank in (0, 1)] == ["", ""]
    alone = run(seed=1)
    for name, value in alone.model.module.state_dict().items():
        assert torch.equal(one[name], other[name])
        assert torch.allclose(one[name], value, atol=1e-6)
    read = [set(shards(folder, rank)) for rank in (0, 1)]
    lots = [(step, record) for step, lot in enumerate(lots_of(1)) for record in lot.tolist()]
    counts = [sorted(record for _, record in lots)]
    assert sorted([*shards(folder, 0), *shards(folder, 1)]) == counts[0]
    assert all(read)
    result = check_conformance((folder / "run" / "record.jsonl").read_bytes(), predicate_of(
        (folder / "bundle.json").read_bytes()
    ))  # fmt: skip
    assert result.findings == ()
    assert entries_of(folder / "run")[0]["performance"]["ranks"] == 2


def shards(folder: Path, rank: int) -> list[int]:
    """The records that a rank read, of all lots."""
    return [int(word) for word in (folder / f"read.{rank}").read_text().split()]


@pytest.mark.soak
def test_two_ranks_have_the_canaries_and_their_losses_of_one_process(folder: Path) -> None:
    from tests.trainer.audit.test_canaries import FEW, POINTS

    (folder / "bundle.json").write_bytes(bundle_of(FEW))
    assert both(folder, "canaries") == [0, 0]
    shared = {name: (folder / "run" / name).read_bytes() for name in (CANARIES, LOSSES)}
    train(
        bundle=(folder / "bundle.json").read_bytes(),
        trusted=trusting(KEY.public),
        plan=FEW,
        data=POINTS,
        model=mlp("4,seed=1,blocks=all", POINTS),
        out=folder / "alone",
        quiet=True,
        entropy=entropy_of(1),
    )
    assert shared[CANARIES] == (folder / "alone" / CANARIES).read_bytes()
    losses = (read_losses((folder / "alone" / LOSSES).read_bytes()), read_losses(shared[LOSSES]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_rank_that_dies_stops_all_and_the_step_stays_charged(
    run: Callable[..., FinishedRun], folder: Path
) -> None:
    left, died = both(folder, "die", "6")
    assert left != 0
    assert died == -signal.SIGKILL
    assert (folder / "failure.0").read_text() == "rank_lost"
    entries = entries_of(folder / "run")
    charged = [entry["step"] for entry in entries if entry["type"] == "charge"]
    released = [entry["step"] for entry in entries if entry["type"] == "release"]
    assert charged == [*released, released[-1] + 1]
    # One process may go on with what two began.
    run(out=folder / "run", bundle=(folder / "bundle.json").read_bytes(), resume=True)
    result = check_conformance((folder / "run" / "record.jsonl").read_bytes(), predicate_of(
        (folder / "bundle.json").read_bytes()
    ))  # fmt: skip
    assert result.findings == ()
    assert result.steps_charged == STEPS


@pytest.mark.soak
def test_ranks_that_compute_otherwise_are_stopped(
    folder: Path,
) -> None:
    assert all(both(folder, "stray"))
    assert {(folder / f"failure.{rank}").read_text() for rank in (0, 1)} == {"ranks_differ"}
    assert entries_of(folder / "run")[-1]["type"] == "charge"
