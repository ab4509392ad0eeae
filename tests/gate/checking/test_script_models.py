"""Models that a private call trains: made of listed layers and of code of the script alone."""

from __future__ import annotations

import pytest

from affidavit.importers.scripts import importer
from tests.gate.checking.script_codes import is_stopped

KERAS = """\
import foo
import tensorflow as tf
from collections import OrderedDict
from functools import partial
from tensorflow.keras import layers
from tensorflow.keras.layers import BatchNormalization as Norm
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras import DPKerasSGDOptimizer
(x, y), _ = tf.keras.datasets.cifar10.load_data()
{model}
# affidavit: adjacency=zero_out dataset_size=50000 target_delta=1e-5
optimizer = DPKerasSGDOptimizer(
    l2_norm_clip=1.0, noise_multiplier=1.1, num_microbatches=50, learning_rate=0.1)
model.compile(optimizer=optimizer, loss=tf.keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction=tf.keras.losses.Reduction.NONE))
model.fit(x, y, epochs=1, batch_size=50)
"""
TORCH = """\
import foo, torch, torchvision
import torch.nn.functional as F
from collections import OrderedDict
from functools import partial
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn
from torchvision import datasets, transforms
{model}
train = datasets.MNIST("data", train=True, transform=transforms.ToTensor())
loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
# affidavit: adjacency=zero_out target_delta=1e-5
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
for epoch in range(3):
    for x, t in loader:
        optimizer.zero_grad()
        criterion(model(x), t).backward()
        optimizer.step()
"""
NET = """\
class Net(nn.Module):
    def __init__(self, act=F.relu, *parts):
        super().__init__()
        self.part = {part}
        self.fc = nn.Linear(784, 10)
    def forward(self, x):
        x = {forward}
        return self.fc(x)
model = {made}
"""


def of_keras(*layers: str) -> str:
    """A script whose model is a sequence of these layers."""
    return KERAS.format(model=f"model = tf.keras.Sequential([{', '.join(layers)}])")


def of_net(part: str, forward: str = "self.part(x)", made: str = "Net()", top: str = "") -> str:
    """A script whose model is a class of its own with a part."""
    return TORCH.format(model=top + NET.format(part=part, forward=forward, made=made))


@pytest.mark.parametrize(
    "layer",
    [
        "layers.Dense(3, activation=tf.nn.relu)", "layers.Softmax(axis=-1)",
        "layers.TimeDistributed(layers.Dense(3))", "*[layers.Dense(n) for n in (3, 4)]",
        "layers.Activation(lambda z: tf.nn.relu(z))", "layers.Dense(foo.WIDTH)",
        "{'a': layers.Flatten, 'b': layers.ReLU}['b']()", "partial(layers.Dense, 3)()",
    ],
)  # fmt: skip
def test_listed_layers_of_keras_are_no_question(layer: str) -> None:
    assert not is_stopped(of_keras(layer))


@pytest.mark.parametrize(
    "layer",
    [
        "foo.Layer()", "layers.TimeDistributed(foo.Layer())", "*foo.parts()", "layers.Unlisted()",
        "layers.Dense(3, activation=foo.act)", "layers.Dense(3, foo.act)",
        "layers.Dense(3, **{'activation': foo.act})", "layers.Dense(*(3, foo.act))",
        "layers.Activation(lambda z: z - tf.reduce_mean(z, 0))", "layers.Lambda(lambda z: z)",
        "layers.Dense(3, activity_regularizer='l2')", "layers.LSTM(3, stateful=True)",
        "layers.deserialize({'class_name': 'BatchNormalization'})", "getattr(layers, foo.name)()",
        "layers.Softmax(axis=-2)", "tf.keras.models.load_model('a')",
        "(tf.keras.applications.VGG16 if foo.a else tf.keras.applications.ResNet50)()",
        "{'a': foo.Layer}['a']()", "(lambda: foo.Layer())()", "partial(foo.Layer, 3)()",
    ],
)  # fmt: skip
def test_other_layers_of_keras_are_asked_about(layer: str) -> None:
    assert is_stopped(of_keras("layers.Flatten()", layer))


@pytest.mark.parametrize(
    "layer",
    [
        "Norm()", "{'a': Norm}['a']()", "partial(Norm, momentum=0.9)()", "(lambda: Norm())()",
        "layers.TimeDistributed(Norm())", "*map(lambda n: Norm(), range(3))",
        "layers.Concatenate(axis=0)", "layers.LayerNormalization(axis=[0, 1])",
    ],
)  # fmt: skip
def test_layers_of_keras_that_join_records_are_named_whatever_they_are_called(layer: str) -> None:
    partial = importer.read(of_keras(layer).encode())
    assert partial is not None
    assert "joined_records" in {item.code for item in partial.broken}


