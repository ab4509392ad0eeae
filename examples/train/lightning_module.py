"""Train scikit-learn's digits with DP-SGD in PyTorch Lightning.

affidavit certify examples/train/digits-dp-sgd.yaml --out bundle.json
python examples/train/lightning_module.py bundle.json run
"""

import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from affidavit.trainer import PrivateRun, private
from affidavit.trainer.integrations.lightning import PrivateSteps

PLAN = Path(__file__).with_name("digits-dp-sgd.yaml")


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One loss for each record of ``batch``."""
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


class Digits(lightning.LightningModule):
    """Trains by the lots and the optimiser of a private run."""

    def __init__(self, model: nn.Module, run: PrivateRun) -> None:
        super().__init__()
        self.model, self.run = model, run

    def configure_optimizers(self) -> Any:
        """That of the run, with a schedule that ends at the last certified step."""
        scheduler = CosineAnnealingLR(self.run.optimizer, self.run.certified_steps)
        return {
            "optimizer": self.run.optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, _: int) -> torch.Tensor:
        """The whole lot of a step, in microbatches."""
        return self.run.accumulate()


def main(certificate: Path, out: Path) -> PrivateRun:
    """Train until every certified step is taken."""
    x, y = (torch.tensor(of)[torch.arange(1797) % 5 < 4] for of in load_digits(return_X_y=True))
    loader = DataLoader(TensorDataset(x.float() / 16, y), batch_size=64)
    torch.manual_seed(1)  # public: first weights come from no data
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where Lightning will have it
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).to(device)
    how = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    run = private(model, how, loader, losses=losses, certificate=certificate, plan=PLAN, out=out)
    trainer = lightning.Trainer(
        max_epochs=1,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[PrivateSteps(run)],
    )
    trainer.fit(Digits(model, run), range(len(run)))
    return run


if __name__ == "__main__":
    sys.stdout.write(main(Path(sys.argv[1]), Path(sys.argv[2])).guarantee + "\n")
