"""Opacus' MNIST example with two more lines, on scikit-learn's digits instead of MNIST.

    affidavit keys new --label me
    affidavit certify examples/opacus/digits.yaml --out bundle.json
    python examples/opacus/mnist.py --certificate bundle.json --record run
    affidavit conformance --record run/record.jsonl --certificate bundle.json

The two lines are marked. ``--sigma``, ``-c`` and ``--batch-size`` are Opacus' own options; what
does not fit the certificate stops the run before its first release.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from affidavit import guard  # line 1

TRAINED = 1438


class SampleConvNet(nn.Module):
    """Opacus' network, for images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3)
        self.fc1, self.fc2 = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 1, 8, 8) to (n, 10)."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1438 records to train on and 359 to test with."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels)
    return (
        TensorDataset(inputs[:TRAINED], targets[:TRAINED]),
        TensorDataset(inputs[TRAINED:], targets[TRAINED:]),
    )


def batches(loader: Any, count: int) -> Iterator[Any]:
    """``count`` lots, over as many epochs as they take."""
    while count > 0:
        for batch in loader:
            yield batch
            count -= 1
            if not count:
                break


def main() -> None:
    """Train, and print the accuracy and what Opacus accounts for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=64)
    parser.add_argument("-n", "--steps", type=int, default=230)
    parser.add_argument("-r", "--lr", type=float, default=0.5)
    parser.add_argument("--sigma", type=float, default=1.2)
    parser.add_argument("-c", "--max-per-sample-grad-norm", type=float, default=1.0)
    parser.add_argument("--certificate", default="bundle.json")
    parser.add_argument("--record", default="run")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook")

    # affidavit: adjacency=add_remove dataset_size=1438 steps=230 target_epsilon=8
    train, test = digits()
    model = SampleConvNet()
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    train_loader = DataLoader(train, batch_size=args.batch_size)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model, optimizer=optimizer, data_loader=train_loader,
        noise_multiplier=args.sigma, max_grad_norm=args.max_per_sample_grad_norm,
    )  # fmt: skip
    guard.opacus(  # line 2
        privacy_engine, optimizer, train_loader, args.certificate, record=args.record
    )
    for inputs, targets in batches(train_loader, args.steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(test.tensors[0]).argmax(1) == test.tensors[1]
    sys.stdout.write(
        f"accuracy on {len(right)} held-out digits: {right.double().mean():.1%}\n"
        f"Opacus accounts for ε = {privacy_engine.get_epsilon(1e-5):.3f} at δ = 1e-5\n"
    )


if __name__ == "__main__":
    main()
