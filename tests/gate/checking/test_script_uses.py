"""A script is certified only if every use of its private objects is one that is understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan

SOUND = """\
import os
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
# affidavit: adjacency=zero_out target_epsilon=5
SIGMA, LOT, ROUNDS = 1.2, 300, 8
{top}
class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(784, 64)
        self.last = nn.Linear(64, 10)
    def forward(self, image):
        hidden = F.relu(self.first(image.flatten(1)))
        {layer}
        return self.last(hidden)
def run():
    images = datasets.MNIST("files", train=True, transform=transforms.ToTensor())
    held_out = datasets.MNIST("files", train=False, transform=transforms.ToTensor())
    digits, others = DataLoader(images, batch_size=LOT), DataLoader(held_out, batch_size=500)
    net = Digits()
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    measure = nn.CrossEntropyLoss()
    {before}
    engine = PrivacyEngine()
    net, opt, digits = engine.make_private(
        module=net, optimizer=opt, data_loader=digits,
        noise_multiplier=SIGMA, max_grad_norm=1.0)
    {after}
    best = 0
    for turn in range(ROUNDS):
        for image, label in digits:
            opt.zero_grad()
            {loss}
            loss.backward()
            opt.step()
            {step}
        {turn}
    print(engine.get_epsilon(1e-5))
    {end}
