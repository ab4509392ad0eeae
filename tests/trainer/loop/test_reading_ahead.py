"""A loader's workers read the lots that were drawn, while steps run, and take the digest."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from affidavit.trainer import PrivateRun
from affidavit.trainer.adapters import digest_of_tensors
from affidavit.trainer.data.loaded_records import CHUNK, DIGEST_FILE, LoadedRecords
from tests.support.polling import TIMEOUT_SECONDS
from tests.trainer.loop.small_run import DEVICE, RECORDS, STEPS, entries_of, entropy_of
from tests.trainer.loop.test_private_loop import (
    DATA,
    begin_run,
    bundle,
    finish,
    losses,
    network,
    require_conformant,
    take_step,
)

"""How long a test waits for what must happen, before it fails."""
FORKED = multiprocessing.get_context("fork")


class Numbered(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The records with their numbers; ``drawn`` adds to each."""

    def __init__(self, *, drawn: bool = False) -> None:
        self._drawn = drawn

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor, Tensor]:
        x = DATA.x[place] + 0.1 * torch.randn(3) if self._drawn else DATA.x[place]
        return x, DATA.y[place], torch.tensor(place)


def without_numbers(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch[:2])


def begin(out: Path, loader: DataLoader[Any], **changes: Any) -> PrivateRun:
    return begin_run(
        out, network().to(DEVICE), loader=loader, **{"losses": without_numbers, **changes}
    )


def same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("affidavit.trainer.private_loop.os", SimpleNamespace(urandom=entropy_of(1)))


def test_workers_change_neither_lots_nor_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, weights = [], []
    for workers in (0, 2):
        same_keys(monkeypatch)
        loader = DataLoader(Numbered(drawn=True), batch_size=5, num_workers=workers)
        run = begin(tmp_path / str(workers), loader)
        places = []
        for batch in run:
            places.append((run.step, batch[2].tolist()))
            take_step(run, batch)
        read.append(places)
        weights.append(torch.cat([item.flatten() for item in run._model.module.parameters()]))
        require_conformant(tmp_path / str(workers), bundle()[0])
    assert read[0] == read[1]
    assert torch.equal(*weights)


def test_a_step_runs_while_the_next_lot_is_read(tmp_path: Path) -> None:
    """Each read waits for a step that runs, and the step waits for the read."""
    running, was_read = FORKED.Semaphore(0), FORKED.Semaphore(0)
    first, overlaps = FORKED.Value("b", 1), 0

    def slow(items: list[Any]) -> Any:
        if get_worker_info() is not None:
            with first.get_lock():
                is_first, first.value = bool(first.value), 0
            if not is_first:
                assert running.acquire(timeout=TIMEOUT_SECONDS)
                was_read.release()
        return torch.utils.data.default_collate(items)

    loader = DataLoader(
        Numbered(), batch_size=RECORDS, num_workers=1, prefetch_factor=1, collate_fn=slow,
        multiprocessing_context="fork",
    )  # fmt: skip
    run = begin(tmp_path, loader, digest="given")
    for batch in run:
        run.loss(batch).backward()  # type: ignore[no-untyped-call]
        if run.step < STEPS - 1:
            running.release()
            assert was_read.acquire(timeout=TIMEOUT_SECONDS)
            overlaps += 1
        run.optimizer.step()
    assert overlaps == STEPS - 1


@pytest.mark.soak
def test_a_worker_s_failure_ends_the_loop_and_the_run_resumes(tmp_path: Path) -> None:
    class Failing(Numbered):
        def __getitem__(self, place: int) -> Any:
            if get_worker_info() is not None and fails.value:
                raise OSError("no such record")
            return super().__getitem__(place)

    fails = FORKED.Value("b", 0)
    loader = DataLoader(Failing(), batch_size=5, num_workers=1, multiprocessing_context="fork")
    run = begin(tmp_path, loader)
    fails.value = 1
    with pytest.raises(OSError, match="no such record"):
        finish(run)
    run.close()
    fails.value = 0
    assert finish(begin(tmp_path, loader)).charged == STEPS
    require_conformant(tmp_path, bundle()[0])


def killed(out: Path) -> None:
    """Take a step, and die while workers read."""
    run = begin(out, DataLoader(Numbered(), batch_size=5, num_workers=2))
    for batch in run:
        take_step(run, batch)
        if run.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.soak
def test_a_run_that_was_killed_resumes_at_once(tmp_path: Path) -> None:
    process = FORKED.Process(target=killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finish(begin(tmp_path, DataLoader(Numbered(), batch_size=5)))
    require_conformant(tmp_path, bundle()[0])


class Many(Dataset[Tensor]):
    """More records than a worker digests at a time; reading fails from ``failing`` on."""

    def __init__(self, failing: int = 10**9, last: float = 0.0) -> None:
        self.failing, self.last, self.read = failing, last, list[int]()

    def __len__(self) -> int:
        return 3 * CHUNK + 5

    def __getitem__(self, place: int) -> Tensor:
        if place >= self.failing:
            raise OSError("no such record")
        self.read.append(place)
        return torch.tensor([place + (self.last if place == CHUNK - 1 else 0.0)])


def records_of(data: Many, folder: Path, workers: int = 0) -> LoadedRecords:
    return LoadedRecords(DataLoader(data, batch_size=5, num_workers=workers), None, folder)


def test_the_digest_is_that_of_all_records_by_workers_or_without(tmp_path: Path) -> None:
    each = [digest_of_tensors(torch.tensor([[float(place)]])) for place in range(len(Many()))]
    text = "".join(each).encode()
    expected = hashlib.sha256(f"torch.uint8 [{len(text)}]\n".encode() + text).hexdigest()
    for workers in (0, 2):
        assert records_of(Many(), tmp_path, workers).digest == f"sha256:{expected}"
    assert not (tmp_path / DIGEST_FILE).exists()


def test_a_digest_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    expected = records_of(Many(), tmp_path).digest
    with pytest.raises(OSError, match="no such record"):
        records_of(Many(failing=2 * CHUNK + 7), tmp_path).digest  # noqa: B018
    assert (tmp_path / DIGEST_FILE).stat().st_mode & 0o777 == 0o600
    data = Many()
    assert records_of(data, tmp_path).digest == expected
    assert min(data.read) == CHUNK  # the last that was kept is compared


def test_a_digest_of_other_data_begins_anew(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such record"):
        records_of(Many(failing=CHUNK), tmp_path).digest  # noqa: B018
    changed = Many(last=0.5)
    expected = records_of(changed, tmp_path / "other").digest
    assert records_of(changed, tmp_path).digest == expected
    assert expected != records_of(Many(), tmp_path).digest


def test_a_digest_that_is_given_is_recorded_as_such(tmp_path: Path) -> None:
    loader = DataLoader(Numbered(), batch_size=5)
    finish(begin(tmp_path / "given", loader, digest="store at 2026-11-29"))
    finish(begin(tmp_path / "taken", loader))
    given, taken = (entries_of(tmp_path / name)[0]["data"] for name in ("given", "taken"))
    assert given["digest"] == "given"
    assert "digest" not in taken
    assert json.loads((tmp_path / "given" / "opening.json").read_text())["data"].startswith("store")
    require_conformant(tmp_path / "given", bundle()[0])
