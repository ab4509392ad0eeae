"""Loops, models and batches of strangers: trained as single records are, or refused by name."""

from __future__ import annotations

import copy
import math
import random
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from affidavit.trainer import LoopError, PrivateRun
from affidavit.trainer.data.ownership import PartOwners
from affidavit.trainer.errors import MixedRecords, NotCertified, RunFailure, UnsupportedModel
from affidavit.trainer.settings import Settings
from tests.trainer.loop.small_run import RECORDS, entropy_of
from tests.trainer.loop.test_private_loop import DATA, begin_run, finish, losses, network, take_step

Loop = Callable[[PrivateRun, Any, Any], None]


def unfreezing(run: PrivateRun, model: Any, batch: Any) -> None:
    """Trains a frozen layer from the second batch on."""
    take_step(run, batch)
    model[0].requires_grad_(True)


def adding(run: PrivateRun, model: Any, batch: Any) -> None:
    """Adds a layer, to the optimiser as well."""
    take_step(run, batch)
    model.more = nn.Linear(1, 1)
    run.optimizer.add_param_group({"params": list(model.more.parameters())})


def replacing(run: PrivateRun, model: Any, batch: Any) -> None:
    """Puts another tensor in the place of one that is trained."""
    take_step(run, batch)
    model[2].bias = nn.Parameter(torch.ones(1))


def hooking(run: PrivateRun, model: Any, batch: Any) -> None:
    """Compares the records of a batch in a hook that was not there when the run began."""
    take_step(run, batch)
    model[1].register_forward_hook(lambda _, inputs, result: result - inputs[0].mean(0))


def normalising_later(run: PrivateRun, model: Any, batch: Any) -> None:
    """The same in a layer without parameters."""
    take_step(run, batch)
    model[1] = nn.BatchNorm1d(4, affine=False, track_running_stats=False)


def regularising(run: PrivateRun, model: Any, batch: Any) -> None:
    """Adds a term that compares the records of a batch."""
    (run.loss(batch) + 100 * model(batch[0]).var()).backward()
    run.optimizer.step()


def tuning(run: PrivateRun, model: Any, batch: Any) -> None:
    """Takes a step without noise by another optimiser, and leaves no gradient behind."""
    take_step(run, batch)
    beside = torch.optim.SGD(model.parameters(), lr=0.1)
    losses(model, batch).mean().backward()
    beside.step()
    beside.zero_grad()


def writing(run: PrivateRun, model: Any, batch: Any) -> None:
    """Writes to a parameter before the step, where autograd does not see it."""
    model[0].bias.data.add_(batch[0].mean())
    take_step(run, batch)


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (unfreezing, "0.bias, 0.weight: made trainable"),
        (adding, "more.bias, more.weight: made"),
        (replacing, "2.bias: made"),
        (hooking, "1: added, replaced, removed or hooked"),
        (normalising_later, "1: added, replaced, removed or hooked"),
        (regularising, "0.weight has a gradient from a loss outside the run"),
        (tuning, "0.weight, 0.bias, 2.weight, 2.bias: changed since the run's last step"),
        (writing, "0.bias: changed since the run's last step"),
    ],
)
def test_what_would_train_without_noise_stops_the_run(
    tmp_path: Path, loop: Loop, message: str
) -> None:
    model = network()
    model[0].requires_grad_(loop is not unfreezing)
    run = begin_run(tmp_path / "run", model)

    def go() -> None:
        for batch in run:
            loop(run, model, batch)

    with pytest.raises(UnsupportedModel, match=message):
        go()
    run.close()


