"""A model that ranks share, by rows or by layers, trains as in one process, up to rounding."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from affidavit.certificate import verify
from affidavit.evidence import check_conformance
from affidavit.trainer.distributed.shards import row_range
from affidavit.trainer.errors import RunFailure, UnsupportedModel
from affidavit.trainer.noise.source import NoiseSource, TensorNoise
from affidavit.trainer.optimizers.muon import Muon
from affidavit.trainer.run_folder import checkpoint_storage as checkpoints
from tests.support.trust import trusting
from tests.trainer.loop.sharded import (
    CHANGES,
    STYLES,
    build_model,
    call_in_group,
    on_ranks,
    parallel_transformer,
    read_final_entry,
    sharded_model,
    train_run,
    transformer,
    weights,
    write_certificates,
)
from tests.trainer.loop.small_run import KEY, STEPS, entries_of

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage")  # PyTorch 2.7's own checkpoints

WITHIN = 1e-6
PAUSES = (4, 7, 10, -1)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], nn.Module]]] = {
    "rows": (build_model, sharded_model),
    "layers": (transformer, parallel_transformer),
}
"""By what ranks share: the model of one process, and of a rank."""
ALL_BUT_DENOISED = tuple(name for name in CHANGES if name != "denoised")


def train_on_rank(folder: Path, names: Sequence[str], shared: str, groups: int) -> None:
    """On a rank: train each of these runs."""
    for name in names:
        train_run(folder, name, f"{name}.sharded", MODELS[shared][1](groups))


def require_same(folder: Path, name: str, one: str, other: str) -> None:
    """Two runs of one plan have the same weights and noise, and conformant records."""
    expected, got = weights(folder / one), weights(folder / other)
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert torch.allclose(got[key], value, rtol=0, atol=WITHIN), key
    assert (
        read_final_entry(folder / one)["noise_test"]
        == read_final_entry(folder / other)["noise_test"]
    )
    predicate = verify((folder / f"{name}.json").read_bytes(), trusting(KEY.public)).predicate
    result = check_conformance((folder / other / "record.jsonl").read_bytes(), predicate)
    assert result.conformant, result.findings
    assert result.steps_released == STEPS


@pytest.mark.parametrize(
    ("shared", "size", "groups", "names"),
    [
        ("rows", 2, 1, ("blt",)),
        pytest.param("rows", 2, 1, tuple(CHANGES), marks=pytest.mark.soak),
        pytest.param("rows", 4, 1, tuple(CHANGES), marks=pytest.mark.soak),
        pytest.param("rows", 4, 2, tuple(CHANGES), marks=pytest.mark.soak),
        pytest.param("layers", 2, 1, ALL_BUT_DENOISED, marks=pytest.mark.soak),
        pytest.param("layers", 4, 2, ALL_BUT_DENOISED, marks=pytest.mark.soak),
    ],
)
def test_ranks_that_share_a_model_train_as_one_process(
    tmp_path: Path, shared: str, size: int, groups: int, names: tuple[str, ...]
) -> None:
    write_certificates(tmp_path, names, transformer=shared == "layers")
    for name in names:
        train_run(tmp_path, name, f"{name}.whole", MODELS[shared][0]())
    ended = on_ranks(size, call_in_group, train_on_rank, tmp_path, names, shared, groups)
    assert ended == [0] * size
    for name in names:
        require_same(tmp_path, name, f"{name}.whole", f"{name}.sharded")
        entries = entries_of(tmp_path / f"{name}.sharded")
        assert entries[0]["performance"]["ranks"] == size
        whole = entries_of(tmp_path / f"{name}.whole")
        assert entries[0]["tensors"] == whole[0]["tensors"]


def train_part(folder: Path, shared: str, own: bool, until: int, groups: int = 1) -> None:
    """On a rank: take some steps of one run."""
    train_run(folder, "blt", "resharded", MODELS[shared][1](groups), own=own, until=until)


@pytest.mark.soak
@pytest.mark.parametrize(("shared", "own"), [("rows", False), ("rows", True), ("layers", False)])
def test_a_run_goes_on_with_another_number_of_ranks(
    tmp_path: Path, shared: str, *, own: bool
) -> None:
    write_certificates(tmp_path, ["blt"], transformer=shared == "layers")
    build = MODELS[shared][0]
    for until in PAUSES:
        train_run(tmp_path, "blt", "whole", build(), own=own, until=until)
    two, four, one, last = PAUSES
    assert on_ranks(2, call_in_group, train_part, tmp_path, shared, own, two) == [0] * 2
    assert on_ranks(4, call_in_group, train_part, tmp_path, shared, own, four, 2) == [0] * 4
    train_run(tmp_path, "blt", "resharded", build(), own=own, until=one)
    assert on_ranks(2, call_in_group, train_part, tmp_path, shared, own, last) == [0] * 2
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "resharded")
    assert all(torch.allclose(got[key], expected[key], rtol=0, atol=WITHIN) for key in expected)
    assert not list((tmp_path / "resharded").glob("checkpoint*"))


def train_half_sharded(folder: Path) -> None:
    """On a rank: what is no sharding of fully_shard's own; and a run to come back to."""
    partly = build_model()
    fully_shard(partly[0])
    with pytest.raises(UnsupportedModel, match=r"2\.weight, 2\.bias, .*: trainable"):
        train_run(folder, "muon", "partly", partly)
    train_run(folder, "muon", "altered", sharded_model(), until=3)


