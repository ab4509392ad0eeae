"""A loop of Opacus, and the faults that tests/trainer/loop plants in loops of the trainer.

The trainer stops there, so the faults stand here in a loop that runs on.
"""

from tests.replay.faults import Fault

STRAYING = """\
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from opacus import PrivacyEngine


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        # made

    def forward(self, x):
        # inputs
        h = torch.tanh(self.first(x))
        h = self.second(h)
        # between
        return self.last(torch.tanh(h)).squeeze(1)


def losses_of(z, y):
    # targets
    losses = (z - y).square()
    # losses
    return losses


def main():
    generator = torch.Generator().manual_seed(1)
    X, Y = torch.randn(80, 3, generator=generator), torch.randn(80, generator=generator)
    loader = DataLoader(TensorDataset(X, Y), batch_size=16)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.1,
        max_grad_norm=1.0,
    )
    # prepared
    for step, (x, y) in enumerate(batch for _ in range(3) for batch in loader):
        optimizer.zero_grad()
        # begun
        loss = losses_of(private(x), y).mean()
        loss.backward()
        # ready
        optimizer.step()
        # stepped


main()
"""

MADE, INPUTS, BETWEEN = "        # made\n", "        # inputs\n", "        # between\n"
TARGETS, LOSSES, PREPARED = "    # targets\n", "    # losses\n", "    # prepared\n"
BEGUN, READY, STEPPED = "        # begun\n", "        # ready\n", "        # stepped\n"


def mixing(name: str, place: str, line: str) -> Fault:
    """A line by which records of a batch change the gradients of others."""
    indent = len(place) - len(place.lstrip())
    texts = {place: " " * indent + line.replace("\n", "\n" + " " * indent) + "\n"}
    return Fault(name, texts, "records_mixed", "optimizer.step()")


def changing(name: str, where: str, subject: str, texts: dict[str, str]) -> Fault:
    """Lines that change a tensor by records."""
    return Fault(name, texts, "state_differs", where, subject)


def outside(name: str, module: str, term: str, subject: str) -> Fault:
    """A ``module`` outside of the model that a ``term`` of the losses trains without noise."""
    return changing(f"outside: {name}", "other.step()", subject, {
        PREPARED: f"    made = {module}\n"
        "    other = torch.optim.SGD(made.parameters(), lr=0.1)\n",
        LOSS: f"(losses_of(z := private(x), y) + {term}).mean()",
        STEPPED: "        other.step()\n",
    })  # fmt: skip