run()
"""
EMPTY = dict.fromkeys(("top", "layer", "before", "after", "step", "turn", "end"), "pass")
LOSS = "loss = measure(net(image), label)"


def _script(**parts: str) -> str:
    """The sound script with statements at some of its places, each on one line or several."""
    text = SOUND
    for name, part in (EMPTY | {"loss": LOSS} | parts).items():
        line = next(line for line in text.splitlines() if line.strip() == f"{{{name}}}")
        indent = line[: len(line) - len(line.lstrip())]
        text = text.replace(line, "\n".join(indent + item for item in part.splitlines()))
    return text


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _blocking(text: str, **files: str) -> set[str]:
    """The codes of what keeps a script from being certified, none if nothing does."""
    for name, content in files.items():
        Path(name.replace("__", ".")).write_text(content)
    try:
        partial = importer.read(text.encode(), Path(), name="train.py")
    except MalformedPlan as error:
        return {reason.code for reason in error.reasons}
    assert partial is not None
    codes = {item.code for item in partial.broken if item.adjacencies is None}
    return codes | ({"open_use"} if partial.open_uses else set())


COUNTED = "right = 0\nfor image, label in {}:\n    right += (net(image).argmax(1) == label).sum()\n"
CHOSEN = "if right > best:\n    best = right\n    torch.save(net.state_dict(), 'best.pt')"
HARMLESS = {
    "as it is": {},
    "a layer": {"layer": "hidden = F.dropout(torch.tanh(hidden), 0.1)"},
    "a schedule by any name": {
        "after": "slower = torch.optim.lr_scheduler.StepLR(opt, 2)",
        "turn": "slower.step()",
    },
    "raw values that are only printed": {"step": "print(turn, float(loss), image.shape)"},
    "a public choice": {"turn": COUNTED.format("others") + CHOSEN},
    "what is counted of the records and printed": {
        "turn": COUNTED.format("digits") + "print(right / len(digits.dataset))"
    },
    "a setting of torch's": {
        "before": "quick = ROUNDS > 3\ntorch.backends.cuda.matmul.allow_tf32 = quick"
    },
    "initial weights": {"before": "nn.init.xavier_uniform_(net.first.weight)"},
    "weights that are saved": {"end": "torch.save(net.state_dict(), 'net.pt')"},
    "weights of classes in a sum": {
        "before": "measure = nn.CrossEntropyLoss(torch.tensor([1.0] * 9 + [3.5]), reduction='sum')"
    },
    "a function of its own by the name of a builtin": {
        "top": "def eval(net):\n    return net.eval()",
        "end": "eval(net)",
    },
    "a curve that is shown, and a saved one of numbers that are public": {
        "end": "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.savefig('x.png')"
    },
    "an accuracy on all records": {
        "end": "print((net(images.data).argmax(dim=1) == images.targets).float().mean())"
    },
    "a fixed part of a public set": {
        "before": "others = DataLoader(torch.utils.data.Subset(held_out, list(range(900))))",
        "turn": COUNTED.format("others") + CHOSEN,
    },
    "a seed of a generator that draws no noise": {
        "before": "import tensorflow as tf\ntf.random.set_seed(0)"
    },
    "weights of answers": {"before": "measure = nn.BCEWithLogitsLoss(pos_weight=torch.ones(1))"},
    "a curve of losses that is shown, and how many they are": {
        "before": "import matplotlib.pyplot as plt\nlosses = []\nfigure, axes = plt.subplots(1, 2)",
        "step": "losses.append(loss.item())",
        "end": "if 'net' in locals():\n    axes[0].plot(losses)\nif losses:\n    plt.show()",
    },
    "code for one record": {
        "top": "def flat(image):\n    return transforms.ToTensor()(image).view(-1)",
        "before": "images.transform = flat\nheld_out.transform = lambda image: image / 255.0",
    },
}


@pytest.mark.parametrize("parts", HARMLESS.values(), ids=HARMLESS)
def test_understood_uses_leave_nothing_open(parts: dict[str, str]) -> None:
    assert _blocking(_script(**parts)) == set()


OPEN = {
    "a schedule that is an optimiser": {
        "before": "lr_schedule = torch.optim.SGD(net.parameters(), lr=1.0)",
        "step": "lr_schedule.step()",
    },
    "a choice by a split of the records": {
        "before": "split, rest = torch.utils.data.random_split(images, [50000, 10000])\n"
        "digits, check = DataLoader(split, batch_size=LOT), DataLoader(rest, batch_size=500)",
        "turn": COUNTED.format("check") + CHOSEN,
    },
    "a stop by the loss": {"step": "if loss.item() < 0.1:\n    return"},
    "a rate by the loss": {"step": "opt.param_groups[0]['lr'] = loss.item()"},
    "the optimiser in another scope": {
        "after": "def change():\n    nonlocal opt\n    opt = torch.optim.SGD(net.parameters(), 1)\n"
        "change()"
    },
    "the loader in another scope": {
        "after": "def change():\n    nonlocal digits\n    digits = DataLoader(images, 300)\n"
        "change()"
    },
    "a trainer of another package": {
        "after": "from ignite.engine import create_supervised_trainer\n"
        "create_supervised_trainer(net, opt, measure).run(digits, max_epochs=90)"
    },
    "training before": {
        "before": "import skorch\nother = skorch.NeuralNetClassifier(net)\n"
        "other.fit(images.data, images.targets)"
    },
    "a range test of the rate": {
        "after": "from torch_lr_finder import LRFinder\n"
        "LRFinder(net, opt, measure).range_test(digits)"
    },
    "a temperature": {
        "end": "scale = nn.Parameter(torch.ones(1))\nother = torch.optim.LBFGS([scale])\n"
        "def fit():\n    total = sum(measure(net(a) / scale, b) for a, b in digits)\n"
        "    total.backward()\n    return total\nother.step(fit)\ntorch.save(scale, 'scale.pt')"
    },
    "a bias of labels": {"before": "net.last.bias.data = torch.bincount(images.targets).float()"},
    "weights by a method": {"before": "net.last.bias.data.copy_(images.targets[:10])"},
    "a pair of records in a loss": {"loss": "loss = (net(image) - net(image.flip(0))).mean()"},
    "the whole lot in a layer": {"layer": "hidden = hidden - hidden.mean(0)"},
    "records that are saved": {"end": "torch.save(images.targets, 'labels.pt')"},
    "gradients elsewhere": {"turn": "measure(net(image), label).backward()"},
    "a second step in a turn": {"step": "opt.step()"},
    "an alias of the step": {"after": "go = opt.step", "step": "go()"},
    "weights of classes in a mean": {
        "before": "measure = nn.CrossEntropyLoss(torch.tensor([1.0] * 9 + [3.5]))"
    },
    "weights of classes in a function": {
        "loss": "loss = F.cross_entropy(net(image), label, weight=torch.arange(10.0))"
    },
    "a class that a mean leaves out": {"before": "measure = nn.NLLLoss(ignore_index=3)"},
    "targets that means leave out": {"loss": "label[0] = -100\n" + LOSS},
    "another thread": {
        "after": "import threading\ndef more():\n    for image, label in digits:\n"
        "        opt.step()\nthreading.Thread(target=more).start()"
    },
    "text that runs by another name": {
        "top": "import builtins\ndef eval(text):\n    return builtins.eval(text)",
        "after": "eval('opt.step()')",
    },
    "a picture of a record": {
        "end": "import matplotlib.pyplot as plt\nfor row in images.data:\n    plt.plot(row)\n"
        "plt.gcf().savefig('x.png')"
    },
    "text that runs": {"after": "exec(open('more.py').read())"},
    "a namespace": {"after": "globals()['digits'] = DataLoader(images, batch_size=LOT)"},
    "any attribute": {"after": "for name in ('scale', 'x'):\n    setattr(opt, name, 1)"},
    "the state of a dictionary": {"after": "vars(opt)['expected_batch_size'] = 1"},
    "a list that records make longer": {
        "step": "hits = []\nsame = hits\nif loss < 0.2:\n    same.append(1)\n"
        "if len(hits) > 0:\n    return"
    },
    "a list that records make shorter": {
        "step": "hits = [1]\nif loss < 0.2:\n    del hits[0]\nif not hits:\n    return"
    },
    "turns that records decide": {
        "step": "for hit in [1] * int(loss < 0.2):\n    torch.save(net.state_dict(), 'best.pt')"
    },
    "whether one record is left": {"step": "if label[label > 5].squeeze().dim():\n    return"},
    "what an empty dictionary hides": {
        "end": "seen = {}\nif not seen:\n    torch.save(images.targets, 'labels.pt')"
    },
    "a transform that keeps a record": {
        "top": "def shift(image, seen=[]):\n    seen.append(image)\n    return seen[0]",
        "before": "images.transform = shift",
    },
    "a data set that takes another record": {
        "before": "class Own:\n    def __init__(self, rows):\n        self.rows = rows\n"
        "    def __getitem__(self, at):\n        return self.rows[at - 1] + self.rows[at]\n"
        "digits = DataLoader(Own(images), batch_size=LOT)"
    },
    "counts that a picture gives": {
        "before": "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\n"
        "net.last.bias.data.copy_(torch.tensor(axes.hist(images.targets)[0]))"
    },
}


@pytest.mark.parametrize("parts", OPEN.values(), ids=OPEN)
def test_another_use_is_never_certified(parts: dict[str, str]) -> None:
    assert _blocking(_script(**parts))


def test_what_follows_a_use_that_is_asked_about_is_not_asked_about_again() -> None:
    scaled = (
        "from sklearn.preprocessing import StandardScaler\nscaler = StandardScaler()\n"
        "rows = torch.tensor(scaler.fit_transform(images.data))\n"
        "digits = DataLoader(torch.utils.data.TensorDataset(rows, images.targets), batch_size=LOT)"
    )
    partial = importer.read(_script(before=scaled).encode(), Path(), name="train.py")
    assert partial is not None
    (use,) = partial.open_uses
    assert "fit_transform of the records" in use.message


def test_an_open_use_is_asked_about_at_its_line_until_that_line_is_answered(
    checked: Any, run: Any
) -> None:
    text = _script(top="from warming import warm_up", after="warm_up(net)")
    Path("warming.py").write_text("def warm_up(net): print(net)\n")
    line = next(i for i, item in enumerate(text.splitlines(), 1) if "warm_up(net)" in item)
    Path("train.py").write_text(text)
    code, document = checked("train.py")
    (finding,) = [item for item in document["plans"][0]["findings"] if item["blocks"]]
    assert (code, finding["rule"], finding["line"]) == (3, "open_use", line)
    assert document["plans"][0]["result"]["verdict"] == "undecided"
    answer = "  # affidavit: harmless=prints_shapes"
    Path("train.py").write_text(text.replace("warm_up(net)", f"warm_up(net){answer}"))
    result = run("check", "train.py", "--format", "markdown")
    assert result.exit_code == 0
    assert "prints" in result.stdout  # what is assumed stands in the comment
    above = text.replace("    warm_up(net)", f"  {answer}\n    warm_up(net)")
    assert _blocking(above) == set()
    assert _blocking(text.replace("opt.step()", f"opt.step(){answer}")) == {"open_use"}


HELPERS = {
    "def start(net):\n    from torchvision import datasets\n    import torch\n"
    "    data = datasets.MNIST('files', train=True)\n"
    "    net.last.bias.data = torch.bincount(data.targets).float()\n": "start(net)",
    "import torch\nclass Warm(torch.nn.Module):\n    def __init__(self, data):\n"
    "        super().__init__()\n        self.last = torch.nn.Linear(784, 10)\n"
    "        self.last.bias.data = torch.bincount(data.targets).float().log()\n"
    "    def forward(self, image):\n        return self.last(image.flatten(1))\n":
    "net = Warm(images)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)",
    "import pandas\ndef scale():\n    return pandas.read_csv('records.csv').x.mean()\n":
    "size = scale()\nnet.last.weight.data.mul_(size)",
}  # fmt: skip


@pytest.mark.parametrize(("helper", "use"), HELPERS.items(), ids=["function", "class", "number"])
def test_weights_from_records_in_another_file_are_not_certified(helper: str, use: str) -> None:
    name = use.partition("(")[0].split()[-1]
    text = _script(top=f"from helpers import {name}", before=use)
    assert _blocking(text, helpers__py=helper) == {"open_use"}


@pytest.mark.parametrize("choice", ["pass", "if right > 3:\n    return"])
def test_records_of_another_file_are_asked_about_with_all_that_it_returns(choice: str) -> None:
    """It may fit a scaler, and the loader that it returns beside may be of held-out records."""
    helper = "def loaders(): ...\n"
    before = "digits, check, num_classes = loaders()  # affidavit: lot_size=300"
    text = _script(
        top="from helpers import loaders",
        before=f"{before}\nnet.last = nn.Linear(64, num_classes)",
        turn=COUNTED.format("check") + choice,
    ).replace("target_epsilon", "dataset_size=60000 target_epsilon")
    assert _blocking(text, helpers__py=helper) == {"open_use"}
    answered = text.replace("lot_size=300", "lot_size=300 harmless=no_scaler")
    assert _blocking(answered, helpers__py=helper) == ({"open_use"} if choice != "pass" else set())


@pytest.mark.parametrize(
    ("read", "name"),
    [("from helpers import rows", "rows"), ("import helpers", "helpers.rows")],
)
def test_records_that_another_file_has_made_are_asked_about(read: str, name: str) -> None:
    text = _script(top=read).replace("target_epsilon", "dataset_size=60000 target_epsilon")
    text = text.replace("DataLoader(images", f"DataLoader({name}")
    assert _blocking(text, helpers__py="rows = ...\n") == {"open_use"}
    answered = text.replace(read, f"{read}  # affidavit: harmless=no_scaler")
    assert _blocking(answered, helpers__py="rows = ...\n") == set()


def test_a_variable_of_the_environment_is_not_at_its_default() -> None:
    default = "noise_multiplier=float(os.environ.get('NOISE', 1.2))"
    assert _blocking(_script().replace("noise_multiplier=SIGMA", default))


KERAS = """\
import tensorflow as tf
from tensorflow_privacy import DPKerasSGDOptimizer
# affidavit: adjacency=zero_out dataset_size=50000 target_delta=1e-5 target_epsilon=60
(a, b), (c, d) = tf.keras.datasets.cifar10.load_data()
net = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
opt = DPKerasSGDOptimizer(
    l2_norm_clip=1.0, noise_multiplier=1.4, num_microbatches=100, learning_rate=0.1)
