"""Recomputed activations, autocast and compilation change speed and memory, not the sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.probe import probe
from affidavit.trainer.clipping.requirements import BlockSpec


class Deep(nn.Module):
    """Two residual blocks, one of which runs twice, with or without recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 2)
        self.recompute: bool | None = None

    def part(self, x: Tensor) -> Tensor:
        """One residual block."""
        return x + self.first(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, 2); ``recompute`` is None or ``use_reentrant``."""
        for _ in range(2):
            if self.recompute is None:
                x = self.part(x)
            else:
                x = checkpoint(self.part, x, use_reentrant=self.recompute)  # type: ignore[assignment]
        return self.last(x)


def made(dtype: torch.dtype) -> tuple[Deep, PrivateModel, Tensor]:
    """The same numbers each time; ``last`` by itself, the rest together."""
    torch.manual_seed(0)
    model = Deep().to(dtype)
    others = tuple(n for n, _ in model.named_parameters() if n != "last.weight")
    blocks = [
        BlockSpec(name="last", clip_norm=0.5, names=("last.weight",)),
        BlockSpec(name="others", clip_norm=0.3, names=others),
    ]
    return model, PrivateModel(model, blocks), torch.randn(5, 4, 6, dtype=dtype)


def sums(private: PrivateModel, run: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """Clipped sums by name, of ``x`` alone."""
    private.clear_sums()
    private.accumulate(lambda: run(x).float().square().flatten(1).sum(1), records=len(x))
    return private.sums()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_leave_the_sums(reentrant: bool) -> None:
    model, private, x = made(torch.float64)
    expected = sums(private, model, x)
    again, other, _ = made(torch.float64)
    again.recompute = reentrant
    # A reentrant checkpoint has gradients only where its input asks for one.
    got = sums(other, again, x.clone().requires_grad_(reentrant))
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=1e-12, atol=1e-14), name


# The probe runs the model without gradients too.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_are_run_for_all_records_at_once(reentrant: bool) -> None:
    model, private, x = made(torch.float64)
    model.recompute = reentrant

    def losses(rows: Tensor) -> Tensor:
        inputs = x[rows].detach().requires_grad_(reentrant)
        return model(inputs).square().flatten(1).sum(1)  # type: ignore[no-any-return]

    runs: list[int] = []
    model.norm.register_forward_pre_hook(lambda _, inputs: runs.append(len(inputs[0])))
    probe(private, losses)
    runs.clear()
    private.accumulate(partial(losses, torch.arange(5)), records=5)
    assert runs == [5, 5, 5, 5]  # each of two blocks twice


# PyTorch looks at the gradient of what is no leaf while it traces.
@pytest.mark.soak
@pytest.mark.ordinary("False")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("recompute", [None, False])
def test_compiled_parts_leave_the_sums(recompute: bool | None) -> None:
    """Alone, and inside what is computed again; records are longer than their clip norm."""
    model, private, x = made(torch.float64)
    expected = sums(private, model, x)
    again, other, _ = made(torch.float64)
    again.recompute = recompute
    compiled: list[GraphModule] = []

    def as_traced(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return aot_eager(graph, inputs) if recompute is None else graph.forward

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    run: Callable[[Tensor], Tensor] = again
    if recompute is None:
        run = torch.compile(again, backend=as_traced)
    else:
        again.part = torch.compile(again.part, backend=as_traced)  # type: ignore[method-assign]
    got = sums(other, run, x)
    assert compiled
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=1e-9), name
    clipped = sums(other, run, x[:1])
    assert float(clipped["last.weight"].norm()) == pytest.approx(0.5, rel=1e-6)
    others = [entry for n, entry in clipped.items() if n != "last.weight"]
    assert float(torch.stack([item.norm() for item in others]).norm()) == pytest.approx(
        0.3, rel=1e-6
    )


@pytest.mark.parametrize("around", ["losses", "step"])
def test_autocast_is_near_and_sums_stay_in_float32(around: str) -> None:
    model, private, x = made(torch.float32)
    expected = sums(private, model, x)
    again, other, _ = made(torch.float32)

    def narrow(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return again(x)

    if around == "losses":
        got = sums(other, narrow, x)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            got = sums(other, again, x)
    assert other._microbatch.is_half
    for name, value in expected.items():
        assert got[name].dtype == torch.float32
        assert float((got[name] - value).norm()) <= 0.03 * float(value.norm()), name


def test_evaluation_runs_the_plain_layers() -> None:
    model, private, x = made(torch.float32)
    with torch.no_grad():
        seen = model(x)
    private.detach()
    assert torch.equal(seen, model(x))