@pytest.mark.soak
def test_what_is_not_sharded_by_rows_is_refused_and_a_checkpoint_that_was_altered(
    tmp_path: Path,
) -> None:
    write_certificates(tmp_path, ["muon"])
    assert on_ranks(2, call_in_group, train_half_sharded, tmp_path) == [0, 0]
    (checkpoint,) = (tmp_path / "altered").glob("checkpoint-*")
    assert checkpoint.stat().st_mode & 0o077 == 0
    (one, *_) = checkpoint.glob("*.distcp")
    content = bytearray(one.read_bytes())
    content[len(content) // 2] ^= 1
    one.write_bytes(content)
    with pytest.raises(RunFailure) as caught:
        train_run(tmp_path, "muon", "altered", build_model())
    assert caught.value.code == "no_checkpoint"


def train_unsupported_layers(folder: Path) -> None:
    """On a rank: layouts under which no rank has a record's gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    in_parts = parallelize_module(transformer(), mesh, {**STYLES, "first": SequenceParallel()})
    with pytest.raises(UnsupportedModel, match=r"first\.weight: .* other parallel styles"):
        train_run(folder, "muon", "sequence", in_parts)
    by_heads = parallelize_module(transformer(), mesh, STYLES)
    by_heads.each = nn.RMSNorm(2)  # a rank has only the gradient of its own heads
    with pytest.raises(UnsupportedModel, match=r"each\.weight: each rank .* another gradient"):
        train_run(folder, "muon", "heads", by_heads)


@pytest.mark.soak
def test_gradients_that_no_rank_has_are_refused(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["muon"], transformer=True)
    assert on_ranks(2, call_in_group, train_unsupported_layers, tmp_path) == [0, 0]


def train_and_die(folder: Path) -> None:
    """On a rank: the second one is killed in a step, and the first one cannot go on."""
    model = sharded_model()
    if dist.get_rank():
        calls = count()

        def forward_begins(*_: object) -> None:
            if next(calls) == 36:
                os.kill(os.getpid(), signal.SIGKILL)

        model.register_forward_pre_hook(forward_begins)
    with pytest.raises((RunFailure, RuntimeError), match=r"peer|rank"):  # ours, or FSDP's own
        train_run(folder, "muon", "killed", model)
    os._exit(0)  # the others will not say goodbye


@pytest.mark.soak
def test_a_rank_that_is_killed_stops_all_and_one_process_goes_on(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["muon"])
    assert on_ranks(2, call_in_group, train_and_die, tmp_path) == [0, -signal.SIGKILL]
    charged = sum(entry["type"] == "charge" for entry in entries_of(tmp_path / "killed"))
    assert 0 < charged < STEPS
    train_run(tmp_path, "muon", "killed", build_model())
    predicate = verify((tmp_path / "muon.json").read_bytes(), trusting(KEY.public)).predicate
    record = (tmp_path / "killed" / "record.jsonl").read_bytes()
    result = check_conformance(record, predicate)
    assert result.conformant, result.findings
    assert result.steps_charged == STEPS


def train_and_differ(folder: Path) -> None:
    """On a rank: one of the replicas computes another update, and all end."""
    model = sharded_model(replicas=2)
    if dist.get_rank() == 3:
        calls, update = count(), Muon.step

        def step(self: Muon) -> None:
            update(self)
            if next(calls) == 6:
                with torch.no_grad():
                    model.get_parameter("2.weight").to_local().add_(1.0)

        Muon.step = step  # type: ignore[method-assign]
    with pytest.raises(RunFailure) as caught:
        train_run(folder, "muon", "strayed", model)
    assert caught.value.code == "ranks_differ"


@pytest.mark.soak
def test_replicas_that_differ_are_stopped(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["muon"])
    assert on_ranks(4, call_in_group, train_and_differ, tmp_path) == [0] * 4


class Planted:
    """What runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_no_code_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Planted(planted)))
    with pytest.raises(RunFailure) as caught:
        checkpoints.load_sharded(tmp_path, {}, None)
    assert caught.value.code == "bad_checkpoint"
    assert not planted.exists()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_noise_of_the_parts_is_that_of_the_tensor(
    size: int, *, columns: bool, exact: bool
) -> None:
    shapes = {"a": (9, 5), "b": (1,), "c": (130, 7), "d": (6, 3, 2)}
    whole = {name: torch.ones(shape) for name, shape in shapes.items()}
    tensors = {name: TensorNoise(shape=shape, scale=1.5) for name, shape in shapes.items()}
    NoiseSource(tensors, exact=exact).add_to(whole, bytes(32))
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in shapes}
    along = {name: 0 if name != "c" or not columns else 1 for name in shapes}
    for rank in range(size):
        boxes: dict[str, Any] = {
            name: [(0, shape[0]), (0, prod(shape[1:]))] for name, shape in shapes.items()
        }
        for name, box in boxes.items():
            box[along[name]] = row_range(box[along[name]][1], rank, size)
        here = {
            name: TensorNoise(shape=shape, scale=1.5, box=tuple(boxes[name]))
            for name, shape in shapes.items()
        }
        sums = {name: torch.ones(of.local_shape) for name, of in here.items()}
        NoiseSource(here, exact=exact).add_to(sums, bytes(32))
        for name, item in sums.items():
            parts[name].append(item)
    for name, of in parts.items():
        assert torch.equal(torch.cat(of, along[name]), whole[name]), json.dumps([name, size])