LOSS = "losses_of(private(x), y).mean()"
HEAD = "head = nn.Linear(1, 1)\n    other = torch.optim.SGD(head.parameters(), lr=0.1)\n"
STRAYING_FAULTS = [
    # test_straying_loops, TERMS
    mixing("term: mean", LOSSES, "losses = losses + 0.5 * (z - z.mean()).square()"),
    mixing("term: detached mean", LOSSES, "losses = (z - z.detach().mean() - y).square()"),
    mixing("term: maximum", LOSSES, "losses = (z / z.abs().max() - y).square()"),
    mixing("term: sorted", LOSSES, "losses = (z.sort().values - y).square()"),
    mixing("term: softmax", LOSSES, "losses = 20 * (z.softmax(0) - y).square()"),
    mixing("term: cumulative", LOSSES, "losses = (z.cumsum(0) - y).square()"),
    mixing("term: rolled", LOSSES, "losses = (z + z.roll(1) - y).square()"),
    mixing("term: contrast", LOSSES, "losses = -(z[:, None] @ z[None]).log_softmax(1).diagonal()"),
    mixing("term: batch norm", LOSSES,
        "z = functional.batch_norm(z[:, None], None, None, training=True)[:, 0]\n"
        "losses = (z - y).square()"),
    mixing("term: shared weight", LOSSES, "losses = losses / (1 + losses.detach().sum())"),
    mixing("term: number of records", LOSSES, "losses = losses / len(z) / 4"),
    mixing("term: place", LOSSES, "losses = losses * torch.linspace(-1, 1, len(z))"),
    mixing("term: mean of labels now and then", TARGETS,
        "y = 0.7 * y + 0.3 * y.flip(0) if torch.rand(()) < 0.5 else y"),
    # test_straying_loops, FOREIGN
    outside("head", "nn.Linear(1, 1)", "made(z[:, None]).squeeze(1)", "Linear.weight"),
    outside("discriminator", "nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))",
        "functional.softplus(made(z[:, None]).squeeze(1))", "Sequential.0.weight"),
    outside("convolution", "nn.Conv1d(1, 1, 1)", "made(z[:, None, None]).flatten()",
        "Conv1d.weight"),
    outside("table", "nn.Embedding(2, 1)", "made((z > 0).long()).squeeze(1) * z",
        "Embedding.weight"),
    outside("prototypes", "nn.ParameterList([nn.Parameter(torch.ones(2))])",
        "z * made[0].sum()", "ParameterList.0"),
    # test_changing_loops, IN_VALUES
    mixing("value: number", TARGETS, "z = 0.1 * z / float(z.detach().abs().mean())"),
    mixing("value: clamped", TARGETS, "z = z.clamp(max=float(z.detach().mean()))"),
    mixing("value: temperature", LOSSES, "losses = 9 * functional.softplus(z * float(y.std()))"),
    mixing("value: rolled targets", TARGETS, "y = y.roll(1)"),
    mixing("value: sorted inputs", INPUTS, "x = x.sort(0).values"),
    mixing("value: whitened inputs", INPUTS, "x = (x - x.mean(0)) / x.std(0)"),
    mixing("value: first record", INPUTS, "x = x - x[:1]"),
    mixing("value: neighbours", INPUTS, "x = x[torch.cdist(x, x).argsort()[:, :2]].mean(1)"),
    Fault("value: queue", {
        MADE: "        self.queue = torch.zeros(3)\n",
        BETWEEN: "        h, self.queue = h + self.queue.mean(), h.detach().mean(0)\n",
    }, "record_outside_lot", "optimizer.step()"),
    mixing("value: hook of an activation", BETWEEN, "h.register_hook(lambda g: g - g.mean(0))"),
    mixing("value: hook of a layer's output", MADE,
        "self.second.register_forward_hook(\n"
        "    lambda m, i, o: o.register_hook(lambda g: g - g.mean(0)) and None)"),
    mixing("value: norm of all gradients", BETWEEN, "h.register_hook(lambda g: g / g.norm())"),
    mixing("value: hook of the losses", LOSSES,
        "losses.register_hook(lambda g: g * losses.detach().mean())"),
    mixing("value: backward of its own", BETWEEN, "h.register_hook(lambda g: g.flip(0))"),
    mixing("value: smoothed", TARGETS, "y = 0.9 * y + 0.1 * y.mean()"),
    Fault("value: ranked", {
        LOSSES: "    losses = losses * losses.detach().argsort().argsort()\n",
    }, "records_mixed", "optimizer.step()", ordinary=True),
    mixing("value: mined", LOSSES,
        "losses = losses * (losses.detach() > losses.detach().median())"),
    mixing("value: gated", BETWEEN, "h = h - 0.5 * h.mean(0)"),
    # test_straying_loops and test_strange_loops, models
    mixing("model: centring", BETWEEN, "h = h - h.mean(0)"),
    mixing("model: share", INPUTS, "x = 0.7 * x + 0.3 * x.flip(0)"),
    mixing("model: softmax over records", BETWEEN, "h = 20 * h.softmax(0)"),
    mixing("model: an outlier's branch", INPUTS,
        "x = x / x.abs().max() if x.abs().max() > 50 else x"),
    Fault("model: a mean in no buffer", {
        MADE: "        self.mean = torch.zeros(6)\n",
        BETWEEN: "        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)\n"
        "        h = h - self.mean\n",
    }, "sensitivity_exceeded", "optimizer.step()"),
    Fault("model: a mean of the first batch", {
        BETWEEN: "        if not hasattr(self, 'start'):\n"
        "            self.start = h.detach().mean(0)\n"
        "        h = h - self.start\n",
    }, "sensitivity_exceeded", "optimizer.step()"),
    mixing("model: more rows of one record", BETWEEN,
        "h = h[(torch.arange(len(h)) - (x[:, 0] > 1).long()).clamp(min=0)]"),
    mixing("model: rows that a mask picks", INPUTS,
        "mask = torch.zeros(len(x), 3, dtype=torch.bool)\n"
        "mask[:, 0] = True\n"
        "mask[0, 1], mask[-1, 0] = x[0, 0] > 0, x[0, 0] <= 0\n"
        "x = x[:, :, None].expand(-1, -1, 3)[mask]"),
    Fault("model: centring before a parameter of its own", {
        MADE: "        self.scale = nn.Parameter(torch.ones(6))\n",
        BETWEEN: "        h = (h - h.mean(0)) * self.scale\n",
    }, "records_mixed", "optimizer.step()"),
    Fault("model: time before records", {
        INPUTS: "        x = x[:, :, None].expand(-1, -1, 3).transpose(0, 1)\n",
        ".squeeze(1)\n\n\ndef losses": ".mean((0, 2))\n\n\ndef losses",
    }, "sensitivity_exceeded", "optimizer.step()"),
    Fault("model: both of a pair are clipped", {
        LOSS: "sum(losses_of(z, y).mean() for z in private(torch.cat([x, -x])).chunk(2))",
    }, "sensitivity_exceeded", "optimizer.step()"),
    Fault("loop: a layer that normalises later", {
        STEPPED: "        if step == 1:\n"
        "            norm = nn.BatchNorm1d(6, affine=False, track_running_stats=False)\n"
        "            model.second = nn.Sequential(model.second, norm)\n",
    }, "records_mixed", "optimizer.step()"),
    changing("loop: frozen statistics that thaw", "h = self.norm(h)", "Net.norm.running_mean", {
        MADE: "        self.norm = nn.BatchNorm1d(6, affine=False).eval()\n",
        BETWEEN: "        h = self.norm(h)\n",
        STEPPED: "        model.norm.train()\n",
    }),
    Fault("model: records in one row", {
        INPUTS: "        x = x[None]\n",
        ".squeeze(1)\n\n\ndef losses": ".flatten()\n\n\ndef losses",
    }, "sensitivity_exceeded", "optimizer.step()"),
    mixing("model: mixup", INPUTS, "x = (x + x[torch.randperm(len(x))]) / 2"),
    mixing("model: coupled gradients", LOSSES,
        "losses.register_hook(lambda g: 0.01 * g * losses.detach().sum())"),
    mixing("model: labels at random", TARGETS, "y = 0.7 * y + 0.3 * y[torch.randperm(len(y))]"),
    mixing("loop: mixup of the batch", BEGUN, "x, y = (x + x.flip(0)) / 2, (y + y.flip(0)) / 2"),
    mixing("loop: mixup in place", BEGUN, "x.copy_(x.flip(0) + x)"),
    Fault("loop: a term of the batch beside", {
        LOSS:
        "losses_of(z := private(x), y).mean() + 100 * z.var()",
    }, "sensitivity_exceeded", "optimizer.step()"),
    Fault("loop: a hook that compares records", {
        STEPPED: "        if step == 1:\n"
        "            model.second.register_forward_hook(lambda _, i, h: h - h.mean(0))\n",
    }, "sensitivity_exceeded", "optimizer.step()"),
    Fault("loop: padding that a loss sees", {
        "TensorDataset(X, Y), batch_size=16)": "rows, batch_size=16, collate_fn=padded)",
        "    loader =": "    rows = [(X[i, :1].repeat(1 + i % 7, 3), Y[i]) for i in range(80)]\n"
        "    loader =",
        "def main():": "def padded(items):\n"
        "    x, y = zip(*items)\n"
        "    return nn.utils.rnn.pad_sequence(x, batch_first=True), torch.stack(y)\n\n\n"
        "def main():",
        ".squeeze(1)\n\n\ndef losses": ".mean((1, 2))\n\n\ndef losses",
    }, "records_mixed", "optimizer.step()"),
    Fault("loop: rows cut to the shortest record", {
        "TensorDataset(X, Y), batch_size=16)": "rows, batch_size=16, collate_fn=cut)",
        "    loader =": "    rows = [\n"
        "        (torch.randn(1 + i % 7, 3, generator=generator), Y[i]) for i in range(80)\n"
        "    ]\n"
        "    loader =",
        "def main():": "def cut(items):\n"
        "    x, y = zip(*items)\n"
        "    shortest = min(map(len, x))\n"
        "    return torch.stack([item[:shortest] for item in x]), torch.stack(y)\n\n\n"
        "def main():",
        ".squeeze(1)\n\n\ndef losses": ".sum((1, 2))\n\n\ndef losses",
    }, "records_mixed", "optimizer.step()"),
    Fault("loop: a collate_fn that mixes", {
        "batch_size=16)": "batch_size=16, collate_fn=blended)",
        "def main():": "def blended(items):\n"
        "    x, y = map(torch.stack, zip(*items))\n"
        "    return (x + x[torch.randperm(len(x))]) / 2, y\n\n\n"
        "def main():",
    }, "records_mixed", "optimizer.step()"),
    # test_private_loop
    Fault("loop: a record's gradient twice", {
        BEGUN: "        x, y = torch.cat([x, x]), torch.cat([y, y])\n",
    }, "sensitivity_exceeded", "optimizer.step()"),
    changing("loop: a loss that the run does not know", "plain.step()", "Net.first.weight", {
        PREPARED: "    plain = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        STEPPED: "        for item in model.parameters():\n"
        "            item.grad = item.grad_sample[0].clone() if step else item.grad\n"
        "        plain.step()\n",
    }),
    # tensors outside of the model, and weights that are written
    changing("tensor: a head outside of the model", "other.step()", "Linear.weight", {
        PREPARED: f"    {HEAD}",
        STEPPED: "        other.zero_grad()\n"
        "        losses_of(head(x[:, :1]).squeeze(1), y).mean().backward()\n"
        "        other.step()\n",
    }),
    changing("tensor: an uncertainty", "other.step()", "SGD.tensor 1", {
        PREPARED: "    scale = nn.Parameter(torch.zeros(()))\n"
        "    other = torch.optim.SGD([scale], lr=0.1)\n",
        ".mean()\n        loss": ".mean() * scale.exp()\n        loss",
        STEPPED: "        other.step()\n",
    }),
    changing("weights: written before the step", "add_(x.mean())", "Net.first.bias", {
        READY: "        model.first.bias.data.add_(x.mean())\n",
    }),
    changing("weights: clamped by records", "clamp_(-float", "Net.first.weight", {
        STEPPED: "        model.first.weight.data.clamp_(-float(x.abs().min()), 9)\n",
    }),
    changing("weights: an optimiser beside", "beside.step()", "Net.first.weight", {
        STEPPED: "        beside = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "        for item in model.parameters():\n"
        "            item.grad = item.grad_sample.mean(0)\n"
        "        beside.step()\n",
    }),
    changing("weights: a hook after the step", "float(X.sum())", "Net.first.weight", {
        PREPARED: "    def write(*_):\n"
        "        model.first.weight.data.add_(float(X.sum()))\n"
        "    optimizer.original_optimizer.register_step_post_hook(write)\n",
    }),
    changing("weights: a hook of all optimisers", "float(X.sum())", "Net.first.weight", {
        PREPARED: "    def write(*_):\n"
        "        model.first.weight.data.add_(float(X.sum()))\n"
        "    register_optimizer_step_post_hook(write)\n",
        "import torch\nfrom": "import torch\n"
        "from torch.optim.optimizer import register_optimizer_step_post_hook\nfrom",
    }),
    changing("weights: a hook before the step", "float(X.sum())", "Net.first.weight", {
        PREPARED: "    def write(*_):\n"
        "        model.first.weight.grad.add_(float(X.sum()))\n"
        "    optimizer.original_optimizer.register_step_pre_hook(write)\n",
    }),
    changing("statistics: of records, for evaluation", "self.mean.mul_", "Net.mean", {
        MADE: "        self.register_buffer('mean', torch.zeros(3), persistent=False)\n",
        INPUTS: "        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))\n",
    }),
]  # fmt: skip