@pytest.mark.parametrize(
    "model",
    [
        "model = tf.keras.Sequential()\nmodel.add(layer=foo.Layer())",
        "parts = []\nparts.append(foo.Layer())\nmodel = tf.keras.Sequential(parts)",
        "parts = [layers.Flatten()] + [foo.Layer()]\nmodel = tf.keras.Sequential(layers=parts)",
        "parts = [layers.Flatten()]\nparts[0] = foo.Layer()\nmodel = tf.keras.Sequential(parts)",
        "def parts():\n    yield foo.Layer()\nmodel = tf.keras.Sequential([*parts()])",
        "def block(x, norm):\n    return norm()(x)\ni = layers.Input((3,))\n"
        "model = tf.keras.Model(i, block(i, Norm))",
        "class Own(layers.Layer):\n    def __init__(self, inner):\n        super().__init__()\n"
        "        self.inner = inner\n    def call(self, x):\n        return self.inner(x)\n"
        "model = tf.keras.Sequential([Own(Norm())])",
        "class Own(tf.keras.Sequential):\n    def __init__(self):\n"
        "        super().__init__([layers.Flatten(), foo.Layer()])\nmodel = Own()",
        "model = tf.keras.Sequential([layers.Dense(9)])\nmodel.layers[0].activation = foo.act",
        "model = tf.keras.models.clone_model(tf.keras.Sequential(), clone_function=foo.swap)",
    ],
)
def test_layers_are_followed_to_where_a_model_of_keras_gets_them(model: str) -> None:
    assert is_stopped(KERAS.format(model=model))


@pytest.mark.parametrize(
    "script",
    [
        of_net("nn.Sequential(nn.Linear(784, 784), nn.ReLU())"), of_net("F.gelu"), of_net("act"),
        of_net("nn.ModuleList([nn.Linear(9, 9)])", "[one(x) for one in self.part][0]"),
        of_net("{'a': F.relu, 'b': torch.tanh}['a']"), of_net("nn.Dropout(foo.RATE)"),
        of_net("foo.get_settings()", "F.relu(x) if self.part.relu else x"),
        TORCH.format(model="model = torchvision.models.resnet18(num_classes=10)\n"
                     "model.fc = nn.Linear(model.fc.in_features, 10)\n"
                     "model = ModuleValidator.fix(model).to('cpu')"),
        TORCH.format(model="model = torchvision.models.resnet18(\n"
                     "    norm_layer=lambda c: nn.GroupNorm(8, c))"),
        TORCH.format(model="model = nn.Sequential(OrderedDict([('a', nn.Linear(784, 10))]))"),
        TORCH.format(model="made = {'a': lambda: nn.Linear(784, 10)}\nmodel = made['a']()"),
    ],
)  # fmt: skip
def test_models_of_listed_layers_are_no_question(script: str) -> None:
    assert not is_stopped(script)


@pytest.mark.parametrize(
    "script",
    [
        of_net("foo.Block()"), of_net("foo.act"), of_net("act", made="Net(foo.act)"),
        of_net("nn.Sequential(nn.ReLU(), foo.Block())"), of_net("[foo.Block()]", "self.part[0](x)"),
        of_net("nn.Sequential(*parts)", made="Net(F.relu, nn.ReLU(), foo.Block())"),
        of_net("lambda z: z - z.mean(0)"), of_net("torch.mean"), of_net("F.relu", made="foo.N()"),
        of_net("center", top="def center(z):\n    return z - z.mean(0)\n"),
        of_net("nn.Embedding(9, 9, max_norm=1.0)"), of_net("nn.Softmax(dim=-2)"),
        of_net("[nn.BatchNorm1d(784)]", "self.part[0](x)"),
        of_net("dict(a=Norm(784))", "self.part['a'](x)",
               top="from torch.nn import BatchNorm1d as Norm\n"),
        of_net("3", "Norm(784)(x)", top="from torch.nn import BatchNorm1d as Norm\n"),
        *(TORCH.format(model=made) for made in (
            "model = nn.DataParallel(foo.Net())",
            "def fixed(m):\n    return ModuleValidator.fix(m)\nmodel = fixed(foo.Net())",
            "model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\nmodel[1] = foo.Head()",
            "model = torchvision.models.vgg11()\nsetattr(model, 'classifier', foo.Head())",
            "model = torchvision.models.resnet18(norm_layer=foo.norm)",
            "model = nn.Sequential(OrderedDict([('a', nn.Flatten()), ('b', foo.Head())]))",
            "parts = OrderedDict()\nparts['a'] = foo.Head()\nmodel = nn.Sequential(parts)",
            "class Net(torchvision.models.ResNet):\n    def __init__(self):\n"
            "        super().__init__(foo.Block, [2, 2])\nmodel = Net()",
            "class Holder:\n    net = nn.Sequential(foo.Net())\nmodel = Holder.net",
            "from .net import Net\nmodel = Net()",
            "@foo.wrapped\ndef made():\n    return nn.Linear(784, 10)\nmodel = made()",
            "model = nn.Linear(784, 10)\nmodel.apply(foo.change)",
        )),
    ],
)  # fmt: skip
def test_parts_of_models_that_are_not_read_are_asked_about(script: str) -> None:
    assert is_stopped(script)
