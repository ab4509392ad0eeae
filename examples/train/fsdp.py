"""Train scikit-learn's digits with DP-Muon, the model sharded over ranks by FSDP2.

affidavit certify examples/train/digits-dp-muon.yaml --out bundle.json
torchrun --standalone --nproc-per-node 2 examples/train/fsdp.py bundle.json run
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from affidavit.trainer import private

PLAN = Path(__file__).with_name("digits-dp-muon.yaml")


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One loss for each record of ``batch``."""
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def main(certificate: Path, out: Path) -> None:
    """Train on this rank's part of every lot; ``out`` is a folder that all ranks see."""
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    train = torch.arange(len(y)) % 5 != 4  # every fifth record is held out
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(1)  # public: first weights come from no data
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    run = private(
        model,
        None,  # the plan's own optimiser, DP-Muon
        DataLoader(TensorDataset(x[train].float() / 16, y[train]), batch_size=64),
        losses=losses,
        certificate=certificate,
        plan=PLAN,
        out=out,
        blocks={"hidden": ["0.weight"], "auxiliary": ["*"]},
    )
    for batch in run:
        run.loss(batch).backward()
        run.optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
