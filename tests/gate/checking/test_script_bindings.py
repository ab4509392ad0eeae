"""A name has the kinds of the values that may reach it, and no others."""

from __future__ import annotations

import pytest

from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan

SCRIPT = """\
import contextlib
import torch
import torch.nn.functional as F
from elsewhere import Other
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Subset, random_split
from torchvision import datasets, transforms
from opacus import PrivacyEngine
# affidavit: adjacency=zero_out
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(784, 10), nn.Linear(784, 10)
    def forward(self, x):
        x = x.flatten(1)
        return {results}
{top}
train = datasets.MNIST("files", train=True, transform=transforms.ToTensor())
{data}
loader = DataLoader(train, batch_size=300)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = PrivacyEngine()
criterion = nn.CrossEntropyLoss()
{before}
model, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.9, max_grad_norm=1.0)
{after}
for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        one, two = out = model(x)
        {loss}
        loss.backward()
        optimizer.step()
        {step}
    {turn}
"""
PUT = "\n    model.one.weight.data.fill_(w)"
TURN = {
    "one branch": "w = loss.item()\n    if torch.cuda.is_available():\n        w = 1.0" + PUT,
    "a try": "w = loss.item()\n    try:\n        w = float('a')\n    except ValueError:\n"
    "        pass" + PUT,
    "a handler": "w = 0.0\n    try:\n        w = loss.item()\n        float('a')\n"
    "    except ValueError:\n        model.one.weight.data.fill_(w)",
    "a suppressed error": "w = loss.item()\n    with contextlib.suppress(ValueError):\n"
    "        w = float('a')" + PUT,
    "a loop over nothing": "w = loss.item()\n    for w in []:\n        pass" + PUT,
    "an earlier turn": "w = 0.0\n    while w < 1:\n        model.one.weight.data.fill_(w)\n"
    "        w = w + loss.item()",
    "a condition that binds": "w = 0.0\n    if (w := loss.item()):\n        pass" + PUT,
    "the other of a pair": "v = loss.item()\n    v, w = 0.0, v" + PUT,
    "a sum": "w = 0.0\n    w += loss.item()" + PUT,
    "a generator": "w = 0.0\n    later = (w for _ in range(1))\n    w = loss.item()\n"
    "    for v in later:\n        model.one.weight.data.fill_(v)",
    "a class": "class Own:\n        w = loss.item()\n        model.one.weight.data.fill_(w)",
}
SPENDING: dict[str, dict[str, str]] = {
    **{name: {"turn": turn} for name, turn in TURN.items()},
    "a function": {
        "after": "w = 0.0\ndef put():\n    model.one.weight.data.fill_(w)",
        "turn": "w = loss.item()\n    put()\n    w = 0.0",
    },
    "a shared name": {
        "after": "def get():\n    global w\n    w = loss.item()",
        "turn": "w = 0.0\n    get()" + PUT,
    },
    "an earlier lot in an inner loop": {
        "after": "last = 0.0",
        "loss": "for _ in range(1):\n            loss = criterion(one, y) + last",
        "step": "last = loss.detach()",
    },
    "a part of a dictionary by another name": {
        "after": "held = {'a': []}\nb = held['a']", "step": "b.append(loss.item())",
        "turn": "w = held['a'][0]" + PUT,
    },
    "a dictionary in a list": {
        "after": "held = {'a': 0.0}", "step": "for d in [held]:\n            d['a'] = loss.item()",
        "turn": "w = held['a']" + PUT,
    },
    "a dictionary in another": {
        "after": "held = {'a': 0.0}\nd = {'b': held}", "step": "d['b']['a'] = loss.item()",
        "turn": "w = held['a']" + PUT,
    },
    "an entry by a name": {
        "after": "held = {'a': 0.0}\nk = 'a'", "step": "held[k] = loss.item()",
        "turn": "w = held['a']" + PUT,
    },
    "records of a head": {"loss": "loss = sum(F.mse_loss(row, one) for row in one)"},
    "a loss for each record": {"loss": "loss = sum(criterion(one, y) for _ in x)"},
    "a loss for each record of two heads": {
        "loss": "loss = sum(criterion(head, y) for head in (one, two) for _ in y)",
    },
    "a loss for each record of a list": {
        "loss": "loss = sum(criterion(one, y) for _ in [*y])",
    },
    "a loss for each column": {
        "after": "for lot in loader:\n    sum(criterion(model(lot), lot) for _ in lot).backward()",
    },
    "losses of other lots": {"loss": "loss = sum(criterion(model(a)[0], b) for a, b in loader)"},
    "a product of losses": {
        "loss": "loss = 1\n        for head in out:\n            loss = loss * criterion(head, y)",
    },
    "heads that join records": {
        "results": "self.one(x), self.two(x) - self.two(x).mean(0)",
        "loss": "loss = sum(criterion(head, y) for head in out)",
    },
    "one of two classes": {
        "before": "rule = Other if epochs > 3 else torch.optim.SGD\n"
        "optimizer = rule(model.parameters(), lr=0.1)",
    },
    "a table of classes by another name": {
        "before": "rules = {'sgd': torch.optim.SGD}\nothers = rules\nothers['sgd'] = Other\n"
        "optimizer = rules['sgd'](model.parameters(), lr=0.1)",
    },
    "indices that are added twice": {
        "data": "a, b = train_test_split(list(range(60000)))\na.extend(a)\n"
        "train = Subset(train, a)",
    },
    "indices that are added to themselves": {
        "data": "a, b = train_test_split(list(range(60000)))\na += a\ntrain = Subset(train, a)",
    },
    "a list of indices with repeats": {
        "top": "import numpy as np",
        "data": "a = np.random.choice(60000, 60000).tolist()\ntrain = Subset(train, a)",
    },
    "a part of a row that is changed": {
        "loss": "one[0].mul_(one.mean())\n        loss = criterion(one, y)",
    },
    "a product of losses by name": {
        "loss": "held = {'a': criterion(one, y), 'b': criterion(two, y)}\n        loss = 1\n"
        "        for v in held.values():\n            loss = loss * v",
    },
    "the spread of losses": {
        "loss": "loss = torch.stack([criterion(one, y), criterion(two, y)]).std()",
    },
    "a split twice": {
        "data": "parts = random_split(train, [50000, 10000])\n"
        "train = torch.utils.data.ConcatDataset([parts[0], parts[0]])",
    },
    "the generator of the noise": {
        "data": "train, rest = random_split(\n    train, [50000, 10000], "
        "generator=torch.default_generator.manual_seed(0))",
    },
    "an engine of its own": {
        "top": "def make_private(self, **k):\n    return tuple(k.values())[:3]\n"
        "class Own(PrivacyEngine):\n    make_private = make_private",
        "before": "engine = Own()",
    },
}  # fmt: skip
SOUND: dict[str, dict[str, str]] = {
    "names of numbers before": {"top": "x, y = 28, 28\nprint(x * y)\ndata = {'n': x}"},
    "names of numbers after": {"turn": "y = 3\n    optimizer.param_groups[0]['lr'] = 0.1 / y"},
    "a name of another function": {
        "top": "def rate(x, y):\n    loss = x / y\n    return loss\nprint(rate(1, 2))",
    },
    "losses of heads in a loop": {
        "loss": "loss = 0\n        for head in (one, two):\n"
        "            loss = loss + criterion(head, y)",
    },
    "losses of weighted heads": {
        "loss": "loss = 0\n        for head, w in zip((one, two), (1.0, 0.5)):\n"
        "            loss = loss + w * criterion(head, y)",
    },
    "losses of two heads": {"loss": "loss = sum(criterion(head, y) for head in (one, two))"},
    "losses of heads in a sum": {"loss": "loss = sum(criterion(head, y) for head in out)"},
    "losses of heads by name": {
        "loss": "held = {'a': criterion(one, y)}\n        held['b'] = criterion(two, y)\n"
        "        loss = sum(held.values())",
    },
    "losses of heads in a stack": {
        "loss": "loss = torch.stack([criterion(one, y), criterion(two, y)]).mean()",
    },
    "a metric of a few records": {
        "step": "hits = one.topk(5, 1)[1].t().eq(y)\n        share = hits[:5].float().sum()\n"
        "        print(share.mul_(100 / y.size(0)))",
    },
    "halves of an order": {
        "data": "order = torch.randperm(len(train)).tolist()\na, b = order[:9], order[9:]\n"
        "train = Subset(train, a)",
    },
    "settings beside objects": {
        "after": "held = {'lr': 0.1, 'loss': criterion, 'seen': []}",
        "loss": "loss = held['loss'](one, y)",
        "step": "held['seen'].append(loss.item())",
        "turn": "optimizer.param_groups[0]['lr'] = held['lr']",
    },
    "one of two rules": {
        "before": "rule = torch.optim.SGD if epochs > 3 else torch.optim.Adam\n"
        "optimizer = rule(model.parameters(), lr=0.1)",
    },
    "a table of rules": {
        "before": "rules = {'sgd': torch.optim.SGD, 'adam': torch.optim.Adam}\n"
        "optimizer = rules[name](model.parameters(), lr=0.1)",
    },
    "a part of a split": {
        "data": "parts = random_split(\n    train, [50000, 10000], "
        "generator=torch.Generator().manual_seed(0))\ntrain = parts[0]",
    },
    "indices of a split": {
        "data": "a, b = train_test_split(list(range(len(train))))\ntrain = Subset(train, a)",
    },
    "a function of the method's name": {"top": "def make_private(a):\n    return a"},
}  # fmt: skip


def _questions(parts: dict[str, str]) -> list[str]:
    names = ("top", "data", "before", "after", "step", "turn")
    filled = dict.fromkeys(names, "pass") | {"results": "self.one(x), self.two(x)"}
    text = SCRIPT.format(**filled | {"loss": "loss = criterion(one, y)"} | parts)
    try:
        partial = importer.read(text.encode())
    except MalformedPlan as error:
        return [item.message for item in error.reasons]
    assert partial is not None
    faults = [item.message for item in partial.broken if item.adjacencies is None]
    return faults + [item.message for item in partial.open_uses]


@pytest.mark.parametrize("parts", SPENDING.values(), ids=SPENDING)
def test_a_value_of_records_that_may_reach_a_use_is_not_certified(parts: dict[str, str]) -> None:
    assert _questions(parts)


@pytest.mark.parametrize("parts", SOUND.values(), ids=SOUND)
def test_a_name_that_meant_something_else_elsewhere_is_not_asked_about(
    parts: dict[str, str],
) -> None:
    assert not _questions(parts)
