"""Train a client's digits with DP-SGD in Flower: all rounds together are one certified run.

The node's configuration names the certificate and the folder of the run; run_config has the
steps of a round. Between rounds the run waits in its checkpoint, and weights that come from
the server are a function of what was released before: they cost this client's records nothing.
"""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from affidavit.trainer import PrivateRun, private

PLAN = Path(__file__).with_name("digits-dp-sgd.yaml")
app = ClientApp()


def network() -> nn.Module:
    """The model, on client and server alike."""
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One loss for each record of ``batch``."""
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def run_of(model: nn.Module, certificate: Path, out: Path) -> PrivateRun:
    """The run in ``out``, from where it was paused."""
    x, y = (torch.tensor(of)[torch.arange(1797) % 5 < 4] for of in load_digits(return_X_y=True))
    loader = DataLoader(TensorDataset(x.float() / 16, y), batch_size=64)
    how = torch.optim.SGD(model.parameters(), lr=0.3)
    return private(model, how, loader, losses=losses, certificate=certificate, plan=PLAN, out=out)


@app.train()
def train(message: Message, context: Context) -> Message:
    """A round: some of the certified steps, from the server's weights."""
    model, node = network(), context.node_config
    run = run_of(model, Path(str(node["certificate"])), Path(str(node["out"])))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    last = min(run.step + int(context.run_config["local-steps"]), run.step + len(run))
    for batch in run:
        run.loss(batch).backward()
        run.optimizer.step()
        if run.step >= last:
            run.pause()
    count = MetricRecord({"num-examples": 1438})  # the size of the data set is public here
    reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": count}
    return Message(RecordDict(reply), reply_to=message)