HONEST: dict[str, dict[str, str]] = {
    "as it is": {},
    "a parameter of its own": {
        MADE: "        self.scale = nn.Parameter(torch.ones(6))\n",
        BETWEEN: "        h = h * self.scale\n",
    },
    "two losses of a batch": {LOSS: f"{LOSS} + {LOSS}"},
}

STOPPED: dict[str, dict[str, str]] = {
    "batch norm": {
        MADE: "        self.norm = nn.BatchNorm1d(6)\n",
        BETWEEN: "        h = self.norm(h)\n",
    },
    "spectral norm": {
        MADE: "        self.second = nn.utils.parametrizations.spectral_norm(self.second)\n",
    },
    "a layer is made trainable": {
        "    engine =": "    model.first.requires_grad_(False)\n    engine =",
        STEPPED: "        model.first.requires_grad_(True)\n",
    },
    "another head": {
        STEPPED: "        if step == 0:\n"
        "            model.last = nn.Linear(6, 1)\n"
        "            optimizer.add_param_group({'params': list(model.last.parameters())})\n",
    },
    "a step without a loss": {READY: "        optimizer.zero_grad()\n"},
    "a step more": {STEPPED: "        optimizer.step()\n"},
}
"""Faults of tests/trainer/loop with which Opacus stops by itself."""
