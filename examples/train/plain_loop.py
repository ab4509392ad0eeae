"""Train scikit-learn's digits with DP-Muon in a loop of one's own.

affidavit certify examples/train/digits-dp-muon.yaml --out bundle.json
python examples/train/plain_loop.py bundle.json run
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from affidavit.trainer import private

PLAN = Path(__file__).with_name("digits-dp-muon.yaml")


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Every fifth record is held out, as in ``affidavit train --data digits``."""
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    x, held_out = x.float() / 16, torch.arange(len(y)) % 5 == 4
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One loss for each record of ``batch``."""
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def main(certificate: Path, out: Path) -> float:
    """The share of held-out digits that the trained model knows."""
    train, test = digits()
    torch.manual_seed(1)  # public: first weights come from no data
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    run = private(
        model,
        None,  # the plan's own optimiser, DP-Muon
        DataLoader(train, batch_size=64),
        losses=losses,
        certificate=certificate,
        plan=PLAN,
        out=out,
        blocks={"hidden": ["0.weight"], "auxiliary": ["*"]},
    )
    for batch in run:
        run.loss(batch).backward()
        run.optimizer.step()
    x, y = test.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


if __name__ == "__main__":
    share = main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write(f"{share:.1%} of the held-out digits\n")