def test_a_term_of_the_same_activations_is_an_error(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def noted(model: nn.Module, batch: Any) -> Tensor:
        seen.append(model(batch[0]).squeeze(1))
        return (seen[-1] - batch[1]).square()

    run = begin_run(tmp_path / "run", network(), losses=noted)
    loss = run.loss(next(iter(run)))
    with pytest.raises(RuntimeError):
        (loss + seen[-1].var()).backward()  # type: ignore[no-untyped-call]
    run.close()


def evaluating(run: PrivateRun, model: Any, batch: Any) -> None:
    """Evaluates before and after each batch."""
    for act in (lambda: run.loss(batch).backward(), run.optimizer.step):
        model.eval()
        with torch.no_grad():
            model(torch.randn(7, 3))
        model.train()
        act()


def zeroing(run: PrivateRun, model: Any, batch: Any) -> None:
    """Has zeros for gradients."""
    del model
    take_step(run, batch)
    run.optimizer.zero_grad(set_to_none=False)


def probing(run: PrivateRun, model: Any, batch: Any) -> None:
    """Takes gradients of its own between batches."""
    take_step(run, batch)
    (1e6 * losses(model, batch).sum()).backward()


def detached(run: PrivateRun, model: Any, batch: Any) -> None:
    """Takes a loss without autograd, and calls no backward."""
    del model
    with torch.no_grad():
        run.loss(batch).mul(7)
    run.optimizer.step()


def averaging(run: PrivateRun, model: Any, batch: Any) -> None:
    """Copies a model that has the run, as averages of a framework's module do."""
    model.run = run
    take_step(run, batch)
    assert copy.deepcopy(model).run is run


def swapping(run: PrivateRun, model: Any, batch: Any) -> None:
    """Evaluates other weights, and puts back those that are trained."""
    take_step(run, batch)
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: item / 2 for name, item in own.items()})
    model(batch[0])
    model.load_state_dict(own)


def mixed_up(batch: Any) -> Any:
    """Mixup, as loops have it."""
    return [(item + item.flip(0)) / 2 for item in batch]


def mixed_in_place(batch: Any) -> Any:
    """The same, written into the batch."""
    batch[0].copy_(batch[0].flip(0) + batch[0])
    return batch


@pytest.mark.parametrize("change", [mixed_up, mixed_in_place])
def test_a_batch_that_the_loop_changed_is_refused(tmp_path: Path, change: Any) -> None:
    run = begin_run(tmp_path / "run", network())
    batch = next(iter(run))
    with pytest.raises(LoopError, match="may mix records"):
        run.loss(change(batch))
    run.close()


def test_losses_that_write_into_the_batch_are_told_so(tmp_path: Path) -> None:
    def scaled(model: nn.Module, batch: Any) -> Tensor:
        batch[0].mul_(2)
        return losses(model, batch)

    run = begin_run(tmp_path / "run", network(), losses=scaled)
    with pytest.raises(UnsupportedModel, match="write into the batch"):
        run.loss(next(iter(run)))
    run.close()


def test_weights_that_are_clipped_between_steps_are_accepted(tmp_path: Path) -> None:
    model = network()
    run = begin_run(tmp_path / "run", model)
    for batch in run:
        take_step(run, batch)
        model[0].weight.data.clamp_(-0.01, 0.01)
        run.accept_weights()
    assert run.outcome is not None
    assert run.outcome.ended == "completed"


def test_the_loss_of_private_records_is_not_shown(tmp_path: Path) -> None:
    shown = Settings(device="cpu", microbatch=4, show_private=True)
    for settings, is_shown in ((None, False), (shown, True)):
        run = begin_run(tmp_path / str(is_shown), network(), settings=settings)
        assert bool(run.loss(next(iter(run)))) is is_shown
        run.close()


