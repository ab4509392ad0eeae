"""What a private microbatch and step ask of a GPU, counted without one at real widths."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from affidavit.trainer.clipping import ghost_norm

BENCH = Path(__file__).resolve().parents[2] / "bench" / "gpu"
LAYERS = 3
SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}


@pytest.fixture(scope="module")
def launches() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("launches")


@pytest.mark.parametrize(
    ("place", "layers", "is_flat", "most_launches", "most_bytes"),
    [
        (1, LAYERS, False, 1.6, 1.09),
        pytest.param(2, LAYERS, False, 1.02, 1.03, marks=pytest.mark.soak),
        (4, 1, True, 2.25, 1.08),
        pytest.param(1, 12, False, 0.98, 1.11, marks=pytest.mark.soak),
        pytest.param(5, 12, False, 1.01, 1.12, marks=pytest.mark.soak),
        pytest.param(4, 12, False, 0.88, 1.12, marks=pytest.mark.soak),
        pytest.param(4, 12, True, 0.92, 1.10, marks=pytest.mark.soak),
        pytest.param(3, 4, False, 1.33, 1.11, marks=pytest.mark.soak),
        pytest.param(8, 12, True, 0.96, 1.23, marks=pytest.mark.soak),
    ],
    ids=[
        "T = 64",
        "adapters",
        "T = 1024, flat",
        "T = 64, 12 layers",
        "T = 128, 12 layers",
        "T = 1024, 12 layers",
        "T = 1024, flat, 12 layers",
        "Llama",
        "ViT-B/16, flat",
    ],
)
def test_a_private_microbatch_launches_and_moves_little_more_than_a_plain_one(
    launches: ModuleType,
    place: int,
    layers: int,
    is_flat: bool,
    most_launches: float,
    most_bytes: float,
) -> None:
    case = launches.CASES[place]
    name = "n_layer" if case.model == "GPT-2" else "layers"
    kind = "flat" if is_flat else "by matrix"
    case = replace(case, shape={**case.shape, name: layers}, kind=kind)
    plain, private = launches.microbatches(case)
    assert private.count <= most_launches * plain.count
    assert private.bytes <= most_bytes * plain.bytes
    assert private.waits == []


@pytest.mark.soak
def test_a_private_microbatch_is_one_graph(launches: ModuleType) -> None:
    """Neither a wait, nor a copy to the host, nor Python is between its operations."""
    case = replace(launches.CASES[1], shape=SHAPE)
    with launches.without_contents(), torch.no_grad():
        batch = torch.zeros(2, 17, dtype=torch.long), torch.ones(2, 17, dtype=torch.bool)
        graph, _ = launches.graph_of_microbatch(launches.model_of(case, "cpu"), batch)
        names = {getattr(node.target, "__name__", "").split(".")[0] for node in graph.graph.nodes}
        assert "sums_of_products" in names
        assert not names & launches.WAITS
        losses, _ = torch.compile(graph, backend="eager", fullgraph=True)(*batch)
    assert losses.shape == (2,)


@pytest.mark.soak
def test_the_graph_adds_what_a_microbatch_does(
    launches: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a record is discarded that was not when it was traced: no value was read."""
    monkeypatch.setattr(ghost_norm, "PROCESSORS", frozenset())
    monkeypatch.setattr(ghost_norm, "has_kernels", lambda _: True)

    def losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        result: Tensor = model.losses(batch[:2]) * batch[2]
        return result

    def batch(scale: float) -> tuple[Tensor, ...]:
        tokens = torch.randint(50, (3, 6))
        return tokens, torch.ones_like(tokens, dtype=torch.bool), torch.tensor([1, scale, 2.0])

    model = launches.model_of(replace(launches.CASES[1], shape=SHAPE), "cpu")
    graph, private = launches.graph_of_microbatch(model, batch(1.0), losses)
    other = batch(2.0**80)
    with torch.no_grad():
        found_losses, found = graph(*other)
    private.clear_sums()
    torch.testing.assert_close(
        found_losses, private.accumulate(partial(losses, model, other), records=3)
    )
    torch.testing.assert_close(found, private.sums())


def test_the_rest_of_a_step_launches_few_kernels(launches: ModuleType) -> None:
    """Most of its 149 tensors are updated together; noise and each reading are one kernel."""
    parts = launches.step_launches()
    assert parts["_update"] <= 150
    assert parts["_require_finite"] <= 10
    assert parts["release"] - parts["_update"] <= 30


def test_launches_and_waits_are_counted(launches: ModuleType) -> None:
    x = torch.ones(4, 4)
    with launches.Count() as found:
        bool((x @ x.mT).sum() > 0)
        torch._foreach_add_([torch.zeros(launches.FOREACH_CHUNK) for _ in range(400)], 1.0)
    by_name = {item.name: item for item in found.launches}
    assert by_name["mm"].bytes == 2 * 16 * 4  # the operand and its transpose are read once
    assert by_name["_foreach_add_"].count == 4  # of at most 110 tensors each
    assert len(found.waits) == 1
