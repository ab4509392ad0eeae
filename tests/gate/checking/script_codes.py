"""What keeps a script from being certified, also a short one that leaves out most of its names."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan

TRAIN = "from torchvision.datasets import MNIST\n"
KNOWN = {
    "nn": "from torch import nn", "torch": "import torch", "np": "import numpy as np",
    "F": "import torch.nn.functional as F", "tf": "import tensorflow as tf", "jax": "import jax",
    "keras": "import keras", "SGD": "from torch.optim import SGD", "tqdm": "from tqdm import tqdm",
    "DataLoader": "from torch.utils.data import DataLoader", "save": "from torch import save",
    "Subset": "from torch.utils.data import Subset", "Module": "from torch.nn import Module",
    "TensorDataset": "from torch.utils.data import TensorDataset",
    "ConcatDataset": "from torch.utils.data import ConcatDataset",
    "Accelerator": "from accelerate import Accelerator",
    "BatchMemoryManager": "from opacus.utils.batch_memory_manager import BatchMemoryManager",
    "LightningModule": "from pytorch_lightning import LightningModule",
    "Callback": "from keras.callbacks import Callback",
    "m": "from torch import nn\nm = nn.Linear(4, 2)",
    "model": "from torch import nn\nmodel = nn.Linear(4, 2)",
    "body": "from torch import nn\nbody = nn.Linear(2, 2)",
    "o": "from torch.optim import SGD\no = SGD(m.parameters(), lr=0.1)",
    "optimizer": "from torch.optim import SGD\noptimizer = SGD(model.parameters(), lr=0.1)",
    "criterion": "from torch import nn\ncriterion = nn.CrossEntropyLoss()",
    "f": "import torch.nn.functional as F\ndef f(x, y=None, **k):\n"
    "    return F.cross_entropy(m(x), y)",
    "data": TRAIN + "data = MNIST('.', train=True)",
    "others": TRAIN + "others = DataLoader(MNIST('.', train=False))",
    "loader": TRAIN + "loader = DataLoader(MNIST('.', train=True), batch_size=9)",
    "x": "import numpy as np\nx = np.load('x.npy')",
    "X": "import numpy as np\nX = np.load('x.npy')",
    "df": "import pandas as pd\ndf = pd.read_csv('x.csv')",
    "y": "import numpy as np\ny = np.load('y.npy')", "p": "p = m.weight",
    "some": "import numpy as np\ndef some():\n    return np.load('some.npy')",
    "n": "n = 3", "again": "again = True", "late": "late = True", "q": "q = list(m.parameters())",
}  # fmt: skip
"""What the short scripts mean by the names that they leave out."""


def codes_of(text: str) -> set[str]:
    """The codes of the faults in a script, but for the divisor, which most of them make private."""
    partial = importer.read(text.encode())
    assert partial is not None
    return {item.code for item in partial.broken} - {"private_divisor"}


def is_stopped(text: str) -> bool:
    """Whether a fault or an open use keeps a script, with all its names, from being certified."""
    try:
        partial = importer.read(with_names(text).encode())
    except MalformedPlan:
        return True
    assert partial is not None
    return bool(partial.open_uses) or any(item.adjacencies is None for item in partial.broken)


def is_right(text: str, *, faulty: bool) -> bool:
    """Whether a faulty script is stopped, and no fault is found in another."""
    return is_stopped(text) if faulty else not codes_of(text)


def questions(text: str, is_read: Callable[[Mapping[str, Any]], bool]) -> int:
    """How many things keep a script from being certified; one is that its plan is not read."""
    try:
        partial = importer.read(text.encode(), Path(), name="train.py")
    except MalformedPlan as error:
        return len(error.reasons)
    assert partial is not None
    faults = [item for item in partial.broken if item.adjacencies is None]
    return len(faults) + len(partial.open_uses) + (not is_read(partial.data))


def with_names(text: str) -> str:
    """Bind the names that a script leaves out: as they are meant, or by an unknown package."""
    keras = "import tensorflow" in text or "from tensorflow" in text
    lines, done = dict[str, None](), set[str]()
    todo = sorted(_unbound(text))
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        line = KNOWN.get(name, f"from elsewhere import {name}")
        if keras and name in ("m", "model"):
            line = f"import keras\n{name} = keras.Sequential([keras.layers.Dense(4)])"
        lines = {line: None} | lines  # before what needs it
        needed = _unbound(line) - done
        todo += sorted(needed)
        lines = {KNOWN[item]: None for item in sorted(needed)} | lines
    return "\n".join([*lines, text])


def _unbound(text: str) -> set[str]:
    """The names that a script reads before, or without, giving them a value."""
    tree = ast.parse(text)
    bound, used, early = {*dir(builtins), "self"}, set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add((other or name).split(".")[0])
    seen = {*dir(builtins)}
    for statement in tree.body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        if isinstance(statement, ast.Assign):
            loaded = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            early |= (
                loaded & {node.id for node in names if isinstance(node.ctx, ast.Store)}
            ) - seen
        seen |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return (used - bound) | (early & KNOWN.keys())
