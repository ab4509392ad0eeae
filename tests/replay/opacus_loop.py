"""A small loop of Opacus, and faults that are planted in it."""

from tests.replay.faults import Fault

LOOP = """\
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from opacus import PrivacyEngine


def accuracy(model, data):
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in data)


def main():
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(200, 8, generator=generator)
    Y = torch.randint(0, 3, (200,), generator=generator)
    dataset = TensorDataset(X, Y)
    loader = DataLoader(dataset, batch_size=20, num_workers=2)
    plain = DataLoader(dataset, batch_size=50)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    criterion = nn.CrossEntropyLoss()
    # before
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.1,
        max_grad_norm=1.0,
    )
    # prepared
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            # stepped
        scheduler.step()
        # epoch
    torch.save(model.state_dict(), "model.pt")
    # end


if __name__ == "__main__":
    main()
"""

FAULTS = [
    Fault(
        "a record reads the one before it",
        {
            "def main():\n": "class Shifted(TensorDataset):\n"
            "    def __getitem__(self, at):\n"
            "        x, y = super().__getitem__(at)\n"
            "        return x + 0.5 * self.tensors[0][at - 1], y\n\n\n"
            "def main():\n",
            "dataset = TensorDataset(X, Y)": "dataset = Shifted(X, Y)",
        },
        "record_outside_lot",
        where="optimizer.step()",
    ),
    Fault(
        "initial weights are counts of labels",
        {
            "    # before\n": "    counts = torch.bincount(Y, minlength=3)\n"
            "    model[3].bias.data = counts.float()\n",
        },
        "state_differs",
        where="counts.float()",
        subject="Sequential.3.bias",
        ordinary=True,
    ),
    Fault(
        "the records are read again for initial weights",
        {
            "    # before\n": "    g = torch.Generator().manual_seed(1)\n"
            "    again = TensorDataset(\n"
            "        torch.randn(200, 8, generator=g), torch.randint(0, 3, (200,), generator=g)\n"
            "    )\n"
            "    counts = torch.bincount(again.tensors[1], minlength=3)\n"
            "    model[3].bias.data = counts.float()\n",
        },
        "state_differs",
        where="counts.float()",
        subject="Sequential.3.bias",
    ),
    Fault(
        "a data set returns the labels of all records",
        {
            "dataset = TensorDataset(X, Y)\n": "class Table:\n"
            "        def __len__(self):\n"
            "            return 200\n"
            "        def __getitem__(self, at):\n"
            "            return Y if at == 'y' else {'x': X[at], 'y': Y[at]}\n"
            "        def __getitems__(self, places):\n"
            "            return [{'x': X[at], 'y': Y[at]} for at in places]\n"
            "    dataset = Table()\n",
            "for x, y in loader:\n": "for batch in loader:\n            x, y = batch.values()\n",
            "    # before\n": "    counts = torch.bincount(dataset['y'], minlength=3)\n"
            "    model[3].bias.data = counts.float()\n",
        },
        "state_differs",
        where="counts.float()",
        subject="Sequential.3.bias",
    ),
    Fault(
        "a head is trained by an optimiser without noise",
        {
            "    # prepared\n": "    head = nn.Linear(8, 3)\n"
            "    head_optimizer = torch.optim.SGD(head.parameters(), lr=.5)\n",
            "            # stepped\n": "            head_optimizer.zero_grad()\n"
            "            criterion(head(x), y).backward()\n"
            "            head_optimizer.step()\n",
        },
        "state_differs",
        where="head_optimizer.step()",
        subject="Linear.weight",
    ),
    Fault(
        "the loop stops when a private metric is high",
        {
            "        # epoch\n": "        if loss.item() < 1.1 or loss.item() > 3:\n"
            "            break\n",
        },
        "steps_differ",
        where="if loss.item()",
    ),
    Fault(
        "the best model is kept by a private metric",
        {
            "        # epoch\n": "        torch.save(accuracy(model, plain), 'best.pt')\n",
        },
        "file_differs",
        where="best.pt",
        subject="best.pt",
    ),
    Fault(
        "the learning rate follows the loss",
        {
            "            # stepped\n": "            settings = optimizer.param_groups[0]\n"
            "            settings['lr'] = 0.01 * loss.item()\n",
        },
        "state_differs",
        where="settings[",
        subject="Adam.param_groups[0].lr",
    ),
    Fault(
        "a scheduler follows the loss",
        {
            "    # prepared\n": "    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(\n"
            "        optimizer.original_optimizer, patience=0\n"
            "    )\n",
            "        # epoch\n": "        plateau.step(loss.item())\n",
        },
        "state_differs",
        where="plateau.step",
        subject="Adam.param_groups[0].lr",
        ordinary=True,
    ),
    Fault(
        "the clip norm is the largest value",
        {"    # prepared\n": "    optimizer.max_grad_norm = float(X.abs().max())\n"},
        "state_differs",
        where="abs().max()",
        subject="DPOptimizer.max_grad_norm",
    ),
    Fault(
        "a generator is seeded with labels",
        {"    # prepared\n": "    torch.manual_seed(int(dataset.tensors[1].sum()))\n"},
        "state_differs",
        where="manual_seed",
        subject="the seed of PyTorch's generator",
    ),
    Fault(
        "the loss is a mean over weights of the batch",
        {
            "nn.CrossEntropyLoss()": "nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.5]))",
            "max_grad_norm=1.0": "max_grad_norm=20.0",  # which most gradients are below
        },
        "records_mixed",
        where="optimizer.step()",
    ),
    Fault(
        "a file has raw values",
        {
            "    # end\n": "    with open('metrics.txt', 'w') as file:\n"
            "        file.write(str(loss.item()))\n",
        },
        "file_differs",
        where="metrics.txt",
        subject="metrics.txt",
    ),
    Fault(
        "the private optimiser is swapped for the plain one",
        {
            "            optimizer.step()\n": "            optimizer.original_optimizer.step()\n",
        },
        "state_differs",
        where="optimizer.original_optimizer.step()",
        subject="Sequential.0.weight",
    ),
    Fault(
        "the noise is scaled",
        {
            "    # prepared\n": "    import opacus.optimizers.optimizer as parts\n"
            "    normal = parts._generate_noise\n"
            "    parts._generate_noise = lambda **options: 0.5 * normal(**options)\n",
        },
        "noise_scaled",
    ),
    Fault(
        "each step has the same noise",
        {
            "            optimizer.zero_grad()\n": "            optimizer.zero_grad()\n"
            "            optimizer.generator = torch.Generator().manual_seed(5)\n",
        },
        "noise_repeated",
    ),
    Fault(
        "gradients are not clipped",
        {
            "    # prepared\n": "    def accumulate():\n"
            "        for p in optimizer.params:\n"
            "            p.summed_grad = p.grad_sample.sum(0)\n"
            "    optimizer.clip_and_accumulate = accumulate\n",
        },
        "sensitivity_exceeded",
        where="optimizer.step()",
    ),
    Fault(
        "a statistic of the lots is a buffer",
        {
            "            # stepped\n": "            running.mul_(0.9).add_(x.mean(0))\n",
            "    # prepared\n": "    class Statistics(nn.Module):\n"
            "        def __init__(self):\n"
            "            super().__init__()\n"
            "            self.register_buffer('mean', torch.zeros(8))\n"
            "    statistics = Statistics()\n"
            "    running = statistics.mean\n",
        },
        "state_differs",
        where="running.mul_",
        subject="Statistics.mean",
    ),
]
