"""Killed at any point, a run goes on without using a key twice or losing a charge."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from affidavit.evidence import check_conformance
from affidavit.mechanisms.strategies.bidiagonal import Bidiagonal
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.errors import Interrupted, RunFailure
from affidavit.trainer.noise import source
from affidavit.trainer.noise.source import NoiseSource, TensorNoise, WrongState
from affidavit.trainer.run_folder import checkpoint_storage
from affidavit.trainer.run_folder.run_log import RunLog
from tests.support.polling import TIMEOUT_SECONDS
from tests.support.random_seeds import seeded
from tests.trainer.loop.child_runs import is_killed, start_run
from tests.trainer.loop.small_run import (
    STEPS,
    FinishedRun,
    MadeUpData,
    SmallModel,
    bundle_of,
    entries_of,
    plan_with,
    train_small,
)
from tests.trainer.loop.test_loop import CYCLIC, predicate_of

Run = Callable[..., FinishedRun]
CORRELATED = {**CYCLIC, "noise": {"kind": "bidiagonal", "lambda": 0.9}}


def has_ended(out: Path) -> bool:
    """Whether a run has its last line."""
    return any(entry["type"] == "final" for entry in read_complete_entries(out))


def has_begun(out: Path) -> bool:
    """Whether a run has its first checkpoint, so that it is to be resumed."""
    return any(entry["type"] == "checkpoint" for entry in read_complete_entries(out))


@pytest.mark.ordinary("correlated")
@pytest.mark.parametrize("changes", [{}, CORRELATED], ids=["independent", "correlated"])
def test_killed_at_any_file_operation_no_key_is_used_twice(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    plan, out = plan_with(**changes), tmp_path / "run"
    bundle, drawn = bundle_of(plan), random.Random(seeded(7))
    kills, charged = 0, 0
    for _ in range(30):
        event = drawn.randint(1, 90 if kills >= 2 else 15)  # too soon for the end
        settings = {"bundle": bundle, "resume": has_begun(out), "checkpoint_every": 2}
        kills += is_killed(plan, out, dies_at=event, **settings)
        now = sum(entry["type"] == "charge" for entry in read_complete_entries(out))
        assert charged <= now <= STEPS  # a charge that was there is there for good
        charged = now
        if has_ended(out):
            break
    assert kills >= 2
    entries = entries_of(out)
    charges = [entry for entry in entries if entry["type"] == "charge"]
    assert [entry["step"] for entry in charges] == list(range(STEPS))
    assert len({entry["key_commitment"] for entry in charges}) == STEPS
    result = check_conformance((out / "record.jsonl").read_bytes(), predicate_of(bundle))
    assert result.findings == ()
    assert result.steps_to_charge == STEPS
    assert (out / "weights.pt").exists()


def read_complete_entries(out: Path) -> list[dict[str, Any]]:
    """The lines of a record that have an end."""
    path = out / "record.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@pytest.mark.ordinary("2")
@pytest.mark.parametrize("renaming", [1, 2])
def test_killed_before_a_checkpoint_takes_its_place_and_again_it_goes_on(
    tmp_path: Path, renaming: int
) -> None:
    """Nothing is written over the only file that the record names."""
    plan, first = plan_with(), tmp_path / "first"
    bundle = bundle_of(plan)

    def is_killed_at(event: int, call: str, out: Path) -> bool:
        settings = {"bundle": bundle, "resume": has_begun(out), "checkpoint_every": 2}
        return is_killed(plan, out, dies_at=event, calls=[call], **settings)

    assert is_killed_at(renaming, "replace", first)
    for event in range(1, 5):
        out = tmp_path / f"again-{event}"
        shutil.copytree(first, out)
        assert is_killed_at(event, "write", out)
        train_small(plan, out=out, bundle=bundle, resume=True, checkpoint_every=2)
        result = check_conformance((out / "record.jsonl").read_bytes(), predicate_of(bundle))
        assert result.findings == ()


@pytest.mark.soak
def test_killed_from_outside_at_any_time_a_run_goes_on(tmp_path: Path) -> None:
    """A real ``kill -9`` after a random delay, most of them while gradients are computed."""
    plan, out, drawn = plan_with(steps=60), tmp_path / "run", random.Random(seeded(3))
    bundle = bundle_of(plan)
    kills = 0
    for attempt in range(1, 100):
        if has_ended(out):
            break
        child = start_run(plan, out, bundle=bundle, resume=has_begun(out), checkpoint_every=3)
        time.sleep(drawn.uniform(0.02, 0.1 * attempt))
        child.kill()
        code = child.wait(TIMEOUT_SECONDS)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
    assert kills >= 2
    result = check_conformance((out / "record.jsonl").read_bytes(), predicate_of(bundle))
    assert result.findings == ()
    assert result.steps_charged == 60
    keys = [e["key_commitment"] for e in entries_of(out) if e["type"] == "charge"]
    assert len(set(keys)) == 60


class Stops(MadeUpData):
    """Data that fails when it is asked for its n-th lot, as a process may die in a step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def collate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.asked) == self.at:
            raise KeyboardInterrupt
        return super().collate(indices)