@pytest.mark.parametrize(
    ("users", "message"),
    [
        (None, "does not name the user"),
        ([place // 3 for place in range(RECORDS)], "a user has 3 records"),
        (list(range(RECORDS - 1)), "59 entries for 60"),
        ([[place, place + 1] for place in range(RECORDS)], "a record has 2 users"),
        ([[]] * RECORDS, "record 0 has no user"),
        ([PartOwners([place]) for place in range(RECORDS)], "own a part of a group"),
        (torch.arange(RECORDS) // 2, None),
    ],
)
def test_users_have_no_more_records_than_certified(
    tmp_path: Path, users: Any, message: str | None
) -> None:
    users_of = {"size": RECORDS, "unit": "user", "contributions_per_user": 2}

    def begin() -> PrivateRun:
        return begin_run(tmp_path / "run", network(), users=users, plan={"dataset": users_of})

    if message is None:
        begin().close()
        return
    with pytest.raises((NotCertified, UnsupportedModel), match=message):
        begin()


@pytest.mark.by_turns
@pytest.mark.ordinary("not detached", "not probing", "not swapping", "not evaluating")
@pytest.mark.parametrize("loop", [evaluating, zeroing, probing, detached, averaging, swapping])
def test_what_a_loop_does_beside_its_steps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    trained = []
    for each in (loop, lambda run, _, batch: take_step(run, batch)):
        monkeypatch.setattr(
            "affidavit.trainer.private_loop.os", SimpleNamespace(urandom=entropy_of(2))
        )
        model = network()
        run = begin_run(tmp_path / f"run-{len(trained)}", model)
        for batch in run:
            each(run, model, batch)
        assert run.outcome is not None
        trained.append(list(model.parameters()))
    assert all(map(torch.equal, *trained))


class Between(nn.Module):
    """Two layers, drop-out, and what a test puts between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(3, 4), nn.Linear(4, 1), nn.Dropout(0.3)
        self.between, self.mean = between, torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1)."""
        return self.last(self.drop(self.between(self, torch.tanh(self.first(x)))))


def keeping(model: Any, h: Tensor) -> Tensor:
    """A mean of what was seen, in no buffer."""
    model.mean = 0.9 * model.mean + 0.1 * h.detach().mean(0)
    return h - model.mean


def initialising(model: Any, h: Tensor) -> Tensor:
    """A mean of the first batch, as layers that are initialised by data have it."""
    if not hasattr(model, "start"):
        model.start = h.detach().mean(0)
    return h - model.start


def mixing_up(model: Any, h: Tensor) -> Tensor:
    """Adds other records at random."""
    return h + h[torch.randperm(len(h))] if model.training else h


class Coupled(torch.autograd.Function):
    """The identity; the gradient of a record grows with those of others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """As it is."""
        ctx.set_materialize_grads(True)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Scaled by all."""
        assert ctx.needs_input_grad[0]
        return grads[0] * grads[0].abs().sum()


def normalising(_: Any, h: Tensor) -> Tensor:
    """Divides the gradient by the norm of all records'."""
    if h.requires_grad:
        h.register_hook(lambda grad: grad / grad.norm())
    return h


def labels_at_random(model: nn.Module, batch: Any) -> Tensor:
    """Labels are averaged with others in training."""
    x, y = batch
    y = 0.7 * y + 0.3 * y[torch.randperm(len(y))] if model.training else y
    return losses(model, (x, y))


def labels_now_and_then(model: nn.Module, batch: Any) -> Tensor:
    """The same in half of all passes, as CutMix does."""
    return (labels_at_random if np.random.rand() < 0.5 else losses)(model, batch)


SCALE = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("make", "loss", "kind", "message"),
    [
        (lambda: Between(keeping), losses, MixedRecords, "second pass"),
        (lambda: Between(initialising), losses, MixedRecords, "saw other records first"),
        (lambda: Between(mixing_up), losses, MixedRecords, "mixes records"),
        (
            network,
            lambda m, b: Coupled.apply(losses(m, b)),
            MixedRecords,
            "losses of others",
        ),
        (lambda: Between(normalising), losses, UnsupportedModel, "autograd"),
        (network, labels_at_random, MixedRecords, "mixes records"),
        (network, labels_now_and_then, MixedRecords, "mixes records"),
        (
            network,
            lambda m, b: losses(m, b).squeeze(),
            MixedRecords,
            r"shape \(\)",
        ),
        (
            network,
            lambda m, b: losses(m, b) * SCALE,
            UnsupportedModel,
            r"shape \(1,\)",
        ),
    ],
)
def test_a_model_that_mixes_records_out_of_sight_is_refused(
    tmp_path: Path, make: Any, loss: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        begin_run(tmp_path / "run", make(), losses=loss)
    assert not (tmp_path / "run" / "record.jsonl").exists()


class Long(Dataset[tuple[Tensor, Tensor]]):
    """Records of one to seven rows."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return DATA.x[place].repeat(1 + place % 7, 1), DATA.y[place]


def padded(items: Any) -> tuple[Tensor, Tensor]:
    """To the longest of the batch."""
    x = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return x, torch.stack([y for _, y in items])


def cut(items: Any) -> tuple[Tensor, Tensor]:
    """To the shortest of the batch."""
    shortest = min(len(x) for x, _ in items)
    return torch.stack([x[:shortest] for x, _ in items]), torch.stack([y for _, y in items])


def test_padding_that_a_loss_sees_is_refused(tmp_path: Path) -> None:
    def summed(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).sum((1, 2)) - batch[1]).square()

    def unmasked(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).mean((1, 2)) - batch[1]).square()

    def masked(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        counts = x.abs().sum(-1) > 0
        return ((model(x).squeeze(2) * counts).sum(1) / counts.sum(1) - y).square()

    loader = DataLoader(Long(), batch_size=4, collate_fn=padded)
    hidden = network()
    nn.init.zeros_(hidden[2].weight)  # type: ignore[arg-type]
    shorter = DataLoader(Long(), batch_size=4, collate_fn=cut)
    for model, loss, of in (
        *((network(), unmasked, loader), (hidden, unmasked, loader)),
        (network(), summed, shorter),
    ):
        with pytest.raises(MixedRecords, match="padding"):
            begin_run(tmp_path / "no", model, losses=loss, loader=of)
    run = begin_run(tmp_path / "yes", network(), losses=masked, loader=loader)
    take_step(run, next(iter(run)))
    run.close()


Pair = namedtuple("Pair", "x names")


class Named(Dataset[Pair]):
    """A named tuple of a tensor and a text."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, place: int) -> Pair:
        return Pair(DATA.x[place], "long" * (place % 2))


@pytest.mark.soak
def test_batches_may_have_names_and_texts(tmp_path: Path) -> None:
    def by_text(model: nn.Module, batch: Pair) -> Tensor:
        lengths = torch.tensor([float(len(text)) for text in batch.names])
        return losses(model, (batch.x, lengths))

    loader = DataLoader(Named(), batch_size=4, shuffle=True, drop_last=True, num_workers=2)
    run = begin_run(tmp_path / "run", network(), losses=by_text, loader=loader)
    finish(run)


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "kind": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "groups": lambda model: torch.optim.SGD(
        [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()]}], lr=0.1
    ),
}


