"""What a private microbatch and step ask of a GPU, counted without one at real widths."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench" / "gpu"
LAYERS = 3


@pytest.fixture(scope="module")
def launches() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("launches")


@pytest.mark.parametrize(
    ("place", "layers", "is_flat", "most_launches", "most_bytes"),
    [
        (1, LAYERS, False, 1.71, 1.1),
        (2, LAYERS, False, 1.02, 1.03),
        (4, 1, True, 2.25, 1.08),
        pytest.param(1, 12, False, 1.3, 1.13, marks=pytest.mark.soak),
        pytest.param(5, 12, False, 1.4, 1.15, marks=pytest.mark.soak),
        pytest.param(4, 12, False, 1.08, 1.13, marks=pytest.mark.soak),
        pytest.param(4, 12, True, 1.13, 1.105, marks=pytest.mark.soak),
        pytest.param(3, 4, False, 1.51, 1.19, marks=pytest.mark.soak),
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
    case = replace(case, shape={**case.shape, name: layers})
    plain, private = launches.microbatches(case, is_flat=is_flat)
    assert private.count <= most_launches * plain.count
    assert private.bytes <= most_bytes * plain.bytes
    assert private.waits == []


def test_the_rest_of_a_step_launches_few_kernels(launches: ModuleType) -> None:
    """Most of its 149 tensors are updated, tested and released together."""
    parts = launches.step_launches()
    assert parts["_update"] <= 220
    assert parts["_require_finite"] <= 10
    assert parts["release"] <= 320


def test_launches_and_waits_are_counted(launches: ModuleType) -> None:
    x = torch.ones(4, 4)
    with launches.Count() as found:
        bool((x @ x.mT).sum() > 0)
        torch._foreach_add_([torch.zeros(launches.FOREACH_CHUNK) for _ in range(400)], 1.0)
    by_name = {item.name: item for item in found.launches}
    assert by_name["mm"].bytes == 2 * 16 * 4  # the operand and its transpose are read once
    assert by_name["_foreach_add_"].count == 4  # of at most 110 tensors each
    assert len(found.waits) == 1
