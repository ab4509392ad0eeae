"""A loop of one's own trains what was certified, bit for bit as the command does."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from affidavit.certificate import verify
from affidavit.evidence import check_conformance
from affidavit.trainer import LoopError, PrivateRun, private
from affidavit.trainer.errors import MixedRecords, RunFailure, UnsupportedModel
from affidavit.trainer.loop import Outcome, train
from affidavit.trainer.settings import Settings
from tests.support.trust import trusting
from tests.trainer.loop.small_run import (
    DEVICE,
    KEY,
    STEPS,
    MadeUpData,
    SmallModel,
    bundle_of,
    entries_of,
    entropy_of,
    plan_with,
)

DATA = MadeUpData()
BUNDLES: dict[str, bytes] = {}


def bundle(**changes: Any) -> tuple[bytes, Any]:
    """A bundle and its plan; each is certified once."""
    plan = plan_with(
        **{"releases": [{"name": "all", "clip_norm": 0.5, "noise_multiplier": 2.0}]} | changes
    )
    key = str(sorted(changes.items()))
    if key not in BUNDLES:
        BUNDLES[key] = bundle_of(plan)
    return BUNDLES[key], plan


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Squared errors, one a record."""
    x, y = batch
    return (model(x).squeeze(1) - y).square()


def network() -> nn.Sequential:
    """Return two layers, the same in each call."""
    return SmallModel().module


def begin_run(
    out: Path, model: nn.Module | None = None, *, batch_size: int = 5, **changes: Any
) -> PrivateRun:
    """Begin a run of the small plan; ``changes`` are other arguments of ``private``."""
    content, plan = bundle(**changes.pop("plan", {}))
    model = model or network()
    arguments: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(TensorDataset(DATA.x, DATA.y), batch_size=batch_size),
        "losses": losses,
        **changes,
    }
    return private(
        model, certificate=content, plan=plan, out=out, trusted=trusting(KEY.public), **arguments
    )


def take_step(run: PrivateRun, batch: Any) -> None:
    """Take a step as the documentation shows."""
    run.loss(batch).backward()  # type: ignore[no-untyped-call]
    run.optimizer.step()


def finish(run: PrivateRun) -> Outcome:
    """Take all steps."""
    for batch in run:
        take_step(run, batch)
    assert run.outcome is not None
    return run.outcome


def require_conformant(out: Path, content: bytes) -> None:
    """The record is whole, and every step was charged and released."""
    predicate = verify(content, trusting(KEY.public)).predicate
    result = check_conformance((out / "record.jsonl").read_bytes(), predicate)
    assert result.conformant, result.findings


@pytest.mark.ordinary("60")
@pytest.mark.parametrize("batch_size", [2, 60])
def test_it_trains_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    content, plan = bundle()
    commanded = SmallModel()
    first, second = commanded.blocks()["all"]
    joint = type(first)(names=(*first.names, *second.names))
    monkeypatch.setattr(commanded, "blocks", lambda: {"all": (joint,)})
    train(
        bundle=content, trusted=trusting(KEY.public), plan=plan, data=MadeUpData(), model=commanded,
        out=tmp_path / "command", settings=Settings(device=DEVICE, microbatch=batch_size),
        quiet=True, entropy=entropy_of(1),
    )  # fmt: skip
    draws = entropy_of(1)
    monkeypatch.setattr("affidavit.trainer.private_loop.os", SimpleNamespace(urandom=draws))
    model = network().to(DEVICE)
    run = begin_run(tmp_path / "loop", model, batch_size=batch_size)
    for batch in run:
        (run.loss(batch) / 7).backward()  # its scale has no meaning
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # and there is no gradient to spoil
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.outcome is not None
    assert (run.outcome.ended, run.outcome.released) == ("completed", STEPS)
    require_conformant(tmp_path / "loop", content)
    for here, there in zip(model.parameters(), commanded.module.parameters(), strict=True):
        assert torch.equal(here, there)