@pytest.mark.by_turns
@pytest.mark.parametrize("other", OTHERS)
def test_a_run_does_not_continue_with_another_optimizer(tmp_path: Path, other: str) -> None:
    model = network()
    run = begin_run(tmp_path / "run", model)
    while run.step < 1:
        take_step(run, next(iter(run)))
    run.pause()
    with pytest.raises(RunFailure, match="another optimiser"):
        begin_run(tmp_path / "run", model, optimizer=OTHERS[other](model))
    begin_run(tmp_path / "run", model).close()


@dataclass
class Fields:
    """A batch with attributes."""

    x: Tensor
    y: Tensor


class Encoded(UserDict[str, Tensor]):
    """A batch with both, as Hugging Face's tokenizers make them."""

    def __getattr__(self, name: str) -> Tensor:
        return self.data[name]


@pytest.mark.parametrize("form", [Fields, lambda x, y: Encoded(x=x, y=y)])
def test_batches_may_have_attributes(tmp_path: Path, form: Any) -> None:
    loader: Any = DataLoader(
        TensorDataset(DATA.x, DATA.y), batch_size=4, collate_fn=lambda items: form(*stacked(items))
    )
    run = begin_run(
        tmp_path / "run",
        network(),
        loader=loader,
        losses=lambda model, batch: losses(model, (batch.x, batch.y)),
    )
    take_step(run, next(iter(run)))
    run.close()


def gathered(change: Callable[[list[Any]], Any]) -> DataLoader[Any]:
    """The records in batches that ``change`` makes."""
    return DataLoader(TensorDataset(DATA.x, DATA.y), batch_size=4, collate_fn=change)