loss = tf.keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction=tf.losses.Reduction.NONE)
net.compile(optimizer=opt, loss=loss)
"""
FIT = "net.fit(a, b, epochs=10, batch_size=100, validation_data=(c, d))\n"
OWN_STEP = """\
class Own(tf.keras.Model):
    def train_step(self, data):
        for weight in self.trainable_variables:
            weight.assign_sub(weight * 0.1)
"""


@pytest.mark.parametrize(
    ("more", "open_use"),
    [
        ("", False),
        ("net.optimizer = tf.keras.optimizers.Adam()\n", True),
        ("class Swap(tf.keras.callbacks.Callback):\n    def on_epoch_begin(self, epoch, logs):\n"
         "        self.model.optimizer = tf.keras.optimizers.SGD()\n", True),
        (OWN_STEP, True),
        ("if FLAGS:\n    loss = tf.keras.losses.Huber()\n"
         "net.compile(optimizer=opt, loss=loss)\n", False),
        ("if FLAGS:\n    loss = lambda a, b: tf.reduce_max(a - b)\n"
         "net.compile(optimizer=opt, loss=loss)\n", True),
        ("import shutil\nshutil.copy('~/.keras/datasets/mnist.npz', 'x.npz')\n", True),
    ],
)  # fmt: skip
def test_keras_trains_with_the_optimiser_that_it_is_compiled_with(
    more: str, open_use: bool
) -> None:
    assert _blocking(KERAS + more + FIT) == ({"open_use"} if open_use else set())


OPTAX = """\
import jax, jax.numpy as jnp, optax, numpy as np, secrets
# affidavit: adjacency=zero_out dataset_size=40000 lot_size=200 scheme=shuffled
# affidavit: target_delta=1e-5 target_epsilon=60
def cost(weights, a, b):
    return optax.softmax_cross_entropy_with_integer_labels(a @ weights["w"], b)
