"""Runs of a model that FSDP2 shards, and of the same model in one process."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from affidavit.trainer import private, private_loop
from affidavit.trainer.settings import Settings
from tests.support.free_ports import free_port
from tests.support.polling import TIMEOUT_SECONDS
from tests.support.trust import trusting
from tests.trainer.loop.small_run import KEY, MadeUpData, bundle_of, entropy_of, plan_with

MUON: dict[str, Any] = {"name": "dp_muon", "learning_rate": 0.1, "weight_decay": 0.1}
CYCLIC = {"sampling": {"scheme": "cyclic", "lot_size": 13}, "adjacency": "zero_out"}
CHANGES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": MUON},
    "muonbc": {"optimizer": {**MUON, "name": "dp_muonbc", "probes": 2}},
    "banded": {"optimizer": MUON, "noise": {"kind": "banded", "bands": 3}, **CYCLIC},
    "blt": {"optimizer": MUON, "noise": {"kind": "blt", "buffers": 2}, **CYCLIC},
    "denoised": {"optimizer": {"name": "dp_adam", "learning_rate": 0.1, "denoise": {}}},
    "adaptive": {"optimizer": MUON},
}
"""What of the small plan is changed, by the name of a run."""
COUNTS = {"kind": "adaptive_clipping_quantile", "name": "clip", "noise_std": 2, "quantile": 0.4}
RELEASES = [
    {"name": "hidden", "count": 2, "clip_norm": 0.5, "noise_multiplier": 2.0},
    {"name": "auxiliary", "count": 4, "clip_norm": 0.5, "noise_multiplier": 2.0},
]
BLOCKS = {"hidden": ["0.weight", "2.weight"], "auxiliary": ["*"]}
TRANSFORMER_RELEASES = [{**RELEASES[0], "count": 6}, {**RELEASES[1], "count": 1}]
TRANSFORMER_BLOCKS = {
    "hidden": [f"{of}.weight" for of in ("query", "key", "value", "out", "up", "down")],
    "auxiliary": ["*"],
}


def plan_of(name: str, transformer: bool = False) -> Any:
    """The plan of the run ``name``."""
    releases, changes = TRANSFORMER_RELEASES if transformer else RELEASES, CHANGES[name]
    if name == "adaptive":
        blocks = sum(of["count"] for of in releases)
        changes = {**changes, "extra": [{**COUNTS, "learning_rate": 0.5, "count": blocks}]}
    return plan_with(releases=releases, **changes)


def write_certificates(folder: Path, names: Sequence[str], *, transformer: bool = False) -> None:
    """Write the certificates of these runs."""
    for name in names:
        (folder / f"{name}.json").write_bytes(bundle_of(plan_of(name, transformer)))


def build_model() -> nn.Module:
    """Layers whose rows two and four ranks do not share evenly, and one of a single row."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def sharded_model(replicas: int = 1) -> nn.Module:
    """The same, each rank with some rows, which ``replicas`` ranks have."""
    model, size = build_model(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if replicas > 1:
        shape = (replicas, size // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "rows"))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Transformer(nn.Module):
    """Attention of four heads and a feed-forward part on two tokens a record."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 1)
        self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)
        self.each: nn.Module = nn.Identity()  # of the queries of a head
        self.query, self.key, self.value = (nn.Linear(4, 8) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3) to (n, 1)."""
        x = self.embed(x).unflatten(1, (2, 4))
        z = self.first(x)
        q, k, v = (
            of(z).unflatten(2, (-1, 2)).transpose(1, 2) for of in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(self.each(q), k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(self.up(self.second(x)).tanh())
        return self.head(x.flatten(1))


def transformer() -> Transformer:
    """The same on every rank."""
    torch.manual_seed(5)
    return Transformer()


STYLES: dict[str, ParallelStyle] = {
    **{name: ColwiseParallel() for name in ("query", "key", "value", "up")},
    **{name: RowwiseParallel() for name in ("out", "down")},
}


def parallel_transformer(rows: int = 1) -> Transformer:
    """The same, its linear layers cut among ranks, and all of it by rows among ``rows`` of them."""
    model, size = transformer(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("rows", "cut"))
    parallelize_module(model, mesh["cut"], STYLES)
    return fully_shard(model, mesh=mesh["rows"]) if rows > 1 else model


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Squared errors, one a record."""
    x, y = batch
    return (model(x).squeeze(1) - y).square()


def train_run(
    folder: Path, name: str, out: str, model: nn.Module, *, own: bool = False, until: int = -1
) -> None:
    """Train, from where the run in ``out`` stands, to its end or to before step ``until``."""
    private_loop.os = SimpleNamespace(urandom=entropy_of(1))  # type: ignore[attr-defined]
    data, transformer = MadeUpData(), isinstance(model, Transformer)
    run = private(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.05) if own else None,
        DataLoader(TensorDataset(data.x, data.y)),
        losses=losses,
        certificate=folder / f"{name}.json",
        plan=plan_of(name, transformer),
        out=folder / out,
        blocks=TRANSFORMER_BLOCKS if transformer else BLOCKS,
        trusted=trusting(KEY.public),
        settings=Settings(device="cpu", microbatch=3, checkpoint_every=1000, digest_every=4),
    )
    for batch in run:
        run.loss(batch).backward()
        run.optimizer.step()
        if run.step == until:
            run.pause()
            return


def call_in_group(function: Callable[..., None], *arguments: Any) -> None:
    """Call ``function`` on a rank that has joined the others."""
    dist.init_process_group("gloo")
    function(*arguments)
    dist.destroy_process_group()


def on_ranks(size: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Call ``function`` on ``size`` ranks, forked from this process; how each ended."""
    for name in ("torch._dynamo", "torch.distributed.checkpoint"):  # once, not on every rank
        import_module(name)
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
        each.join(TIMEOUT_SECONDS)
    return [each.exitcode for each in ranks]


def weights(out: Path) -> dict[str, Tensor]:
    """What a run wrote."""
    result: dict[str, Tensor] = torch.load(out / "weights.pt")
    return result


def read_final_entry(out: Path) -> dict[str, Any]:
    """The last line of a run's record."""
    result: dict[str, Any] = json.loads((out / "record.jsonl").read_text().splitlines()[-1])
    return result
