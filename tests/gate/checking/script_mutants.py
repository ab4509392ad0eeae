"""Sound training scripts, edits that make each spend more or release records, and harmless ones.

Each edit is a place of the script and the lines that are put there, with names drawn at random: an
analysis that knows names, places or forms alone meets others with a new seed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from random import Random

# ruff: noqa: E501

SCRIPT = """\
import argparse
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
# affidavit: adjacency=zero_out target_epsilon=9
{top}
{model_class}
def learn(some, {m}, {o}, {l}, {e}):
    for {x}, {y} in {l}:
        {o}.zero_grad()
        {each}
        {t} = {c}({m}({x}), {y})
        {t}.backward()
        {o}.step()
        {step}
    print({e}.get_epsilon(1e-5))
def main():
    {start}
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    some = parser.parse_args()
    {d} = datasets.{data}("files", train=True, transform=transforms.ToTensor())
    {h} = datasets.{data}("files", train=False, transform=transforms.ToTensor())
    {l} = DataLoader({d}, batch_size={lot})
    {v} = DataLoader({h}, batch_size=500)
    {m} = {maker}
    {o} = torch.optim.{rule}({m}.parameters(), lr=0.1)
    {before}
    {e} = PrivacyEngine()
    {m}, {o}, {l} = {e}.make_private(
        module={m}, optimizer={o}, data_loader={l}, noise_multiplier={sigma}, max_grad_norm=1.0)
    {after}
    for {i} in range(some.rounds):
        learn(some, {m}, {o}, {l}, {e})
        {turn}
    {end}
if __name__ == "__main__":
    main()
"""
MODEL = """\
class {k}(nn.Module):
    def __init__(self):
        super().__init__()
        self.{p} = nn.Linear(784, 32)
        self.{q} = nn.Linear(32, 10)
    def forward(self, {x}):
        {z} = F.relu(self.{p}({x}.flatten(1)))
        {layer}
        return self.{q}({z})