def test_a_stopped_loop_goes_on_with_its_scheduler(tmp_path: Path) -> None:
    content, _ = bundle()
    rates = []
    settings = Settings(device=DEVICE, microbatch=60, checkpoint_every=1)
    for before_the_run in (True, False):
        model = network()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if before_the_run:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        run = begin_run(tmp_path, model, optimizer=optimizer, settings=settings)
        if not before_the_run:
            scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
        run.keep(scheduler=scheduler)
        for batch in run:
            before = run.step
            take_step(run, batch)
            rates.append(run.optimizer.param_groups[0]["lr"])
            scheduler.step()
            if before == 3:
                break
        run.close()
    assert run.outcome is not None
    assert run.outcome.charged == STEPS
    assert rates[0] == 0.1
    assert all(after < before for before, after in pairwise(rates))
    require_conformant(tmp_path, content)


def backward(run: PrivateRun, batch: Any) -> Tensor:
    """What frameworks hand to an optimiser's step."""
    loss = run.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def test_a_paused_loop_loses_no_step(tmp_path: Path) -> None:
    content, _ = bundle()
    model = network()
    for last in (4, STEPS):
        run = begin_run(tmp_path, model, batch_size=60)
        for batch in run:
            run.optimizer.step(partial(backward, run, batch))
            if run.step >= last:
                run.pause()
    assert run.outcome is not None
    assert (run.outcome.charged, run.outcome.released) == (STEPS, STEPS)
    require_conformant(tmp_path, content)


def test_a_lot_cannot_be_left_by_a_pause(tmp_path: Path) -> None:
    run = begin_run(tmp_path, batch_size=60)
    next(iter(run))
    with pytest.raises(LoopError, match="pause"):
        run.pause()
    run.close()


def test_epochs_are_one_stream(tmp_path: Path) -> None:
    content, _ = bundle()
    (tmp_path / "record.jsonl").touch()  # of a run that died before it began
    run = begin_run(tmp_path)
    for _ in range(STEPS):
        for batch in run:
            take_step(run, batch)
            break
    finish(run)
    require_conformant(tmp_path, content)


def test_an_early_stop_ends_the_record(tmp_path: Path) -> None:
    content, _ = bundle()
    run = begin_run(tmp_path, optimizer=None)
    for batch in run:
        take_step(run, batch)
        if run.step == 4:
            run.stop()
    assert run.outcome is not None
    assert (run.outcome.ended, run.outcome.charged) == ("stopped", 4)
    assert (tmp_path / "weights.pt").exists()
    require_conformant(tmp_path, content)


def test_evaluation_between_steps_is_the_model_as_it_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    run = begin_run(tmp_path, model)
    for batch in run:
        take_step(run, batch)
        model.eval()
        with torch.no_grad():
            model(torch.randn(7, 3))
        model.train()
    assert run.outcome is not None


def test_lots_without_records_are_noise_alone(tmp_path: Path) -> None:
    run = begin_run(tmp_path, plan={"sampling": {"scheme": "poisson", "lot_size": 1}})
    batches = 0
    for batch in run:
        batches += 1
        take_step(run, batch)
    assert run.outcome is not None
    assert run.outcome.released == STEPS
    assert batches <= STEPS


def no_loss(run: PrivateRun, batch: Any) -> None:
    """A step without a loss."""
    del batch
    run.optimizer.step()


def no_step(run: PrivateRun, batch: Any) -> None:
    """A loss without a step."""
    run.loss(batch).backward()


def two_steps(run: PrivateRun, batch: Any) -> None:
    """A step more."""
    take_step(run, batch)
    run.optimizer.step()


def two_losses(run: PrivateRun, batch: Any) -> None:
    """A record's gradient twice."""
    (run.loss(batch) + run.loss(batch)).backward()


def their_own(run: PrivateRun, batch: Any) -> None:
    """A loss that the run does not know."""
    losses(run._model.module, batch).mean().backward()
    run.optimizer.step()


