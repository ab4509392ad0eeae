"""Loops that change while they run: what mixes records stops, and what is sound trains on.

The changes are of the kinds of ``test_straying_loops``. Where only values show one, each microbatch
is probed again, so that a test need not wait for the random choice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from affidavit.trainer.clipping import invariants
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.requirements import BlockSpec
from tests.trainer.loop.test_private_loop import begin_run, take_step
from tests.trainer.loop.test_straying_loops import PLAN, STRAYED, SWITCH_AT, Switch


class Deep(nn.Module):
    """Layers that are small enough for a node's hook, with what a change may add to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 6), nn.LayerNorm(6)
        self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.settings = {"mix": 0.0}
        self.gate = torch.zeros(())
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1)."""
        h = self.inner(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.second(h)))

    def inner(self, h: Tensor) -> Tensor:
        """(n, 6), with a term that is zero at first."""
        h = self.norm(h)
        share = self.settings["mix"] * self.gate
        return h * (1 - share) + share * h.mean(0)


class Normalised(Function):
    """The identity, whose backward pass divides by the norm of all records if ``is_on``."""

    is_on = False

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """Return x."""
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        """Divide by the norm."""
        return 0.05 * grad / grad.norm() if Normalised.is_on else grad


class Reversed(Function):
    """The identity, whose backward pass compares records if ``is_on``."""

    is_on = False

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """Return x."""
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        """Subtract the mean over records."""
        return grad - grad.mean(0) if Reversed.is_on else grad


def square(z: Tensor, y: Tensor) -> Tensor:
    """(n,)."""
    return (z - y).square()


QUEUE: list[Tensor] = []
Loss = Callable[[Deep, Tensor, Tensor, bool], Tensor]


def scale_of(z: Tensor, on: bool) -> float:
    """A number of the batch that takes the place of one."""
    return float(z.detach().abs().mean()) if on else 1.0


def queued(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """A queue of earlier outputs, as contrastive losses have it."""
    z = model(x).squeeze(1)
    QUEUE.append(z.detach() if on else torch.zeros(3))
    return square(z, y) + 0.1 * z * QUEUE[-1].mean()


def hooked(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """A hook of an activation that compares records."""
    h = torch.tanh(model.first(x))
    if on:
        h.register_hook(lambda grad: grad - grad.mean(0))
    return square(model.last(model.second(model.norm(h))).squeeze(1), y)


def hooked_output(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """A hook of a layer's own output that compares records."""
    h = model.second(torch.tanh(model.first(x)))
    if on:
        h.register_hook(lambda grad: grad - grad.mean(0))
    return square(model.last(model.norm(h)).squeeze(1), y)