weights = {"w": jax.random.normal(jax.random.PRNGKey(0), (32, 4))}
rule = optax.dpsgd(
    learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=1.6, seed=secrets.randbits(31))
memory = rule.init(weights)
slopes = jax.vmap(jax.grad(cost), in_axes=(None, 0, 0))
A, B = np.load("a.npy"), np.load("b.npy")
for turn in range(12):
    order = np.random.permutation(40000)
    for i in range(40000 // 200):
        chosen = order[i * 200:(i + 1) * 200]
        each = slopes(weights, A[chosen], B[chosen])
        change, memory = rule.update(each, memory, weights)
        weights = optax.apply_updates(weights, change)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("memory = rule.init",
         "rule = optax.MultiSteps(rule, every_k_schedule=4)\nmemory = rule.init"),
        ("weights = optax.apply_updates(weights, change)",
         "weights = jax.tree_util.tree_map(\n"
         "            lambda w, c, g: w + c - g.mean(0), weights, change, each)"),
        ("weights = optax", "change, memory = rule.update(each, memory, weights)\n"
         "        weights = optax"),
        ("secrets.randbits(31)", "int(jax.random.PRNGKey(3)[0])"),
        ("memory = rule.init",
         'rule = optax.multi_transform({"a": rule, "b": optax.sgd(1.0)}, "b")\nmemory = rule.init'),
    ],
)  # fmt: skip
def test_gradients_and_lots_of_optax_are_asked_about(before: str, after: str) -> None:
    assert _blocking(OPTAX) == {"open_use"}
    answer = "  # affidavit: harmless=one_gradient_of_each_record_of_a_lot\n"
    answered = OPTAX.replace("[chosen])\n", f"[chosen]){answer}")
    answered = answered.replace("memory, weights)\n", f"memory, weights){answer}")
    assert _blocking(answered) == set()
    changed = answered.replace(before, after)
    assert changed != answered
    assert "open_use" in _blocking(changed)