class Endless(IterableDataset[Tensor]):
    """Records without numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(DATA.x)


REFUSED: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "map-style": lambda _: {"loader": DataLoader(Endless())},
    "DataLoader": lambda _: {"loader": [DATA.x]},
    "batch_size": lambda _: {"loader": DataLoader(TensorDataset(DATA.x, DATA.y), batch_size=None)},
    "ndarray": lambda _: {"loader": gathered(lambda items: (np.zeros(len(items)),))},
    "SimpleNamespace": lambda _: {
        "loader": gathered(lambda items: SimpleNamespace(x=torch.zeros(len(items))))
    },
    "without dimensions": lambda _: {"loader": gathered(list)},
    "no gradient": lambda _: {"losses": lambda model, batch: losses(model, batch).detach()},
    "nan or infinite": lambda _: {"losses": lambda model, batch: losses(model, batch) * math.nan},
    "LBFGS": lambda model: {"optimizer": torch.optim.LBFGS(model.parameters())},
}


@pytest.mark.parametrize("message", REFUSED)
def test_loaders_losses_and_optimisers_of_other_kinds_are_refused(
    message: str, tmp_path: Path
) -> None:
    model = network()
    with pytest.raises(UnsupportedModel, match=message):
        begin_run(tmp_path / "run", model, **REFUSED[message](model))


class Closureless(torch.optim.SGD):
    """Takes no closure."""

    def step(self) -> None:  # type: ignore[override]
        """As SGD does."""
        super().step()


def test_an_optimiser_whose_step_takes_no_closure_trains(tmp_path: Path) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    run = begin_run(tmp_path / "run", model, optimizer=Closureless(model.parameters(), lr=0.1))
    finish(run)
    assert any(not torch.equal(item, before[name]) for name, item in model.state_dict().items())


def test_a_gradient_hook_of_a_parameter_is_refused(tmp_path: Path) -> None:
    model = network()
    model[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(UnsupportedModel, match=r"0\.weight has a gradient hook"):
        begin_run(tmp_path / "run", model)


class Dropping(nn.Module):
    """Leaves a layer out at random in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1)."""
        left_out = self.training and float(torch.rand(())) < 0.5
        return self.last(x if left_out else functional.relu(self.first(x)))


def test_a_layer_that_is_left_out_at_random_trains(tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run", Dropping())
    finish(run)


@pytest.mark.soak
def test_what_was_compiled_before_the_run_trains_and_works_after_it(tmp_path: Path) -> None:
    model = network()
    plain = copy.deepcopy(model)
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
    run = begin_run(tmp_path / "run", model)
    for batch in run:
        take_step(run, batch)
    state = {name.replace("_orig_mod.", ""): item for name, item in model.state_dict().items()}
    plain.load_state_dict(state)
    assert torch.equal(model(DATA.x), plain(DATA.x))


class Read(Dataset[tuple[Tensor, Tensor]]):
    """The records as ``change`` makes them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.change(DATA.x[place]), DATA.y[place]


def stacked(items: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Records as the default puts them together."""
    return [torch.stack(part) for part in zip(*items, strict=True)]


def jittered(items: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Each record with some of its entries left out at random, as masked language models are."""
    x, y = stacked(items)
    return [torch.where(torch.rand_like(x) < 0.3, 0.0, x), y]


def blended(items: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Mixup: each record with one that is drawn."""
    x, y = stacked(items)
    return [(x + x[torch.randperm(len(x))]) / 2, y]


AUGMENTED: dict[str, dict[str, Any]] = {
    "torch": {"dataset": Read(lambda x: x + 0.1 * torch.randn(3))},
    "numpy": {"dataset": Read(lambda x: x + float(np.random.normal()))},
    "python": {"dataset": Read(lambda x: x * random.choice((-1, 1)))},
    "collate_fn": {"dataset": Read(lambda x: x), "collate_fn": jittered},
}


@pytest.mark.by_turns
@pytest.mark.ordinary("collate_fn", "torch")
@pytest.mark.parametrize("source", AUGMENTED)
def test_records_that_are_augmented_at_random_train_and_are_the_same_data_on_resuming(
    tmp_path: Path, source: str
) -> None:
    model = network()
    for _ in range(2):
        loader: Any = DataLoader(batch_size=RECORDS, **AUGMENTED[source])
        run = begin_run(tmp_path / "run", model, loader=loader)
        for batch in run:
            take_step(run, batch)
            if run.step == 2:
                run.pause()
    assert run.outcome is not None
    assert run.outcome.ended == "completed"


@pytest.mark.parametrize("seed", range(3))
def test_a_collate_fn_that_mixes_records_at_random_is_refused(tmp_path: Path, seed: int) -> None:
    loader: Any = DataLoader(Read(lambda x: x), batch_size=4, collate_fn=blended)
    model = network()
    torch.manual_seed(seed)
    with pytest.raises(MixedRecords, match="what collate_fn makes of two records"):
        begin_run(tmp_path / "run", model, loader=loader)


def lengths(items: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Draws, in rows that are as long as the longest record's."""
    x, y = jittered(items)
    return [functional.pad(x, (0, int(max(y).ceil().abs()))), y]


OWN = torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ({"dataset": Read(lambda x: x + torch.randn(3, generator=OWN))}, "not the same twice"),
        ({"dataset": Read(lambda x: x), "collate_fn": lengths}, "pads to the longest"),
    ],
)
def test_draws_that_cannot_be_told_from_mixing_are_refused(
    tmp_path: Path, loader: Any, message: str
) -> None:
    def first(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, [batch[0][:, :3], batch[1]])

    data: Any = DataLoader(batch_size=4, **loader)
    with pytest.raises(UnsupportedModel, match=message):
        begin_run(tmp_path / "run", network(), loader=data, losses=first)