"""
PLACES = ("top", "each", "step", "start", "before", "after", "turn", "end", "layer")
NAMES = {
    "m": "model net classifier f student", "o": "optimizer opt solver lr_scheduler sgd",
    "l": "loader train_loader lots stream scheduler", "e": "engine accountant privacy",
    "x": "x image inputs batch", "y": "y label target classes", "t": "loss cost objective",
    "d": "data train_set records", "h": "held test_set other", "v": "val_loader check tests",
    "i": "epoch turn r", "k": "Net Model Digits", "p": "first fc1 body", "q": "last fc2 head",
    "z": "h hidden z", "a": "spare again second", "b": "best top_score record", "n": "count hits s",
}  # fmt: skip

SPENDS = (
    # Another object, or another name, in another scope.
    ("after", "def {a}():\n    nonlocal {o}\n    {o} = torch.optim.SGD({m}.parameters(), lr=1.0)\n{a}()"),
    ("after", "def {a}():\n    nonlocal {l}\n    {l} = DataLoader({d}, batch_size={lot})\n{a}()"),
    ("after", "{o} = torch.optim.Adam({m}.parameters())"),
    ("after", "{l} = DataLoader({d}, batch_size={lot})"),
    ("after", "{o} = {o}.original_optimizer"),
    ("after", "def {a}(*_):\n    for {x}, {y} in {l}:\n        {o}.step()\n{a}()"),
    # More steps, or steps by another.
    ("before", "{a} = torch.optim.SGD({m}.parameters(), lr=0.5)\nfor {x}, {y} in {l}:\n"
     "    F.cross_entropy({m}({x}), {y}).backward()\n    {a}.step()"),
    ("turn", "{a} = torch.optim.SGD({m}.parameters(), lr=0.5)\nfor {x}, {y} in {l}:\n"
     "    F.cross_entropy({m}({x}), {y}).backward()\n    {a}.step()"),
    ("step", "for {a} in {m}.parameters():\n    {a}.data -= 0.1 * {a}.grad_sample.mean(0)"),
    ("step", "{o}.step()"),
    ("turn", "learn(some, {m}, {o}, {l}, {e})"),
    ("turn", "[learn(some, {m}, {o}, {l}, {e}) for {a} in range(5)]"),
    ("turn", "list(map(lambda {a}: learn(some, {m}, {o}, {l}, {e}), range(5)))"),
    ("after", "import threading\nthreading.Thread(target=learn, args=(some, {m}, {o}, {l}, {e})).start()"),
    ("after", "from {pkg} import tune\ntune({m}, {o}, {l})"),
    ("after", "from {pkg} import tune\ntune(dict(a={m}, b=[{o}, {l}]))"),
    ("before", "import skorch\n{a} = skorch.NeuralNetClassifier({m})\n{a}.fit({d}.data, {d}.targets)"),
    ("before", "from sklearn.linear_model import LogisticRegression\n"
     "{a} = LogisticRegression().fit({d}.data, {d}.targets)\n"
     "{m}.{q}.weight.data = torch.tensor({a}.coef_)"),
    # Weights and what is saved from records.
    ("before", "{m}.{q}.bias.data = torch.bincount({d}.targets).float().log()"),
    ("before", "with torch.no_grad():\n    {m}.{q}.bias.copy_(torch.bincount({d}.targets).float())"),
    ("before", "{a} = datasets.{data}('files', train=True)\n"
     "{m}.{q}.bias.data.add_(torch.bincount({a}.targets))"),
    ("end", "torch.save(({m}.state_dict(), {d}.targets), 'all.pt')"),
    ("end", "{a} = [{m}({x}) for {x}, {y} in {l}]\ntorch.save({a}, 'outputs.pt')"),
    ("before", "setattr({m}, 'scale', {d}.data.float().std())"),
    # What records decide.
    ("step", "if {t} < 0.2:\n    return"),
    ("step", "if float({t}) > 9:\n    raise SystemExit"),
    ("step", "{o}.param_groups[0]['lr'] = 0.1 * float({t})"),
    ("turn", "{n} = 0\nfor {x}, {y} in {l}:\n    {n} += ({m}({x}).argmax(1) == {y}).sum().item()\n"
     "if {n} > 50000:\n    break"),
    ("turn", "{n} = sum(({m}({x}).argmax(1) == {y}).sum() for {x}, {y} in {l})\n"
     "if {n} > 50000:\n    torch.save({m}.state_dict(), 'best.pt')"),
    ("turn", "{a} = DataLoader(torch.utils.data.Subset({d}, range(900)), batch_size=90)\n{n} = 0\n"
     "for {x}, {y} in {a}:\n    {n} += F.cross_entropy({m}({x}), {y}).item()\n"
     "if {n} < 9:\n    torch.save({m}.state_dict(), 'best.pt')"),
    # Gradients of several records.
    ("layer", "{z} = {z} - {z}.mean(0)"), ("layer", "{z} = {z} / {z}.norm()"),
    ("layer", "{z} = {z} + {z}.flip(0)"), ("layer", "{z} = torch.softmax({z}, 0)"),
    ("each", "{x} = ({x} - {x}.mean()) / {x}.std()"), ("each", "{x} = {x} + {x}[torch.randperm(len({x}))]"),
    ("each", "{x} = torch.cat([{x}, {x}])[: len({x}) // 2]"),
    # What hides.
    ("after", "globals()['learn'] = print"), ("start", "exec(open('more.py').read())"),
    ("after", "for {a} in ('noise_' + 'multiplier',):\n    setattr({o}, {a}, 0.01)"),
    ("after", "vars({o})['noise' + '_multiplier'] = 0.01"),
    ("after", "{o}.__dict__.update(noise_multiplier=0.01)"),
    ("after", "{a} = {o}\n{a}.noise_multiplier = 0.01"),
    ("after", "{e}.accountant.history.clear()"), ("after", "{m}.register_forward_hook(print)"),
    # Ways to an object by none of its names.
    ("after", "match {o}:\n    case {a}:\n        {a}.expected_batch_size = 1"),
    ("after", "import gc\nfor {a} in gc.get_objects():\n    if isinstance({a}, torch.optim.Optimizer):\n        {a}.expected_batch_size = 1"),
    ("after", "import sys\nsys._getframe().f_locals['{o}'].expected_batch_size = 1"),
    ("after", "import __main__\n__main__.learn = print"), ("after", "{l}.batch_sampler.steps = 9999"),
    ("after", "{a} = [] + [{o}]\n{a}[0].expected_batch_size = 1"),
    ("after", "def {a}(some={o}):\n    some.expected_batch_size = 1\n{a}()"),
    ("after", "def {a}(*some):\n    some[0].expected_batch_size = 1\n{a}({o})"),
    ("after", "class Carry(Exception):\n    pass\ntry:\n    raise Carry({o})\nexcept Carry as {a}:\n    {a}.args[0].expected_batch_size = 1"),
    ("after", "from {pkg} import {o}"), ("start", "torch.manual_seed(3)"),
    ("end", "import subprocess\nsubprocess.run(['python', 'more.py'])"),
    # Records that are kept for others, repeated or written.
    ("before", "{a} = []\n{d}.transform = lambda {x}: {a}.append({x}) or {x} + {a}[0]"),
    ("before", "class Keeps:\n    last = 0\n    def __call__(self, {x}):\n        {x}, self.last = {x} + self.last, {x}\n        return {x}\n{d}.transform = Keeps()"),
    ("before", "{d}.data.sub_({d}.data[0])"), ("layer", "{z} = nn.Flatten(0)({z}).view(-1, 32)"),
    ("before", "{l} = DataLoader(torch.utils.data.Subset({d}, list(range(100)) * 600), batch_size={lot})"),
    ("each", "def {a}(some):\n    some -= some.mean(0)\n{a}({x})"),
    ("end", "open('labels.txt', 'w').write(str({d}.targets.tolist()))"),
    ("end", "import json\njson.dump({d}.targets.tolist(), open('labels.json', 'w'))"),
    ("step", "try:\n    1 / (float({t}) > 0.1)\nexcept ZeroDivisionError:\n    return"),
    ("turn", "{b} = {{}}\n{b}[sum(({m}({x}).argmax(1) == {y}).sum() for {x}, {y} in {l})] = {m}.state_dict()\ntorch.save({b}[max({b})], 'best.pt')"),
    # Rows that move, or meet along an axis that only looks like another.
    ("layer", "{z} = {z} - {z}.mean(-2)"), ("layer", "{z} = torch.softmax({z}, -2)"),
    ("layer", "{z} = {z} - {z}.unsqueeze(0).mean(1)"), ("layer", "{z} = {z} - {z}[None, :].mean(1)"),
    ("layer", "{z} = {z} - {z}[..., 0, :]"), ("layer", "{z} = F.layer_norm({z}, {z}.shape)"),
    ("layer", "{z} = F.layer_norm({z}, ({z}.shape[0], 32))"), ("layer", "{z} = nn.LayerNorm({z}.shape)({z})"),
    ("layer", "{z} = {z} + F.pad({z}, (0, 0, 1, -1))"), ("layer", "{z} = nn.BatchNorm1d(32)({z})"),
    ("layer", "{z} = F.avg_pool2d({z}.unsqueeze(0), 3, 1, 1).squeeze(0)"), ("layer", "{a}, *_ = {z}\n{z} = {z} + {a}"),
    ("layer", "{z} = nn.LocalResponseNorm(2)({z}.unsqueeze(0)).squeeze(0)"), ("layer", "{z} = {z}.norm(2) + {z}"),
    ("each", "{x} = {x} - {x}.mean((-4, 2, 3), keepdim=True)"), ("layer", "{z} = F.normalize({z}, 2, 0)"),
    ("layer", "{z} = {z} * len(set({z}.flatten().tolist()))"), ("layer", "{z} = nn.Sequential(nn.BatchNorm1d(32))({z})"),
    ("layer", "self.layers = [nn.BatchNorm1d(32)]\n{z} = self.layers[0]({z})"), ("layer", "{z}[1:] += {z}[:-1].clone()"),
    ("step", "with torch.no_grad():\n    for {a} in {m}.parameters():\n        {a} += {x}.mean()"),
    ("layer", "{z} = {z} + self.shift\n{z} = {z} - {z}.mean(0)"), ("layer", "{z} = {z}.view(len({z}) // 2, -1)"),
    ("layer", "{z} = {z} + {z}.view(-1, len({z})).mean(1, keepdim=True)"),
    ("layer", "{a}, {n} = {z}.shape\n{z} = {z}.view({n}, -1)\n{z} = ({z} - {z}.mean(1, keepdim=True)).view({a}, {n})"),
    ("layer", "{z} = F.softmax({z}.unsqueeze(1), 0).squeeze(1)"), ("layer", "{z} = {z} @ {z}.transpose(-1, -2) @ {z}"),
    # Seeds, generators and what may replace code.
    ("start", "import zlib\ntorch.manual_seed(zlib.crc32(b'run'))"), ("start", "list(map(torch.manual_seed, [3]))"),
    ("start", "for {a} in (1, 2):\n    torch.manual_seed({a})"), ("start", "{a} = torch.manual_seed\n{a}(3)"),
    ("start", "from functools import partial\npartial(torch.manual_seed, 3)()"), ("turn", "torch.manual_seed({i})"),
    ("start", "import random\nrandom.seed(0)\ntorch.manual_seed(random.randint(0, 9999))"),
    ("each", "torch.manual_seed({y}.sum())"), ("start", "torch.manual_seed(torch.initial_seed() * 0)"),
    ("each", "{a} = torch.random.fork_rng()\n{a}.__enter__()"), ("top", "from {pkg} import *"),
    ("top", "import builtins\nbuiltins.range = lambda {a}: [0] * 100"), ("after", "import os\nos.fork()"),
    ("before", "torch.nn.modules.module.register_module_forward_hook(print)"), ("top", "from {pkg} import PrivacyEngine"),
    ("start", "import sys\nsys.argv[1:] = ['--rounds', '40']"), ("top", "from {pkg} import nn"),
    ("start", "argparse.ArgumentParser.parse_args = print"), ("top", "from {pkg} import datasets"),
    ("after", "{m}.forward = lambda {x}: {x}.mean(0)"), ("after", "{m}.{q} = nn.Linear(32, 10)"),
    ("after", "{m}.loss_reduction = 'sum'"), ("before", "{m} = torch.load('m.pt')"),
    ("after", "[0 for {o}.max_grad_norm in (100.0,)]"), ("after", "for {o}.max_grad_norm in (100.0,):\n    pass"),
    ("after", "from dataclasses import dataclass\n@dataclass\nclass Box:\n    o: object\n{a} = Box({o})\n{a}.o.max_grad_norm = 7"),
    # What records choose, and records that leave by what they are made of.
    ("step", "{{True: exit, False: int}}[bool({t} < 0.1)]()"), ("step", "(exit if {t} < 0.1 else int)()"),
    ("step", "[0][int({t} < 0.1)]"), ("step", "1 / ({t}.item() > 0.1)"), ("step", "{o}.defaults['lr'] = float({t})"),
    ("before", "torch.cumsum({d}.data, 0, out={d}.data)"), ("before", "import numpy as np\nnp.random.shuffle({d}.data.numpy())"),
    ("before", "{l} = DataLoader(torch.utils.data.Subset({d}, [{i} for {i} in range(60000) if {d}.targets[{i}] == {d}.targets[0]]), batch_size={lot})"),
    ("end", "{d}.data.numpy().tofile('x')"), ("end", "print({d}.targets.tolist(), file=open('x', 'w'))"),
    ("end", "import pandas\npandas.DataFrame({d}.targets).to_csv('x.csv')"), ("end", "{d}.data.save('x')"),
    ("end", "import h5py\nh5py.File('x', 'w')['a'] = {d}.data.numpy()"),
    ("end", "{a} = str({d}.targets.tolist())\nopen('x', 'w').write({a})"),
    ("end", "{a} = ','.join(str(int({y})) for {y} in {d}.targets)\nopen('x', 'w').write({a})"),
    ("end", "import sys\nsys.stdout.buffer.write({d}.data.numpy().tobytes())"),
    ("end", "import matplotlib.pyplot as plt\nplt.imshow({d}.data[0])\nplt.savefig('x.png')"),
    # What is written and read again, and files of the records.
    ("step", "open('x', 'w').write(str(float({t})))\nif float(open('x').read()) < 0.1:\n    return"),
    ("step", "import json, os\njson.dump(float({t}), open('x', 'w'))\nif os.path.getsize('x') > 4:\n    return"),
    ("step", "import wandb\nwandb.log(dict(t={t}))\nif wandb.run.summary['t'] < 0.1:\n    return"),
    ("step", "list(filter(lambda {a}: {a} < 0.1 and exit(), [float({t})]))"),
    ("turn", "for {a} in range(int(float(sum({m}({x}).sum() for {x}, {y} in {l})) > 0)):\n    torch.save({m}.state_dict(), 'best.pt')"),
    ("end", "import shutil\nshutil.copytree('files', 'x')"), ("end", "import boto3\nboto3.client('s3').upload_file('files/MNIST/raw/x', 'b', 'k')"),
    ("end", "from pathlib import Path\nPath('x').write_bytes(Path('files/MNIST/raw/x').read_bytes())"),
    # Lists whose length records decide, and code that takes or keeps other records.
    ("step", "{a} = []\nif {t} < 0.2:\n    {a}.append(1)\nif {a}:\n    return"),
    ("step", "{a} = [1]\n{b} = {a}\nif {t} < 0.2:\n    {b}.append(1)\nif len({a}) > 1:\n    return"),
    ("step", "{a} = [1]\nif {t} < 0.2:\n    del {a}[0]\nif not {a}:\n    return"),
    ("step", "{a} = []\ndef {b}(some):\n    if {t} < 0.2:\n        some.append(1)\n{b}({a})\nif {a}:\n    return"),
    ("step", "{a} = []\nfor {b} in [1] * int({t} < 0.2):\n    {a}.append(1)\nif len({a}) > 0:\n    return"),
    ("end", "{a} = {{}}\nif not {a}:\n    torch.save({d}.targets, 'x')"),
    ("step", "if {y}[{y} > 5].squeeze().dim() > 0:\n    return"),
    ("before", "def {a}({x}, some=[]):\n    some.append({x})\n    return some[0]\n{d}.transform = {a}"),
    ("before", "{d}.set_transform(lambda {x}: {x} + {x}.transpose(0, 1))"),
    ("before", "{d}.set_transform(lambda {x}: torch.roll({x}, 1))"),
    ("before", "class Own:\n    def __init__(self, {x}):\n        self.X = {x}\n    def __getitem__(self, {i}):\n        return self.X[{i} - 1] + self.X[{i}]\n{l} = DataLoader(Own({d}), batch_size={lot})"),
    ("before", "class Own:\n    def __init__(self, {x}):\n        self.X = {x}\n    def __getitem__(self, {i}):\n        {i} = 0\n        return self.X[{i}]\n{l} = DataLoader(Own({d}), batch_size={lot})"),
    ("before", "import matplotlib.pyplot as plt\n{a}, {b} = plt.subplots()\n{m}.{q}.bias.data.copy_(torch.tensor({b}.hist({d}.targets)[0]))"),
)  # fmt: skip
HARMLESS = (
    ("step", "print({i_}float({t}), {x}.shape)"), ("each", "{x}, {y} = {x}.to('cpu'), {y}.to('cpu')"),
    ("each", "{x} = {x}.float() / 1.0"), ("step", "# a comment"), ("turn", "{m}.eval()"),
    ("before", "print(sum({a}.numel() for {a} in {m}.parameters()))"),
    ("top", "import logging\nlogging.basicConfig(level=20)"), ("start", "torch.manual_seed(torch.seed())"),
    ("turn", "print({i}, len({l}), len({d}))"), ("end", "torch.save({m}.state_dict(), 'm.pt')"),
    ("turn", "torch.save({m}.state_dict(), f'{{{i}}}.pt')"),
    ("turn", "{n} = 0\nfor {x}, {y} in {v}:\n    {n} += ({m}({x}).argmax(1) == {y}).sum().item()\n"
     "print({n})"),
    ("turn", "{n} = 0\nfor {x}, {y} in {v}:\n    {n} += ({m}({x}).argmax(1) == {y}).sum().item()\n"
     "if {n} > 9000:\n    torch.save({m}.state_dict(), 'best.pt')"),
    ("turn", "import wandb\nwandb.log({{'epsilon': {e}.get_epsilon(1e-5), 'turn': {i}}})"),
    ("before", "{a} = torch.optim.lr_scheduler.StepLR({o}, 2)"),
    ("top", "from typing import Any\nWIDTH: int = 3"), ("layer", "{z} = F.dropout({z}, 0.2)"),
    ("layer", "{z} = torch.tanh({z})"), ("layer", "{z} = {z}.unsqueeze(1).transpose(1, 2).squeeze(2)"), ("layer", "assert {z}.shape[1] == 32"),
    ("before", "{m} = {m}.to('cpu')"), ("before", "nn.init.kaiming_normal_({m}.{q}.weight)"),
    ("end", "print(vars(some))"), ("top", "def describe(text: str) -> str:\n    return text.title()"),
    ("start", "import os\nos.makedirs('out', exist_ok=True)"), ("turn", "import gc\ngc.collect()"),
    ("start", "{a} = torch.Generator().manual_seed(0)\nprint(torch.randperm(9, generator={a}))"),
    ("top", "import subprocess\nREVISION = subprocess.run(['git', 'rev-parse', 'HEAD'])"),
    ("before", "import copy\n{a} = copy.deepcopy({m}).state_dict()\n{m}.load_state_dict({a})"),
    ("before", "def weights({a}):\n    if isinstance({a}, nn.Linear):\n        {a}.bias.data.fill_(0.1)\n{m}.apply(weights)"),
    ("layer", "{z} = F.layer_norm({z}, ({z}.shape[-1],))"), ("layer", "{z} = {z}.unsqueeze(1).mean(-1) + {z}"),
    ("top", "import os, random\ntorch.manual_seed(int.from_bytes(os.urandom(4), 'big'))\nrandom.seed(0)"),
    ("end", "open('log.txt', 'w').write(f'{{some.rounds}} {{len({d})}} {{{e}.get_epsilon(1e-5)}}')"),
    ("turn", "import json\nwith open('log.json', 'w') as file:\n    json.dump({{'turn': {i}}}, file)"),
    ("start", "import os\nif not os.path.exists('files'):\n    os.makedirs('files')"),
    ("step", "{a} = {{{n}.upper(): {z} for {n}, {z} in vars(some).items()}}\nprint({a})"),
    ("step", "{a} = []\n{a}.append(float({t}))\nif len({a}) > 3:\n    print({a}[-3:])"),
    ("end", "import matplotlib.pyplot as plt\n{a}, {b} = plt.subplots(1, 2)\n{b}[0].plot([1, 2])\nplt.show()"),
    ("before", "{d}.transform = lambda {x}: {x} / 255.0"),
)  # fmt: skip


def _filled(random: Random, place: str, lines: str) -> str:
    names = {key: random.choice(options.split()) for key, options in NAMES.items()}
    while len(set(names.values())) < len(names):
        names = {key: random.choice(options.split()) for key, options in NAMES.items()}
    names |= {
        "data": random.choice(("MNIST", "FashionMNIST", "KMNIST")), "rule": random.choice(("SGD", "Adam")),
        "lot": str(random.choice((200, 300, 500))), "sigma": str(random.choice((1.0, 1.2, 1.5))),
        "c": "F.cross_entropy", "maker": f"{names['k']}()", "pkg": random.choice(("tools", "ignite")),
        "i_": "", "model_class": "{model_class}",
    }  # fmt: skip
    places = dict.fromkeys(PLACES, "pass") | {place: lines.format(**names)}
    text = SCRIPT.replace("{model_class}\n", MODEL)
    for name in PLACES:
        line = next(line for line in text.splitlines() if line.strip() == f"{{{name}}}")
        indent = line[: len(line) - len(line.lstrip())]
        body = textwrap.indent(places[name], indent).replace("{", "{{").replace("}", "}}")
        text = text.replace(f"{line}\n", f"{body}\n", 1)
    return text.format(**names)


def mutants(random: Random, number: int) -> Iterator[str]:
    """Yield scripts that spend more than they say, or release records, by kinds in random order."""
    kinds = random.sample(SPENDS, len(SPENDS))
    for index in range(number):
        yield _filled(random, *kinds[index % len(SPENDS)])


def harmless(random: Random, number: int) -> Iterator[str]:
    """Yield scripts whose edit spends nothing."""
    for index in range(number):
        yield _filled(random, *HARMLESS[index % len(HARMLESS)])