def loss_caught(run: PrivateRun, batch: Any) -> None:
    """A step although the loss failed, so that records would be left out."""
    with suppress(LoopError):
        run.loss([item.flip(0) for item in batch])
    run.optimizer.step()


def step_caught(run: PrivateRun, batch: Any) -> None:
    """The next batch although the step failed, so that it would be charged again."""
    run.loss(batch)
    with torch.no_grad():
        run._model.module[0].bias.add_(1)
    with suppress(UnsupportedModel):
        run.optimizer.step()


def interrupted_loss(run: PrivateRun, batch: Any) -> None:
    """A loss again after an interrupt, when its records may have been added."""
    with suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(run._private, "accumulate", Mock(side_effect=KeyboardInterrupt))
        run.loss(batch)
    take_step(run, batch)


@pytest.mark.by_turns
@pytest.mark.parametrize(
    "wrong",
    [
        no_loss,
        no_step,
        two_steps,
        two_losses,
        their_own,
        loss_caught,
        step_caught,
        interrupted_loss,
    ],
)
def test_a_loop_that_does_something_else_is_stopped(tmp_path: Path, wrong: Any) -> None:
    run = begin_run(tmp_path, batch_size=60)
    before = [item.clone() for item in run._model.module.parameters()]

    def go() -> None:
        for batch in islice(run, 3):
            wrong(run, batch)

    with pytest.raises(LoopError):
        go()
    if wrong is no_step:  # and does not end in silence where it is asked for batches again
        with pytest.raises(LoopError, match="resumes the run"):
            iter(run)
        with pytest.raises(LoopError):
            run.optimizer.step()
    assert sum(entry["type"] == "charge" for entry in entries_of(tmp_path)) == 1
    if wrong not in (two_steps, step_caught):
        for item, was in zip(run._model.module.parameters(), before, strict=True):
            assert torch.equal(item, was)
    run.close()


def test_a_model_that_moves_after_the_run_began_is_refused(tmp_path: Path) -> None:
    run = begin_run(tmp_path, batch_size=60)
    batch = next(iter(run))
    run._model.module.to("meta")
    with pytest.raises(LoopError, match="is on meta"):
        run.loss(batch)
    run.close()


def mixed(model: nn.Module, batch: Any) -> Tensor:
    """A loss by how many records there are."""
    return losses(model, batch) / len(batch[0])


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"losses": mixed}, MixedRecords, "mixes records"),
        ({"losses": lambda m, b: losses(m, b).mean()}, MixedRecords, "one value for each"),
        ({"model": nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))}, UnsupportedModel, "BatchN"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, UnsupportedModel, "bias"),
        ({"blocks": {"all": ["0.*"]}}, UnsupportedModel, "2.weight"),
        ({"plan": {"dataset": {"name": "made-up", "size": 61}}}, RunFailure, "60 records"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_lot(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        begin_run(tmp_path, **changes)
    assert not (tmp_path / "record.jsonl").exists()


def test_a_grad_scaler_is_refused_by_name(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(run.loss(next(iter(run)))).backward()
    with pytest.raises(LoopError, match="GradScaler"):
        scaler.step(run.optimizer)
    run.close()
    assert not hasattr(run.optimizer, "_step_supports_amp_scaling")
    charged = [entry["type"] for entry in entries_of(tmp_path / "run")]
    assert "release" not in charged


def test_float16_by_autocast_trains(tmp_path: Path) -> None:
    def narrow(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return losses(model, batch)

    finish(begin_run(tmp_path / "run", losses=narrow))
    require_conformant(tmp_path / "run", bundle()[0])


def packed(model: nn.Module, batch: Any) -> Tensor:
    """The losses of records that stand one after the other in a single row."""
    x, y = batch
    return (model(x.unsqueeze(0)).view(-1) - y).square()


def test_records_that_are_packed_into_one_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MixedRecords, match="pad"):
        begin_run(tmp_path / "run", losses=packed)