def crash_run(run: Run, out: Path, at: int, plan: Any = None, **arguments: Any) -> None:
    """A run that dies in its step ``at``."""
    with pytest.raises(KeyboardInterrupt):
        run(plan, out=out, data=Stops(at), **arguments)


def test_a_step_that_was_begun_is_charged_and_its_lot_is_not_drawn_again(
    run: Run, tmp_path: Path
) -> None:
    plan, out = plan_with(**CYCLIC), tmp_path / "run"
    bundle = bundle_of(plan)
    crash_run(run, out, 7, plan, bundle=bundle, checkpoint_every=5)
    created = run(plan, out=out, bundle=bundle, resume=True)
    # Lots 5 and 6 were released after the checkpoint, lot 7 was begun: all three are spent.
    assert [lot[0] for lot in created.data.asked] == [(step % 5) * 12 for step in range(8, STEPS)]
    assert created.outcome.charged == STEPS
    resumed = next(entry for entry in created.entries if entry["type"] == "resumed")
    assert (resumed["from_step"], resumed["step"], resumed["lost"]) == (5, 8, 3)


def test_a_clean_stop_loses_nothing(run: Run, tmp_path: Path) -> None:
    class Asks(MadeUpData):
        def collate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            if len(self.asked) == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().collate(indices)

    plan, out = plan_with(**CYCLIC), tmp_path / "run"
    bundle = bundle_of(plan)
    with pytest.raises(Interrupted, match="step 6 of 12"):
        run(plan, out=out, data=Asks(), bundle=bundle, seed=1)
    made = run(plan, out=out, bundle=bundle, resume=True)
    resumed = next(entry for entry in made.entries if entry["type"] == "resumed")
    assert (resumed["from_step"], resumed["lost"]) == (5, 0)
    assert made.outcome.released == STEPS


def test_out_of_memory_says_what_to_do_and_a_smaller_microbatch_goes_on(
    run: Run, tmp_path: Path
) -> None:
    class Large(SmallModel):
        fits_without_gradients = True

        def losses(self, batch: Any) -> Tensor:
            fits = self.fits_without_gradients and not torch.is_grad_enabled()
            if len(batch[0]) > 8 and not fits:
                raise torch.OutOfMemoryError
            return super().losses(batch)

    class Larger(Large):
        fits_without_gradients = False

    plan, out = plan_with(**CYCLIC), tmp_path / "run"
    bundle = bundle_of(plan)
    with pytest.raises(RunFailure, match="before the first step; use a smaller --microbatch"):
        run(plan, out=tmp_path / "larger", bundle=bundle, model=Larger())
    with pytest.raises(RunFailure, match="--microbatch"):
        run(plan, out=out, bundle=bundle, model=Large())
    made = run(plan, out=out, bundle=bundle, model=Large(), microbatch=8, resume=True)
    assert (made.outcome.charged, made.outcome.released) == (STEPS, STEPS - 1)


def test_without_a_word_checkpoints_and_digests_are_made_now_and_then(
    run: Run, tmp_path: Path
) -> None:
    plan, out = plan_with(**CYCLIC), tmp_path / "run"
    bundle = bundle_of(plan)
    settings = {"bundle": bundle, "checkpoint_every": None, "digest_every": None}
    crash_run(run, out, 9, plan, **settings)
    assert sum(entry["type"] == "checkpoint" for entry in entries_of(out)) >= 2
    created = run(plan, out=out, resume=True, **settings)
    releases = [entry for entry in created.entries if entry["type"] == "release"]
    assert releases[-1]["parameters"] == created.entries[-1]["parameters"]
    result = check_conformance((out / "record.jsonl").read_bytes(), predicate_of(bundle))
    assert result.findings == ()


def test_no_step_is_left_when_all_are_charged(run: Run, tmp_path: Path) -> None:
    plan, out = plan_with(**CYCLIC), tmp_path / "run"
    bundle = bundle_of(plan)
    crash_run(run, out, STEPS - 1, plan, bundle=bundle)
    created = run(plan, out=out, bundle=bundle, resume=True)
    assert created.data.asked == []
    assert (created.outcome.charged, created.outcome.released) == (STEPS, STEPS - 1)
    with pytest.raises(RunFailure, match="nothing to resume"):
        run(plan, out=out, bundle=bundle, resume=True)


