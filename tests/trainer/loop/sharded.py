"""Runs of a model that FSDP2 shards, and of the same model in one process."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from affidavit.trainer import private, private_loop
from affidavit.trainer.settings import Settings
from tests.ports import free_port
from tests.trainer.loop.made import KEY, Made, bundle_of, entropy_of, plan_with

MUON: dict[str, Any] = {"name": "dp_muon", "learning_rate": 0.1, "weight_decay": 0.1}
CYCLIC = {"sampling": {"scheme": "cyclic", "lot_size": 13}, "adjacency": "zero_out"}
CHANGES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": MUON},
    "muonbc": {"optimizer": {**MUON, "name": "dp_muonbc", "probes": 2}},
    "banded": {"optimizer": MUON, "noise": {"kind": "banded", "bands": 3}, **CYCLIC},
    "blt": {"optimizer": MUON, "noise": {"kind": "blt", "buffers": 2}, **CYCLIC},
    "denoised": {"optimizer": {"name": "dp_adam", "learning_rate": 0.1, "denoise": {}}},
}
"""What of the small plan is changed, by the name of a run."""
RELEASES = [
    {"name": "hidden", "count": 2, "clip_norm": 0.5, "noise_multiplier": 2.0},
    {"name": "auxiliary", "count": 4, "clip_norm": 0.5, "noise_multiplier": 2.0},
]
BLOCKS = {"hidden": ["0.weight", "2.weight"], "auxiliary": ["*"]}


def plan_of(name: str) -> Any:
    """The plan of the run ``name``."""
    return plan_with(releases=RELEASES, **CHANGES[name])


def certified(folder: Path, names: Sequence[str]) -> None:
    """Write the certificates of these runs."""
    for name in names:
        (folder / f"{name}.json").write_bytes(bundle_of(plan_of(name)))


def model_of() -> nn.Module:
    """Layers whose rows two and four ranks do not share evenly, and one of a single row."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def sharded_model(replicas: int = 1) -> nn.Module:
    """The same, each rank with some rows, which ``replicas`` ranks have."""
    model, size = model_of(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if replicas > 1:
        shape = (replicas, size // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "rows"))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Squared errors, one a record."""
    x, y = batch
    return (model(x).squeeze(1) - y).square()


def trained(
    folder: Path, name: str, out: str, model: nn.Module, *, own: bool = False, until: int = -1
) -> None:
    """Train, from where the run in ``out`` stands, to its end or to before step ``until``."""
    private_loop.os = SimpleNamespace(urandom=entropy_of(1))  # type: ignore[attr-defined]
    data = Made()
    run = private(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.05) if own else None,
        DataLoader(TensorDataset(data.x, data.y)),
        losses=losses,
        certificate=folder / f"{name}.json",
        plan=plan_of(name),
        out=folder / out,
        blocks=BLOCKS,
        trusted=[KEY.public],
        settings=Settings(device="cpu", microbatch=3, checkpoint_every=1000, digest_every=4),
    )
    for batch in run:
        run.loss(batch).backward()
        run.optimizer.step()
        if run.step == until:
            run.pause()
            return


def in_a_group(function: Callable[..., None], *arguments: Any) -> None:
    """Call ``function`` on a rank that has joined the others."""
    dist.init_process_group("gloo")
    function(*arguments)
    dist.destroy_process_group()


def on_ranks(size: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Call ``function`` on ``size`` ranks, forked from this process; how each ended."""
    port, context = str(free_port()), multiprocessing.get_context("fork")

    def rank(number: int) -> None:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        torch.set_num_threads(1)
        function(*arguments)

    ranks = [context.Process(target=rank, args=(number,)) for number in range(size)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
    return [each.exitcode for each in ranks]


def weights(out: Path) -> dict[str, Tensor]:
    """What a run wrote."""
    result: dict[str, Tensor] = torch.load(out / "weights.pt")
    return result


def final(out: Path) -> dict[str, Any]:
    """The last line of a run's record."""
    result: dict[str, Any] = json.loads((out / "record.jsonl").read_text().splitlines()[-1])
    return result