def test_a_state_that_is_made_again_in_any_loop_repeats_its_noise() -> None:
    again = OPTAX.replace("    order =", "    memory = rule.init(weights)\n    order =")
    assert "repeated_noise" in _blocking(again)


LIGHTNING = """\
import torch
import torch.nn.functional as F
import pytorch_lightning as pl
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets
# affidavit: adjacency=zero_out target_delta=1e-5 lot_size=256 dataset_size=60000 epochs=6
class Digits(pl.LightningModule):
    def __init__(self, loader):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        self.loader = loader
        self.engine = PrivacyEngine()
    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        return loss
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.1)
        model, opt, loader = self.engine.make_private(
            module=self, optimizer=opt, data_loader=self.loader,
            noise_multiplier=1.3, max_grad_norm=1.0)
        self.lots = loader
        return opt
    def train_dataloader(self):
        return self.lots
data = datasets.MNIST("files", train=True)
digits = Digits(DataLoader(data, batch_size=256))
trainer = pl.Trainer(max_epochs=6, devices=1)
trainer.fit(digits)
trainer.save_checkpoint("digits.ckpt")
"""


def test_the_loop_of_a_trainer_is_asked_about() -> None:
    assert _blocking(LIGHTNING) == {"open_use"}
    answered = LIGHTNING.replace("fit(digits)", "fit(digits)  # affidavit: harmless=plain_loop")
    assert _blocking(answered) == set()


def test_a_stated_lot_that_a_weighted_sampler_contradicts_is_refused() -> None:
    sampler = "torch.utils.data.WeightedRandomSampler(torch.ones(60000), 128)"
    text = _script().replace("batch_size=LOT)", f"batch_size=16, sampler={sampler})")
    stated = text.replace("target_epsilon=5", "target_epsilon=5 dataset_size=60000 lot_size=16")
    assert _blocking(stated) == {"given_conflict"}
    drawn = stated.replace("lot_size=16", "probability=0.125")
    assert "given_conflict" not in _blocking(drawn)