def test_two_runs_from_one_checkpoint_share_no_key(run: Run, tmp_path: Path) -> None:
    plan, out = plan_with(**CYCLIC), tmp_path / "run"
    bundle = bundle_of(plan)
    crash_run(run, out, 6, plan, bundle=bundle, checkpoint_every=3)
    twin = tmp_path / "twin"
    twin.mkdir()
    for path in out.iterdir():
        (twin / path.name).write_bytes(path.read_bytes())
    one, other = (run(plan, out=item, bundle=bundle, resume=True) for item in (out, twin))
    after = [
        {e["key_commitment"] for e in created.entries if e["type"] == "charge" and e["step"] > 6}
        for created in (one, other)
    ]
    assert not after[0] & after[1]


def test_noise_goes_on_as_one_sequence_over_lost_steps(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients an update is noise alone: w_t = z_t - λ z_(t-1), through the crash."""
    drawn: dict[int, list[Tensor]] = {}
    real = source.standard_normals

    def noted(key: bytes, *, step: int, spans: Any, **rest: Any) -> list[Tensor]:
        result = real(key, step=step, spans=spans, **rest)
        for (tensor, *_), item in zip(spans, result, strict=True):
            if tensor == 0:
                drawn.setdefault(step, []).append(item.clone())
        return result

    monkeypatch.setattr(source, "standard_normals", noted)
    values: list[Tensor] = []

    class Flat(SmallModel):
        def losses(self, batch: Any) -> Tensor:
            return super().losses(batch) * 0

    model = Flat()
    taken = PrivateModel.accumulate

    def watched(self: PrivateModel, *arguments: Any, **named: Any) -> Tensor:
        values.append(model.module[0].weight.detach().clone())
        return taken(self, *arguments, **named)

    plan = plan_with(**CORRELATED)
    bundle, out = bundle_of(plan), tmp_path / "run"
    crash_run(run, out, 7, plan, bundle=bundle, checkpoint_every=5)
    monkeypatch.setattr(PrivateModel, "accumulate", watched)
    values.clear()
    run(plan, out=out, model=model, bundle=bundle, resume=True)
    values.append(model.module[0].weight.detach().clone())
    values = values[-5:]  # the probe ran the model before
    for place, step in enumerate(range(8, STEPS)):
        w = drawn[step][-1] - 0.9 * drawn[step - 1][-1]
        update = (values[place + 1] - values[place]).flatten()
        assert torch.allclose(update, -0.1 * w / 12, atol=1e-6)
    # Steps 5 and 6 were released and passed over with the same z; 7 was drawn once.
    assert all(torch.equal(*drawn[step]) for step in (5, 6))
    assert len(drawn[7]) == 1


def test_passing_over_a_step_leaves_what_comes_after_as_it_was() -> None:
    tensors = {"w": TensorNoise(shape=(3,), scale=1.0)}

    def noise(passed: int | None) -> list[Tensor]:
        created = NoiseSource(tensors, strategy=Bidiagonal.of(0.5, steps=4))
        result = []
        for step in range(4):
            key, sums = bytes([step + 1]) * 32, {"w": torch.zeros(3)}
            if step == passed:
                created.skip_step(key)
            else:
                created.add_to(sums, key)
            result.append(sums["w"])
        with pytest.raises(WrongState):
            created.skip_step(bytes(32))
        return result

    whole, passed = noise(None), noise(1)
    assert all(torch.equal(whole[step], passed[step]) for step in (0, 2, 3))


# ---- what a run is not resumed from ------------------------------------------------


@pytest.fixture
def crashed_run(run: Run, tmp_path: Path) -> tuple[Path, Callable[..., FinishedRun]]:
    """A run that died, and how to go on with it."""
    plan, out = plan_with(), tmp_path / "stopped"
    bundle = bundle_of(plan)
    crash_run(run, out, 6, plan, bundle=bundle, checkpoint_every=3)

    def resume(**arguments: Any) -> FinishedRun:
        return run(plan, out=out, bundle=arguments.pop("bundle", bundle), resume=True, **arguments)

    return out, resume


def failure_code(resume: Callable[..., FinishedRun], **arguments: Any) -> str:
    with pytest.raises(RunFailure) as result:
        resume(**arguments)
    return result.value.code


@pytest.mark.parametrize("place", [0, 100, -1])
def test_an_altered_checkpoint_is_refused(
    crashed_run: tuple[Path, Callable[..., FinishedRun]], place: int
) -> None:
    out, resume = crashed_run
    content = bytearray((out / checkpoint_storage.CHECKPOINT_FILE).read_bytes())
    content[place] ^= 1
    (out / checkpoint_storage.CHECKPOINT_FILE).write_bytes(bytes(content))
    assert failure_code(resume) == "no_checkpoint"


def test_a_checkpoint_that_is_cut_or_gone_is_refused(
    crashed_run: tuple[Path, Callable[..., FinishedRun]],
) -> None:
    out, resume = crashed_run
    content = (out / checkpoint_storage.CHECKPOINT_FILE).read_bytes()
    (out / checkpoint_storage.CHECKPOINT_FILE).write_bytes(content[: len(content) // 2])
    assert failure_code(resume) == "no_checkpoint"
    (out / checkpoint_storage.CHECKPOINT_FILE).unlink()
    assert failure_code(resume) == "no_checkpoint"


def test_another_runs_checkpoint_is_refused(
    run: Run, crashed_run: tuple[Path, Callable[..., FinishedRun]], tmp_path: Path
) -> None:
    out, resume = crashed_run
    crash_run(run, tmp_path / "foreign", 6, checkpoint_every=3)
    foreign = (tmp_path / "foreign" / checkpoint_storage.CHECKPOINT_FILE).read_bytes()
    (out / checkpoint_storage.CHECKPOINT_FILE).write_bytes(foreign)
    assert failure_code(resume) == "no_checkpoint"


def test_a_record_with_a_line_changed_or_dropped_is_refused(
    crashed_run: tuple[Path, Callable[..., FinishedRun]],
) -> None:
    out, resume = crashed_run
    path = out / "record.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    assert failure_code(resume) == "broken_record"
    path.write_bytes(b"".join(lines).replace(b'"step":2', b'"step":3', 1))
    assert failure_code(resume) == "broken_record"


def test_a_record_cut_back_before_its_checkpoint_is_refused(
    crashed_run: tuple[Path, Callable[..., FinishedRun]],
) -> None:
    out, resume = crashed_run
    path = out / "record.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))
    assert failure_code(resume) == "no_checkpoint"


def test_other_data_or_another_certificate_is_refused(
    crashed_run: tuple[Path, Callable[..., FinishedRun]],
) -> None:
    _, resume = crashed_run
    assert failure_code(resume, data=MadeUpData(seed=4)) == "other_run"


def test_a_folder_serves_one_run_and_one_process(
    run: Run, crashed_run: tuple[Path, Callable[..., FinishedRun]], tmp_path: Path
) -> None:
    out, resume = crashed_run
    assert failure_code(lambda: run(out=out)) == "run_exists"
    assert failure_code(lambda: run(out=tmp_path / "none", resume=True)) == "no_run"
    with closing(RunLog.reopen(out)):
        assert failure_code(resume) == "run_in_use"
    assert resume().outcome.ended == "completed"


@pytest.mark.ordinary("13")
@pytest.mark.parametrize("call", range(1, 32, 6))
def test_a_full_disk_stops_the_run_and_it_goes_on_when_there_is_room(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    plan, out, left = plan_with(), tmp_path / "run", [call]
    bundle, real = bundle_of(plan), os.write

    def full(stream: int, content: Any) -> int:
        left[0] -= 1
        if left[0] <= 0:
            real(stream, bytes(content)[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(stream, content)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunFailure, match="--resume") as stop:
        run(plan, out=out, bundle=bundle, checkpoint_every=2)
    monkeypatch.setattr(os, "write", real)
    assert stop.value.code == "not_written"
    created = run(plan, out=out, bundle=bundle, resume=has_begun(out))
    found_ = check_conformance((out / "record.jsonl").read_bytes(), predicate_of(bundle))
    assert found_.findings == ()
    assert created.outcome.charged == STEPS


@pytest.mark.soak
def test_a_run_that_died_before_its_first_checkpoint_is_started_anew(tmp_path: Path) -> None:
    """Its record has a header and nothing else: no key was used, and nothing is charged."""
    plan, out = plan_with(), tmp_path / "run"
    bundle = bundle_of(plan)
    train_small(plan, out=tmp_path / "other", bundle=bundle)
    out.mkdir()
    header = (tmp_path / "other/record.jsonl").read_bytes().split(b"\n")[0] + b"\n"
    (out / "record.jsonl").write_bytes(header)
    with pytest.raises(RunFailure, match="without --resume"):
        train_small(plan, out=out, bundle=bundle, resume=True)
    train_small(plan, out=out, bundle=bundle)
    assert has_ended(out)
    assert entries_of(out)[0]["run"] != json.loads(header)["run"]
