"""Two trainers of one run: whatever the first still does, each step is charged once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from affidavit.evidence import Conformance, check_conformance
from affidavit.trainer.errors import RunFailure
from affidavit.trainer.noise import source
from affidavit.trainer.settings import Supervision
from tests.support.polling import TIMEOUT_SECONDS, wait_until
from tests.trainer.loop.child_runs import Watched, start_run
from tests.trainer.loop.small_run import (
    STEPS,
    FinishedRun,
    MadeUpData,
    bundle_of,
    entries_of,
    plan_with,
    train_small,
)
from tests.trainer.loop.test_crash import CORRELATED, Stops, crash_run
from tests.trainer.loop.test_loop import CYCLIC, predicate_of

Run = Callable[..., FinishedRun]


def entries_now(out: Path, kind: str) -> list[dict[str, Any]]:
    """The entries of a record that may still be written."""
    lines = (out / "record.jsonl").read_bytes().split(b"\n")[:-1]
    return [entry for entry in map(json.loads, lines) if entry["type"] == kind]


def keys_of(out: Path) -> dict[str, int]:
    """The step of each noise key."""
    return {entry["key_commitment"]: entry["step"] for entry in entries_now(out, "charge")}


def until(out: Path, released: int) -> None:
    record = out / "record.jsonl"
    wait_until(lambda: record.exists() and len(entries_now(out, "release")) >= released, often=0.01)


def checked(out: Path, bundle: bytes) -> Conformance:
    return check_conformance((out / "record.jsonl").read_bytes(), predicate_of(bundle))


@pytest.mark.ordinary("correlated")
@pytest.mark.parametrize("changes", [{}, CORRELATED], ids=["independent", "correlated"])
def test_a_trainer_that_lives_on_takes_only_steps_that_are_passed_over(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """It is allowed 4 steps, its folder is copied, and it takes all 7 that it was allowed."""
    plan, zombie, heir = plan_with(**changes), tmp_path / "zombie", tmp_path / "heir"
    bundle, allowance = bundle_of(plan), tmp_path / "allowance"
    allowance.write_text("4")
    first = Watched(allowance=allowance)
    child = start_run(plan, zombie, bundle=bundle, checkpoint_every=3, supervision=first)
    try:
        until(zombie, 4)
        wait_until((tmp_path / "waits").exists)
        assert len(keys_of(zombie)) == 4
        shutil.copytree(zombie, heir)
        allowance.write_text("7")
        until(zombie, 7)
    finally:
        child.kill()
        child.wait(TIMEOUT_SECONDS)
    train_small(plan, out=heir, bundle=bundle, resume=True, supervision=Supervision(charged=7))
    taken, stored = keys_of(zombie), keys_of(heir)
    assert sorted(taken.values()) == list(range(7))
    assert sorted(stored.values()) == list(range(STEPS))
    assert taken.items() <= stored.items()  # the heir charged the zombie's very steps
    result = checked(heir, bundle)
    assert result.findings == ()
    assert (result.steps_to_charge, result.steps_released) == (STEPS, 4 - 1 + STEPS - 7 + 1)


def test_rows_of_the_noise_that_another_took_are_not_drawn_otherwise(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[int, list[torch.Tensor]] = {}
    real = source.standard_normals

    def noted(key: bytes, *, step: int, spans: Any, **rest: Any) -> list[torch.Tensor]:
        result = real(key, step=step, spans=spans, **rest)
        for (tensor, *_), item in zip(spans, result, strict=True):
            if tensor == 0:
                drawn.setdefault(step, []).append(item.clone())
        return result

    monkeypatch.setattr(source, "standard_normals", noted)
    plan, out = plan_with(**CORRELATED), tmp_path / "run"
    bundle = bundle_of(plan)
    crash_run(run, out, 4, plan, bundle=bundle, checkpoint_every=3)
    heir = tmp_path / "heir"
    shutil.copytree(out, heir)
    cut = (heir / "record.jsonl").read_bytes().splitlines(keepends=True)
    # The heir saw the record as it stood at its last checkpoint, before steps 3 and 4.
    place = max(n for n, line in enumerate(cut) if b'"type":"checkpoint"' in line)
    (heir / "record.jsonl").write_bytes(b"".join(cut[: place + 1]))
    run(plan, out=heir, bundle=bundle, resume=True, supervision=Supervision(charged=5))
    assert torch.equal(*drawn[3])
    assert keys_of(out).items() <= keys_of(heir).items()


def test_begun_anew_it_takes_only_what_nobody_was_allowed(run: Run, tmp_path: Path) -> None:
    plan, out = plan_with(), tmp_path / "run"
    bundle = bundle_of(plan)
    created = run(plan, out=out, bundle=bundle, supervision=Supervision(charged=5))
    result = checked(out, bundle)
    assert result.findings == ()
    assert (result.steps_to_charge, result.steps_released) == (STEPS, STEPS - 5)
    assert len(created.data.asked) == STEPS - 5
    with pytest.raises(RunFailure, match="12 are certified"):
        run(plan, out=tmp_path / "x", bundle=bundle, supervision=Supervision(charged=STEPS + 1))


@pytest.mark.parametrize("changes", [CYCLIC, CORRELATED], ids=["lots", "noise"])
def test_steps_that_belong_together_are_not_begun_anew(
    run: Run, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(RunFailure, match="continue from their checkpoint"):
        run(plan_with(**changes), out=tmp_path / "run", supervision=Supervision(charged=1))
    assert not (tmp_path / "run").exists()


def test_a_record_beyond_its_allowance_is_not_continued(run: Run, tmp_path: Path) -> None:
    plan, out = plan_with(), tmp_path / "run"
    bundle, allowance = bundle_of(plan), tmp_path / "allowance"
    allowance.write_text("12")
    crash_run(run, out, 6, plan, bundle=bundle)
    less = Supervision(allowance=allowance, charged=6)
    with pytest.raises(RunFailure, match="only 6 were granted"):
        run(plan, out=out, bundle=bundle, resume=True, supervision=less)


def test_a_checkpoint_from_before_the_key_was_stirred_is_refused(run: Run, tmp_path: Path) -> None:
    """Its next key is not that of the steps in the record: they would be passed over wrongly."""
    plan, out = plan_with(), tmp_path / "run"
    bundle = bundle_of(plan)
    crash_run(run, out, 5, plan, bundle=bundle, checkpoint_every=3)
    old = (out / "checkpoint.pt").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run(plan, out=out, bundle=bundle, resume=True, data=Stops(2))
    (out / "checkpoint.pt").write_bytes(old)
    with pytest.raises(RunFailure, match="no checkpoint that its record names"):
        run(plan, out=out, bundle=bundle, resume=True)


@pytest.mark.parametrize("at", [0, 4])
def test_a_run_that_is_stopped_for_good_ends_with_the_steps_it_took(
    run: Run, tmp_path: Path, at: int
) -> None:
    stop = tmp_path / "stop"

    class Asks(MadeUpData):
        def collate(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if len(self.asked) == at:
                stop.touch()
            return super().collate(indices)

    plan, out = plan_with(**CYCLIC), tmp_path / "run"
    bundle = bundle_of(plan)
    made = run(
        plan,
        out=out,
        bundle=bundle,
        data=Asks(),
        digest_every=5,
        supervision=Supervision(stop=stop),
    )
    assert (made.outcome.ended, made.outcome.charged) == ("stopped", at + 1)
    found = checked(out, bundle)
    assert found.conformant
    assert [finding.code for finding in found.findings] == ["stopped"]
    assert found.steps_to_charge == at + 1
    assert (out / "weights.pt").exists()
    assert not (out / "checkpoint.pt").exists()
    with pytest.raises(RunFailure, match="has ended"):
        run(plan, out=out, bundle=bundle, resume=True)


def test_a_run_that_waits_for_its_allowance_can_be_stopped(run: Run, tmp_path: Path) -> None:
    plan, out = plan_with(**CYCLIC), tmp_path / "run"
    allowance = tmp_path / "allowance"
    allowance.write_text("not a number")

    supervision = Supervision(allowance=allowance, stop=tmp_path / "stop")

    class Asks(MadeUpData):
        @property
        def digest(self) -> str:
            (tmp_path / "stop").touch()
            return super().digest

    made = run(plan, out=out, data=Asks(), supervision=supervision)
    assert (made.outcome.charged, made.data.asked) == (0, [])
    assert [e["type"] for e in entries_of(out)] == ["header", "checkpoint", "final"]
