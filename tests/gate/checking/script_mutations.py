"""Scripts that hide their numbers in random ways, and what they do when they run.

Each script is built from a base by indirections, moved constants, aliases, wrappers, ``getattr``
and late changes, and is then run against stand-ins for torch and the libraries that record the
noise of each step, the lot size and the number of steps.
"""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap
import types
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

SIZE = 60
# ruff: noqa: E501


@dataclass
class Run:
    """What a script did: the noise of each step, and the lot size of its loader."""

    noise: list[float] = field(default_factory=list)
    lot_size: int = 0

    def modules(self) -> dict[str, types.ModuleType]:
        """Stand-ins for torch and Opacus that record here."""
        run = self

        class Optimizer:
            noise_multiplier = 0.0

            def step(self) -> None:
                run.noise.append(self.noise_multiplier)

            def zero_grad(self) -> None:
                pass

        class DataLoader:
            def __init__(self, _data: Any, batch_size: int, **_: Any) -> None:
                self.batch_size = batch_size

            def __iter__(self) -> Any:
                return iter(range(-(-SIZE // self.batch_size)))

        class PrivacyEngine:
            def make_private(self, **arguments: Any) -> Any:
                optimizer = Optimizer()
                optimizer.noise_multiplier = arguments["noise_multiplier"]
                run.lot_size = arguments["data_loader"].batch_size
                return None, optimizer, arguments["data_loader"]

        class Engine:
            """private-transformers' engine, which attaches itself to an optimiser."""

            def __init__(self, _module: Any, **arguments: Any) -> None:
                self.noise_multiplier = arguments["noise_multiplier"]
                run.lot_size = arguments["batch_size"]

            def attach(self, optimizer: Any) -> None:
                optimizer.step = lambda: run.noise.append(self.noise_multiplier)

        class Model:
            """A Keras model and its optimiser."""

            def __init__(self, *, noise_multiplier: float, **_: Any) -> None:
                self.noise_multiplier = noise_multiplier

            def fit(self, _x: Any, _y: Any, batch_size: int, epochs: int) -> None:
                run.lot_size = batch_size
                run.noise += [self.noise_multiplier] * epochs * -(-SIZE // batch_size)

        named = {
            "opacus": {"PrivacyEngine": PrivacyEngine},
            "torch": {"DataLoader": DataLoader, "Optimizer": Optimizer},
            "private_transformers": {"PrivacyEngine": Engine},
            "tensorflow_privacy": {"DPKerasSGDOptimizer": Model},
        }
        modules = {name: types.ModuleType(name) for name in named}
        for name, members in named.items():
            modules[name].__dict__.update(members)
        return modules


def run(script: str) -> Run | None:
    """What a script does, or None if it fails."""
    record = Run()
    module = types.ModuleType("__main__")
    with (
        mock.patch.dict(sys.modules, {**record.modules(), "__main__": module}),
        mock.patch.object(sys, "argv", ["train.py"]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            exec(compile(script, "train.py", "exec"), module.__dict__)
        except (Exception, SystemExit):
            return None
    return record


SOURCES = (
    ("{name} = {value}", "{name}"),
    ("{name} = {value} if True else {other}", "{name}"),
    ("{name}_base = {value}\n{name} = {name}_base", "{name}"),
    ("{name}_table = {{'a': {{'b': {value}}}, 'c': {other}}}", "{name}_table['a']['b']"),
    ("class {name}_class:\n    a = {value}\n    b = {other}", "{name}_class.a"),
    ("@dataclasses.dataclass\nclass {name}_class:\n    a: float = {value}\n"
     "{name}_object = {name}_class()", "{name}_object.a"),
    ("@dataclasses.dataclass\nclass {name}_class:\n    a: float = {other}\n"
     "{name}_object = {name}_class(a={value})", "{name}_object.a"),
    ("{name}_space = argparse.Namespace(a={value}, b={other})", "getattr({name}_space, 'a')"),
    ("def {name}_get():\n    return {value}", "{name}_get()"),
    ("def {name}_wrap(x):\n    return x\n{name} = {name}_wrap({value})", "{name}"),
    ("parser.add_argument('--{name}', default={value})", "args.{name}"),
    ("parser.add_argument('--{name}-x', dest='{name}', default={value})", "args.{name}"),
)  # fmt: skip
"""Where a number comes from: statements, and the expression that reads it."""
LATE = (
    "{name} = {other}", "{name}_base = {other}", "{name}_table['a']['b'] = {other}",
    "{name}_table['a'].update(b={other})", "{name}_class.a = {other}", "{name}_object.a = {other}",
    "setattr({name}_object, 'a', {other})", "setattr({name}_class, key, {other})",
    "alias = {name}_space\nalias.a = {other}", "args.{name} = {other}",
    "vars(args)['{name}'] = {other}", "globals()['{name}'] = {other}",
    "args.__dict__.update({name}={other})", "exec('{name} = {other}')",
    "def {name}_get():\n    return {other}", "def change():\n    global {name}\n    {name} = {other}\n"
    "change()", "parser.set_defaults({name}={other})\nargs = parser.parse_args()",
    "for {name} in [{other}]: pass", "({name} := {other})", "{name}, spare = {other}, 1",
    "parser = argparse.ArgumentParser()\nparser.add_argument('--{name}', default={other})\n"
    "args = parser.parse_args()", "args = argparse.Namespace(**(vars(args) | {{'{name}': {other}}}))",
    "inner = {name}_table['a']\ninner['b'] = {other}", "{name}_class = argparse.Namespace(a={other})",
    "sys.modules['__main__'].{name} = {other}", "sys.modules[__name__].__dict__['{name}'] = {other}",
    "float = lambda value: {other}", "operator.setitem({name}_table['a'], 'b', {other})",
    "[setattr(o, 'a', {other}) for o in [{name}_class]]", "pass", "pass", "pass",
)  # fmt: skip
"""What may change a number after it was set."""
LOOPS = (
    "for epoch in range({epochs}):\n    for batch in loader:\n        optimizer.step()",
    "def one(loader, optimizer):\n    for i, batch in enumerate(loader):\n        optimizer.step()\n"
    "for epoch in range(1, {epochs} + 1):\n    one(loader, optimizer)",
    "def one():\n    for batch in loader:\n        optimizer.step()\n"
    "def every():\n    for epoch in range({epochs}):\n        one()\nevery()",
    "for epoch in range({epochs}):\n    for batch in loader:\n        for twice in range(2):\n"
    "            optimizer.step()",
    "step = optimizer.step\nfor epoch in range({epochs}):\n    for batch in loader:\n        step()",
    "for epoch in range({epochs}):\n    for batch in loader:\n        optimizer.step()\n"
    "        optimizer.step()",
    "def one():\n    for batch in loader:\n        optimizer.step()\n"
    "for epoch in range({epochs}):\n    one()\none()",
    "epoch = 0\nwhile epoch < {epochs}:\n    epoch += 1\n    for batch in loader:\n"
    "        optimizer.step()",
    "for epoch in range({epochs}):\n    for batch in loader:\n        getattr(optimizer, 'st' + 'ep')()\n"
    "        optimizer.step()",
    "for epoch in range({epochs}):\n    for batch in loader:\n        optimizer.step()\n"
    "        optimizer.noise_multiplier *= 0.9",
    "for epoch in range({epochs}):\n    for batch in loader:\n        optimizer.step()\n"
    "        setattr(optimizer, 'noise_' + 'multiplier', 0.1)",
    "for epoch in range({epochs}):\n    [optimizer.step() for batch in loader]",
    "list(map(lambda e: [optimizer.step() for b in loader], range({epochs})))",
    "opt = optimizer\nfor epoch in range({epochs}):\n    for batch in loader:\n        opt.step()",
    "data = [0] * 500\nfor epoch in range({epochs}):\n    for batch in data:\n        optimizer.step()",
    "range = lambda n: [0] * 50\nfor epoch in range({epochs}):\n    for batch in loader:\n"
    "        optimizer.step()",
    "loader = list(loader) * 9\nfor epoch in range({epochs}):\n    for batch in loader:\n"
    "        optimizer.step()",
    "turns = [0, 1]\nfor epoch in turns:\n    for batch in loader:\n        optimizer.step()",
    "turns = [0, 1]\nturns.append(2)\nfor epoch in turns:\n    for batch in loader:\n"
    "        optimizer.step()",
    "turns = more = [0, 1]\nmore += [2, 3]\nfor epoch in turns:\n    for batch in loader:\n"
    "        optimizer.step()",
    "turns = [0, 1]\nmore = [turns]\nmore[0] += [2, 3]\nfor epoch in turns:\n"
    "    for batch in loader:\n        optimizer.step()",
    "def turns(n):\n    return [0, 1, 2, 3, 4, 5, 6]\nfor epoch in turns(2):\n"
    "    for batch in loader:\n        optimizer.step()",
    "for epoch in (0, 1):\n    for batch in loader:\n        optimizer.step()",
    "for epoch in [*range({epochs} * 3)]:\n    for batch in loader:\n        optimizer.step()",
    "enumerate = lambda data: [0] * 999\nfor epoch in range({epochs}):\n"
    "    for batch in enumerate(loader):\n        optimizer.step()",
)  # fmt: skip
"""Ways to train."""


FITS = (
    "optimizer.fit(0, 0, batch_size={lot}, epochs={epochs})",
    "optimizer.fit(0, 0, {lot}, {epochs})",
    "for again in range(3):\n    optimizer.fit(0, 0, batch_size={lot}, epochs={epochs})",
    "optimizer.fit(0, 0, {lot}, {epochs})\noptimizer.fit(0, 0, {lot}, {epochs})",
    "train = optimizer.fit\ntrain(0, 0, {lot}, {epochs})\noptimizer.fit(0, 0, {lot}, {epochs})",
    "def train(epochs):\n    optimizer.fit(0, 0, {lot}, epochs)\ntrain({epochs})",
    "def train(epochs):\n    optimizer.fit(0, 0, {lot}, epochs)\ntrain({epochs})\ntrain({epochs})",
    "def train(fit):\n    fit(0, 0, {lot}, {epochs})\ntrain(optimizer.fit)\noptimizer.fit(0, 0, {lot}, 1)",
    "while len([0]) < 2:\n    pass\n    break\noptimizer.fit(0, 0, {lot}, {epochs})",
    "getattr(optimizer, 'fi' + 't')(0, 0, {lot}, {epochs})\noptimizer.fit(0, 0, {lot}, {epochs})",
    "[optimizer.fit(0, 0, {lot}, {epochs}) for again in range(4)]",
    "settings = dict(batch_size={lot}, epochs={epochs})\noptimizer.fit(0, 0, **settings)",
    "optimizer.noise_multiplier = 0.1\noptimizer.fit(0, 0, {lot}, {epochs})",
    "setattr(optimizer, 'noise_multiplier', 0.1)\noptimizer.fit(0, 0, {lot}, {epochs})",
)  # fmt: skip
"""Ways to call Keras' fit."""
BASES = {
    "opacus": (
        "from opacus import PrivacyEngine",
        f"loader = DataLoader([0] * {SIZE}, batch_size={{lot}})\n"
        "engine = PrivacyEngine()\n"
        "model, optimizer, loader = engine.make_private(module=None, optimizer=None, "
        "data_loader=loader, noise_multiplier={noise}, max_grad_norm=1.0)",
        LOOPS,
    ),
    "private_transformers": (
        "from private_transformers import PrivacyEngine",
        f"loader = DataLoader([0] * {SIZE}, batch_size={{lot}}, shuffle=True)\n"
        "optimizer = Optimizer()\n"
        f"engine = PrivacyEngine(None, batch_size={{lot}}, sample_size={SIZE}, "
        "noise_multiplier={noise}, max_grad_norm=1.0)\n"
        "engine.attach(optimizer)",
        LOOPS,
    ),
    "tensorflow_privacy": (
        "from tensorflow_privacy import DPKerasSGDOptimizer",
        "optimizer = DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier={noise}, "
        "num_microbatches={lot})",
        FITS,
    ),
}
"""Each library's import, its private calls, and ways to train."""


HIDDEN = (
    "{p}", "def first():\n    global optimizer, model, loader, engine\n{i}\nfirst()",
    "def first():\n    global optimizer, model, loader, engine\n{i}\n[first][0]()",
    "def first():\n    global optimizer, model, loader, engine\n{i}\n"
    "import __main__\n__main__.first()",
    "def first():\n    global optimizer, model, loader, engine\n{i}\n"
    "import __main__\ngetattr(__main__, 'first')()",
    "def first():\n    global optimizer, model, loader, engine\n{i}\n"
    "def second():\n    first()\nsecond()",
    "class First:\n    def __call__(self):\n        global optimizer, model, loader, engine\n{ii}\n"
    "First()()",
    "def first():\n    global optimizer, model, loader, engine\n{i}",
)  # fmt: skip
"""Ways in which a second private call, of other noise, may run before or after the first."""


def script(random: Random, library: str) -> str:
    """A random script of a library."""
    imported, private, ways = BASES[library]
    lines = ["import argparse, dataclasses, operator, os, sys", imported,
             "from torch import DataLoader, Optimizer", "key = 'a'",
             "parser = argparse.ArgumentParser()"]  # fmt: skip
    reads, numbers = {}, {"noise": ("4.0", "0.25"), "lot": ("6", "20"), "epochs": ("2", "5")}
    for name, (value, other) in numbers.items():
        setup, reads[name] = (
            part.format(name=name, value=value, other=other) for part in random.choice(SOURCES)
        )
        lines.append(setup)
    lines.append("args = parser.parse_args()")
    for name, (_, other) in numbers.items():
        if random.random() < 0.5:
            lines.insert(
                random.randrange(5, len(lines) + 1),
                random.choice(LATE).format(name=name, other=other),
            )
    lines.append(private.format(**reads))
    if random.random() < 0.25:
        other = private.format(**reads | {"noise": "0.25"})
        shifted = textwrap.indent(other, "    ")
        again = random.choice(HIDDEN).format(
            p=other, i=shifted, ii=textwrap.indent(shifted, "    ")
        )
        lines.insert(-1 if random.random() < 0.3 else len(lines), again)
    lines.append(random.choice(ways).format(**reads))
    return "\n".join(lines) + "\n"