def reversed_backward(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """A backward pass of its own."""
    Reversed.is_on = on
    h = Reversed.apply(model.second(torch.tanh(model.first(x))))
    return square(model.last(model.norm(h)).squeeze(1), y)


def normalised_backward(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """A backward pass in which a record alone is scaled otherwise than with others."""
    Normalised.is_on = on
    return square(Normalised.apply(model(x)).squeeze(1), y)


def scaled_by_losses(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """A hook of the losses that weighs them by those of the batch."""
    losses = square(model(x).squeeze(1), y)
    if on:
        losses.register_hook(lambda grad: 0.02 * grad * losses.detach().mean())
    return losses


def smoothed(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """Targets that are smoothed by those of the batch."""
    y = 0.9 * y + 0.1 * (y.mean() if on else 0.0)
    return square(model(x).squeeze(1), y)


def ranked(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """Weights by the rank of a loss among the others."""
    losses = square(model(x).squeeze(1), y)
    rank = losses.detach().argsort().argsort() if on else torch.zeros(len(losses))
    return losses * (1 + rank)


def mined(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """The half of the losses that are largest."""
    losses = square(model(x).squeeze(1), y)
    least = losses.detach().median() if on else torch.tensor(-1.0)
    return losses * (losses.detach() > least)


def gated(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """A term whose weight leaves zero, in a tensor that no attribute's value shows."""
    model.settings["mix"] = 1.0
    model.gate.fill_(0.5 if on else 0.0)
    return square(model(x).squeeze(1), y)


IN_VALUES: dict[str, Loss] = {
    "number": lambda m, x, y, on: square((z := m(x).squeeze(1)) / scale_of(z, on), y),
    "clamped by the batch": lambda m, x, y, on: square(
        (z := m(x).squeeze(1)).clamp(max=float(z.detach().mean()) - 9 if on else 9e9), y
    ),
    "temperature": lambda m, x, y, on: functional.softplus(
        m(x).squeeze(1) * (float(y.std()) if on else 1.0)
    ) + 0 * y,
    "rolled targets": lambda m, x, y, on: square(m(x).squeeze(1), y.roll(1) if on else y),
    "sorted inputs": lambda m, x, y, on: square(m(x.sort(0).values if on else x).squeeze(1), y),
    "whitened inputs": lambda m, x, y, on: square(
        m((x - x.mean(0)) / x.std(0) if on else x).squeeze(1), y
    ),
    "first record": lambda m, x, y, on: square(m(x - x[:1] if on else x).squeeze(1), y),
    "neighbours": lambda m, x, y, on: square(
        m(x[torch.cdist(x, x).argsort()[:, :2]].mean(1) if on else x).squeeze(1), y
    ),
    "queue": queued,
    "hook of an activation": hooked,
    "hook of a layer's output": hooked_output,
    "backward of its own": reversed_backward,
    "norm of all gradients": normalised_backward,
    "hook of the losses": scaled_by_losses,
    "smoothed": smoothed,
    "ranked": ranked,
    "mined": mined,
    "gated": gated,
}  # fmt: skip


@pytest.mark.by_turns
@pytest.mark.ordinary("hook of a layer's output", "hook of the losses", "gated", "neighbours")
@pytest.mark.parametrize("name", IN_VALUES)
def test_a_change_that_only_values_show_stops_where_it_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(invariants, "REPROBED_SHARE", 1.0)
    monkeypatch.setattr(invariants, "GRADIENTS_SHARE", 1.0)
    switch = Switch()
    run = begin_run(
        tmp_path / "run",
        Deep(),
        losses=lambda model, batch: IN_VALUES[name](model, *batch, switch.on),
        batch_size=10,
        plan=PLAN,
    )
    for batch in islice(run, SWITCH_AT):
        take_step(run, batch)
    switch.on = True

    def go_on() -> None:
        for batch in islice(run, 24):  # the record that is drawn may be one that does not change
            take_step(run, batch)

    with pytest.raises(STRAYED):
        go_on()
    run.close()


def attach_hook(model: Deep) -> None:
    """Compare records in a module's backward hook."""
    model.second.register_full_backward_hook(lambda *_: None)


def swap_head(model: Deep) -> None:
    """Train another head."""
    model.last = nn.Linear(6, 1)


def tie(model: Deep) -> None:
    """Use one tensor twice."""
    model.second.weight = model.first.weight = nn.Parameter(torch.ones(6, 6)[:, :3])


def freeze(model: Deep) -> None:
    """Freeze a tensor."""
    model.first.bias.requires_grad_(False)


def write_weights(model: Deep) -> None:
    """Write to a tensor past autograd."""
    model.first.weight.data.add_(1.0)


def swap_memory(model: Deep) -> None:
    """Give a parameter other values."""
    model.first.weight.data = torch.zeros(6, 3)


def centre(model: Deep) -> None:
    """Replace a method of the instance."""
    model.inner = lambda h: h - h.mean(0)  # type: ignore[method-assign]


def centre_features(model: Deep) -> None:
    """Store a mean of features, as self-distillation does, for later steps."""
    model.centre.add_(1.0)  # type: ignore[operator]


def norm_over_records(model: Deep) -> None:
    """Have an operation work in the wrong dimension."""
    model.norm.forward = lambda h: h.softmax(0)  # type: ignore[method-assign]


def parametrize(model: Deep) -> None:
    """Compute a weight from another."""
    nn.utils.parametrize.register_parametrization(model.second, "weight", nn.Tanh())


CHANGES: dict[str, Callable[[Deep], None]] = {
    of.__name__: of
    for of in (
        attach_hook, swap_head, tie, freeze, write_weights, swap_memory, centre,
        centre_features, norm_over_records, parametrize,
    )
}  # fmt: skip


@pytest.mark.by_turns
@pytest.mark.ordinary("tie", "centre_features", "norm_over_records")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_stops_at_its_step(tmp_path: Path, name: str) -> None:
    model = Deep()
    run = begin_run(tmp_path / "run", model, batch_size=10, plan=PLAN)
    for place, batch in enumerate(islice(run, SWITCH_AT + 1)):
        if place < SWITCH_AT:
            take_step(run, batch)
            continue
        CHANGES[name](model)

        def finish(batch: Any = batch) -> None:
            take_step(run, batch)
            for other in islice(run, 5):  # the rest of the lot
                take_step(run, other)

        with pytest.raises(STRAYED):
            finish()
    run.close()


# ---- what is sound ------------------------------------------------------------------------


def scaled_gradient(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """A hook that halves the gradient of a layer's output, as a reversal layer does."""
    h = model.second(torch.tanh(model.first(x)))
    if on:
        h.register_hook(lambda grad: -0.5 * grad)
    return square(model.last(model.norm(h)).squeeze(1), y)


def in_place(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """Operations that write into a layer's output."""
    h = model.second(model.first(x).tanh_())
    h = functional.relu_(h) if on else functional.relu(h)
    return square(model.last(model.norm(h).mul(2)).squeeze(1), y)


def taught(model: Deep, x: Tensor, y: Tensor, on: bool) -> Tensor:
    """A copy of the model as a teacher."""
    z = model(x).squeeze(1)
    with torch.no_grad():
        target = copy.deepcopy(model)(x).squeeze(1) if on else z
    return square(z, y) + 0.1 * square(z, target.detach())


SOUND: dict[str, Loss] = {
    "gradient of an output": scaled_gradient,
    "in place": in_place,
    "teacher": taught,
    "checkpoint": lambda m, x, y, on: square(
        (checkpoint(m, x.requires_grad_(), use_reentrant=False) if on else m(x)).squeeze(1), y
    ),
    "evaluation": lambda m, x, y, on: square(m.train(not on)(x).squeeze(1), y),
    "layer left out": lambda m, x, y, on: square(
        m.last(m.norm(torch.tanh(m.first(x)))).squeeze(1) if on else m(x).squeeze(1), y
    ),
    "layer twice": lambda m, x, y, on: square(
        m.last(m.second(m.second(torch.tanh(m.first(x))))).squeeze(1), y
    ) if on else square(m(x).squeeze(1), y),
    "tokens": lambda m, x, y, on: square(m(
        torch.stack([x, -x], 1)).mean(1).squeeze(1), y) if on else square(m(x).squeeze(1), y),
    "weighted by its own": lambda m, x, y, on: square(
        m(x).squeeze(1), y) * (x.norm(dim=1).detach() if on else 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sums_after_a_sound_change_are_those_of_single_records(name: str) -> None:
    torch.manual_seed(4)
    model = Deep().double()
    names = tuple(name for name, _ in model.named_parameters())
    held = PrivateModel(model, [BlockSpec(name="all", clip_norm=0.3, names=names)])
    x, y = torch.randn(5, 3).double(), torch.randn(5).double()
    loss = SOUND[name]
    for on in (False, True):
        held.clear_sums()
        held.accumulate(lambda on=on: loss(model, x, y, on), records=5)
        sums = held.sums()
        held.detach()
        expected = {key: torch.zeros_like(item) for key, item in sums.items()}
        for row in range(5):
            model.zero_grad()
            loss(model, x[[row]], y[[row]], on).sum().backward()
            grads = {
                key: torch.zeros_like(item) if item.grad is None else item.grad
                for key, item in model.named_parameters()
            }
            norm = torch.stack([item.norm() for item in grads.values()]).norm()
            for key, item in grads.items():
                expected[key] += item * (0.3 / norm).clamp(max=1)
        model.zero_grad()
        for key, item in sums.items():
            assert torch.allclose(item, expected[key], rtol=1e-9, atol=1e-12), (key, on)
        held = PrivateModel(model, held.specs)


def test_an_input_that_is_written_over_is_not_taken_for_what_it_was() -> None:
    model = Deep()
    names = tuple(name for name, _ in model.named_parameters())
    held = PrivateModel(model, [BlockSpec(name="all", clip_norm=0.3, names=names)])
    x = torch.randn(5, 3)

    def losses() -> Tensor:
        h = model.first(x) + 0.0
        z = model.last(model.norm(model.second(h)))
        h.mul_(2)
        return z.squeeze(1)

    with pytest.raises(RuntimeError, match=r"in-?place operation"):
        held.accumulate(losses, records=5)
