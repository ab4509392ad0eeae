"""Layers that ranks share by tensor parallelism train as one process does, up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    SequenceParallel,
    parallelize_module,
)

from affidavit.trainer.errors import UnsupportedModel
from tests.trainer.loop.sharded import (
    STYLES,
    certified,
    in_a_group,
    on_ranks,
    parallel_transformer,
    trained,
    transformer,
    weights,
)
from tests.trainer.loop.test_sharded import PAUSES, WITHIN, require_same


def parallel_runs(folder: Path, names: Sequence[str], rows: int) -> None:
    """On a rank: each of these runs."""
    for name in names:
        trained(folder, name, f"{name}.parallel", parallel_transformer(rows))


@pytest.mark.parametrize(
    ("size", "rows", "names"),
    [
        (2, 1, ("muonbc",)),
        pytest.param(2, 1, ("muon", "banded", "blt", "adaptive"), marks=pytest.mark.soak),
        pytest.param(4, 2, ("muon", "muonbc", "banded", "blt", "adaptive"), marks=pytest.mark.soak),
    ],
)
def test_ranks_that_share_layers_train_as_one_process(
    tmp_path: Path, size: int, rows: int, names: tuple[str, ...]
) -> None:
    certified(tmp_path, names, transformer=True)
    for name in names:
        trained(tmp_path, name, f"{name}.whole", transformer())
    assert on_ranks(size, in_a_group, parallel_runs, tmp_path, names, rows) == [0] * size
    for name in names:
        require_same(tmp_path, name, f"{name}.whole", f"{name}.parallel")


def part(folder: Path, until: int, rows: int) -> None:
    """On a rank: some steps of one run."""
    trained(folder, "blt", "resharded", parallel_transformer(rows), until=until)


@pytest.mark.soak
def test_a_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    certified(tmp_path, ["blt"], transformer=True)
    for until in PAUSES:
        trained(tmp_path, "blt", "whole", transformer(), until=until)
    two, four, one, last = PAUSES
    assert on_ranks(2, in_a_group, part, tmp_path, two, 1) == [0] * 2
    assert on_ranks(4, in_a_group, part, tmp_path, four, 2) == [0] * 4
    trained(tmp_path, "blt", "resharded", transformer(), until=one)
    assert on_ranks(2, in_a_group, part, tmp_path, last, 1) == [0] * 2
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "resharded")
    assert all(torch.allclose(got[key], expected[key], rtol=0, atol=WITHIN) for key in expected)


def refused(folder: Path) -> None:
    """On a rank: layouts under which no rank has a record's gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    in_parts = parallelize_module(transformer(), mesh, {**STYLES, "first": SequenceParallel()})
    with pytest.raises(UnsupportedModel, match=r"first\.weight: .* other parallel styles"):
        trained(folder, "muon", "sequence", in_parts)
    by_heads = parallelize_module(transformer(), mesh, STYLES)
    by_heads.each = nn.RMSNorm(2)  # of which a rank has the gradient of its own heads alone
    with pytest.raises(UnsupportedModel, match=r"each\.weight: each rank .* another gradient"):
        trained(folder, "muon", "heads", by_heads)


@pytest.mark.soak
def test_gradients_that_no_rank_has_are_refused(tmp_path: Path) -> None:
    certified(tmp_path, ["muon"], transformer=True)
    assert on_ranks(2, in_a_group, refused, tmp_path) == [0, 0]
