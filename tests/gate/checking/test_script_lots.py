"""What one step of an Opacus script releases: one clipped lot, or what is not certified."""

from __future__ import annotations

import json
from typing import Any

import pytest

from affidavit.importers.documents import import_file, notebook_source
from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan
from tests.gate.checking.script_codes import codes_of, is_right, is_stopped

HEAD = """\
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
loader = DataLoader(data, batch_size=6)
engine = PrivacyEngine()
"""
ARGUMENTS = "module=m, optimizer=o, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0"
PRIVATE = f"model, optimizer, loader = engine.make_private({ARGUMENTS})\n"
GHOST = (
    "model, optimizer, criterion, loader = "
    f"engine.make_private({ARGUMENTS}, criterion=c, grad_sample_mode='ghost')\n"
)
EACH = "for e in range(3):\n    for i, x in enumerate(loader):\n"
LOSS = "        loss = criterion(model(x), y)\n        loss.backward()\n        optimizer.step()\n"
TRAIN = "def train(model, criterion, loader, optimizer):\n    for x in loader:\n" + LOSS


def broken(text: str) -> set[str]:
    return codes_of(HEAD + text)


@pytest.mark.parametrize(
    "line",
    [
        "engine.accountant.history.clear()",
        "[p.sub_(p.summed_grad) for p in m.parameters()]",
        "loader.batch_sampler.sample_rate = 0.5",
        "optimizer.scale_grad = other",
    ],
)
def test_a_change_of_what_releases_the_lots_does_not_pass(line: str) -> None:
    text = PRIVATE + line + "\n" + EACH + "        optimizer.step()\n"
    assert is_stopped(HEAD + text)


def test_of_several_private_calls_the_one_that_settled_conditions_let_run_is_read() -> None:
    other = PRIVATE.replace("noise_multiplier=1.0", "noise_multiplier=9.0")
    text = "sigma = -1.0\nif sigma > 0:\n    " + other + "else:\n    " + PRIVATE
    partial = importer.read((HEAD + text + EACH + "        optimizer.step()\n").encode())
    assert partial is not None
    assert partial.data["releases"][0]["noise_multiplier"] == 1.0
    assert partial.data["sampling"]["lot_size"] == 6
    either = text.replace("sigma = -1.0", "sigma = noise()") + EACH + "        optimizer.step()\n"
    partial = importer.read((HEAD + either).encode())
    assert partial is not None
    assert not partial.adds_to
    plans = [part.data["releases"][0]["noise_multiplier"] for part in (partial, *partial.others)]
    assert plans == [9.0, 1.0]


def test_each_of_several_private_calls_that_run_has_a_plan_of_its_own() -> None:
    other = PRIVATE.replace("model, optimizer, loader", "head, rule, lots")
    other = "# affidavit: dataset_size=60\n" + other.replace("=loader", "=DataLoader(more, 5)")
    loop = (
        "for e in range(7):\n    for x in lots:\n        f(head(x)).backward()\n        {}.step()\n"
    )
    first = HEAD + PRIVATE + EACH + "        optimizer.step()\n"
    partial = importer.read((first + other + loop.format("rule")).encode())
    assert partial is not None
    plans = [part.data for part in (partial, *partial.others)]
    assert [plan["epochs"] for plan in plans] == [3, 7]
    assert [plan["sampling"]["lot_size"] for plan in plans] == [6, 5]
    assert [plan.get("dataset") for plan in plans] == [None, {"size": 60}]
    assert [len(part.adds_to) for part in (partial, *partial.others)] == [1, 1]
    mixed = importer.read((first + other + loop.format("optimizer")).encode())
    assert mixed is not None
    assert all(part.open_uses for part in (mixed, *mixed.others))


@pytest.mark.parametrize(
    "body",
    [
        "        f(x).backward()\n        if i % 4 == 0:\n            optimizer.step()\n",
        "        f(x).backward()\n        if i % 4:\n            continue\n"
        "        optimizer.step()\n",
        "        form(x)\n        if i % 4 == 0:\n            optimizer.step()\n",
        "        f(x).backward()\n    optimizer.step()\n",
        "        f(x).backward()\n        optimizer.signal_skip_step(i % 2)\n"
        "        optimizer.step()\n",
        "        f(x).backward()\n        if i % 2:\n            optimizer.virtual_step()\n"
        "        else:\n            optimizer.step()\n",
    ],
)
def test_a_step_that_sums_several_poisson_lots_is_not_certified(body: str) -> None:
    assert broken(PRIVATE + EACH + body) == {"accumulated_lots"}
    shuffled = PRIVATE.replace("1.0)", "1.0, poisson_sampling=False)")
    assert broken(shuffled + EACH + body) == set()


STEP = "        f(x).backward()\n        optimizer.step()\n"
TWICE = "        f(x).backward()\n" + STEP
PARTS = "for e in range(3):\n    with BatchMemoryManager(data_loader=loader) as parts:\n"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (EACH + TWICE, "repeated_gradients"),
        (EACH + TWICE.replace("\n", "\n        optimizer.zero_grad()\n", 1), None),
        (EACH + "        if a:\n            f(x).backward()\n        else:\n    " + STEP
         .replace("\n", "\n    ").replace("    optimizer", "optimizer"), None),
        (PARTS + "        for x in parts:\n    " + STEP.replace("\n", "\n    ")
         + "        if e > 1:\n                break\n", "repeated_gradients"),
        ("def train(some):\n    for i, x in enumerate(some):\n        one(x)\n"
         "        if i > 9:\n            return\ndef one(x):\n" + STEP
         + PARTS + "        train(parts)\n", "repeated_gradients"),
        (PARTS + "        for x in parts:\n    " + STEP.replace("\n", "\n    ")
         + "\n    if n > 9:\n        break\n", None),
        (PARTS + "        for x in parts:\n    " + STEP.replace("\n", "\n    ")
         + "        if optimizer._is_last_step_skipped:\n                continue\n"
         "            if n > 9:\n                break\n", None),
    ],
)  # fmt: skip
def test_a_step_that_sums_several_gradients_of_a_record_is_not_certified(
    body: str, code: str | None
) -> None:
    for private in (PRIVATE, PRIVATE.replace("1.0)", "1.0, poisson_sampling=False)")):
        assert is_right(HEAD + private + body, faulty=code is not None)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("x, a, b, lam = mixup_data(x, y)", "mixed_records"),
        ("mix = v2.MixUp(num_classes=10)", "mixed_records"),
        ("X, y = SMOTE().fit_resample(X, y)", "mixed_records"),
        ("data = ConcatDataset([first, second])", None),
        ("x = mixup_data(x) if False else x", None),
        ("options = {}\nx = x if options else mixup_data(x)", "mixed_records"),
        ("def mixup_data(x): return x", None),
    ],
)
def test_rows_of_several_records_are_not_certified(line: str, code: str | None) -> None:
    for private in (PRIVATE, PRIVATE.replace("1.0)", "1.0, poisson_sampling=False)")):
        assert is_right(HEAD + line + "\n" + private + EACH + STEP, faulty=code is not None)


@pytest.mark.parametrize(
    ("body", "reused"),
    [
        (EACH + "        for _ in range(4):\n    " + STEP.replace("\n", "\n    ").rstrip(), True),
        (EACH + "        while again:\n    " + STEP.replace("\n", "\n    ").rstrip(), True),
        (EACH + "        for _ in range(1):\n    " + STEP.replace("\n", "\n    ").rstrip(), False),
        ("def train(x):\n    for _ in range(n):\n" + STEP + EACH + "        train(x)\n", True),
        ("x = next(iter(loader))\nfor e in range(3):\n    for i in range(9):\n" + STEP, True),
        ("for e in range(3):\n    x = next(iter(loader))\n    for i in range(9):\n" + STEP, True),
        ("for e in range(3):\n    x = next(iter(loader))\n    for x in [x] * 9:\n" + STEP, True),
        ("lots = list(loader)\nfor e in range(3):\n    for x in lots:\n" + STEP, True),
        ("import itertools\nit = iter(itertools.cycle(loader))\nfor e in range(3):\n"
         "    for i in range(9):\n        x = next(it)\n" + STEP, True),
        ("from itertools import cycle\nfor e in range(1):\n    for x in cycle(loader):\n"
         + STEP, True),
    ],
)  # fmt: skip
def test_poisson_lots_of_several_steps_do_not_amplify_them(body: str, reused: bool) -> None:
    assert is_right(HEAD + PRIVATE + body, faulty=reused)
    shuffled = PRIVATE.replace("1.0)", "1.0, poisson_sampling=False)")
    assert "reused_lots" not in broken(shuffled + body)


@pytest.mark.parametrize(
    "body",
    [
        "        f(x).backward()\n        optimizer.step()\n",
        "        f(x).backward()\n        if True:\n            optimizer.step()\n",
        "        if i == 0:\n            continue\n        f(x).backward()\n"
        "        optimizer.step()\n",
        STEP + "for i in range(9):\n    a.step(noise_multiplier=1.0, sample_rate=0.1)\n",
    ],
)
def test_a_step_for_each_lot_is(body: str) -> None:
    assert broken(PRIVATE + EACH + body) == set()


@pytest.mark.parametrize(
    "body",
    [
        "        if len(x):\n            f(x).backward()\n            optimizer.step()\n",
        "        if x.size(0) == 0:\n            continue\n"
        "        f(x).backward()\n        optimizer.step()\n",
        "        loss = f(x)\n        if not isfinite(loss):\n            continue\n"
        "        loss.backward()\n        optimizer.step()\n",
        "        try:\n            f(x).backward()\n            optimizer.step()\n"
        "        except RuntimeError:\n            pass\n",
    ],
)
def test_a_lot_that_its_own_records_can_skip_is_not_certified(body: str) -> None:
    assert is_stopped(HEAD + PRIVATE + EACH + body)


@pytest.mark.parametrize("test", ["i < START", "args.resume and i < args.start", "step < 100"])
def test_what_is_settled_before_the_loop_may_skip_a_lot(test: str) -> None:
    body = f"        if {test}:\n            continue\n        step += 1\n"
    body += "        f(x).backward()\n        optimizer.step()\n"
    assert broken(PRIVATE + EACH + body) == set()


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (GHOST + EACH + LOSS, set()),
        (TRAIN + GHOST + "for e in range(3):\n    train(model, criterion, loader, optimizer)\n",
         set()),
        (GHOST + EACH + LOSS.replace("criterion(", "F.nll("), {"unclipped_loss"}),
        (GHOST + "optimizer.max_grad_norm = 0.1\n" + EACH + LOSS, {"unclipped_loss"}),
        (GHOST + "criterion = CrossEntropyLoss()\n" + EACH + LOSS, {"unclipped_loss"}),
        (TRAIN + GHOST + "train(model, CrossEntropyLoss(), loader, optimizer)\n",
         {"unclipped_loss"}),
        (PRIVATE.replace("1.0)", "1.0, grad_sample_mode=mode())") + EACH + LOSS, set()),
        (GHOST.replace("'ghost'", "mode()") + EACH + LOSS.replace("criterion(", "F.nll("),
         {"unclipped_loss"}),
    ],
)  # fmt: skip
def test_ghost_clipping_clips_only_the_loss_that_it_returns(text: str, codes: set[str]) -> None:
    assert is_right(HEAD + text, faulty=bool(codes))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (PRIVATE.replace("loader =", "private =") + EACH + STEP, "other_loader"),
        (PRIVATE.replace("loader =", "_ =") + EACH + STEP, "other_loader"),
        (
            "def train(loader):\n    for x in loader:\n" + STEP
            + PRIVATE.replace("loader =", "private =") + "train(loader)\ntest(private)\n",
            "other_loader",
        ),
        (
            "def train(loader):\n    with tqdm(loader) as bar:\n        for x in bar:\n"
            + "            f(x).backward()\n            optimizer.step()\n"
            + PRIVATE.replace("loader =", "private =") + "train(loader)\ntest(private)\n",
            "other_loader",
        ),
        ("o = SGD(m)\n" + PRIVATE + EACH + STEP.replace("optimizer.", "o."), "other_optimizer"),
        (PRIVATE + EACH + STEP.replace("optimizer.", "optimizer.original_optimizer."),
         "other_optimizer"),
        (PRIVATE + "optimizer = SGD(m)\n" + EACH + STEP, "other_optimizer"),
        (PRIVATE + EACH + STEP + "        for p in q:\n            p -= 0.1 * p.grad\n",
         "other_optimizer"),
        (PRIVATE + EACH + "        loss = f(x)\n" + STEP
         + "        if loss < 0.1:\n            break\n", "data_dependent_stop"),
        (PRIVATE + EACH + "        loss = f(x)\n" + STEP + "    scheduler.step(loss)\n",
         "data_dependent_stop"),
        (PRIVATE + EACH + "        seen.append(f(x))\n" + STEP
         + "    if sum(seen) < 0.1:\n        break\n", "data_dependent_stop"),
        ("def once():\n    for x in loader:\n        loss = f(x)\n" + STEP
         + "    return loss\n" + PRIVATE
         + "for e in range(9):\n    loss = once()\n    if loss < 1:\n        break\n",
         "data_dependent_stop"),
        ("def once():\n    for x in loader:\n        loss = f(x)\n" + STEP
         + "    return loss\n" + PRIVATE
         + "for e in range(9):\n    if once() < 1:\n        break\n", "data_dependent_stop"),
        (PRIVATE + EACH + STEP + "    if accuracy(model, loader) > 0.9:\n        break\n",
         "data_dependent_stop"),
        (PRIVATE + EACH + STEP + "    scheduler.step(model.accuracy(loader))\n",
         "data_dependent_stop"),
        (PRIVATE + EACH + STEP + "    now = accuracy(model, loader)\n"
         "    if now > best:\n        torch.save(model.state_dict(), 'best.pt')\n",
         "data_dependent_stop"),
        (PRIVATE + EACH + "        hits += right(x)\n" + STEP + "    train = hits / n\n"
         "    hits = 0\n    if train > best:\n        torch.save(model)\n", "data_dependent_stop"),
        (PRIVATE + "scaler = GradScaler()\n" + EACH
         + STEP.replace("optimizer.step()", "scaler.step(optimizer)"), "skipped_lots"),
        (PRIVATE + EACH + STEP + "loss = SupConLoss()\n", "joined_records"),
        ("mix = nn.ModuleList([nn.BatchNorm1d(9)])\nclass Net(nn.Module):\n"
         "    def forward(self, x):\n        return mix[0](x)\n" + PRIVATE + EACH + STEP,
         "joined_records"),
    ],
)  # fmt: skip
def test_training_beside_the_private_objects_is_not_certified(text: str, code: str) -> None:
    assert is_stopped(HEAD + text), code


@pytest.mark.parametrize(
    "text",
    [
        PRIVATE + EACH + STEP + "        if i > 9:\n            break\n",
        PRIVATE + EACH + STEP + "        scheduler.step(e + i / 9)\n    scheduler.step(loss)\n",
        "def each(some):\n    for x in some:\n"
        + STEP
        + "if dp:\n    "
        + PRIVATE.replace("loader =", "l =")
        + "    each(l)\nelse:\n    each(loader)\n",
        PRIVATE + EACH + STEP + "    if engine.get_epsilon(1e-5) > 3:\n        break\n",
        "if dp:\n    " + PRIVATE + "else:\n    optimizer = SGD(m)\n" + EACH + STEP,
        "class A:\n    def f(self):\n        self.o, self.l = SGD(m), DataLoader(d)\n        "
        + PRIVATE.replace("optimizer=o", "optimizer=self.o").replace("=loader", "=self.l")
        + "        self.o = optimizer\n        self.l = loader\n        for x in self.l:\n"
        + "            f(x).backward()\n            self.o.step()\n",
        PRIVATE + "optimizer = wrapped(optimizer)\nloader = tqdm(loader)\n" + EACH + STEP,
        PRIVATE + EACH + "        loss = f(x)\n" + STEP + "    for x in val_loader:\n"
        "        loss = f(x)\n        total += loss\n    if total < best:\n        save(model)\n"
        "    if accuracy(model, val_loader) > 0.9:\n        break\n",
        PRIVATE
        + "scaler = GradScaler(enabled=False)\n"
        + EACH
        + STEP.replace("optimizer.step()", "scaler.step(optimizer)"),
        PRIVATE
        + EACH
        + "        hits += right(x)\n"
        + STEP
        + "    train = hits / n\n    hits = 0\n"
        "    for x in val_loader:\n        hits += right(x)\n    val = hits / n\n"
        "    if val > best:\n        torch.save(model)\n",
        PRIVATE + "nn.BatchNorm2d(3)\n" + EACH + STEP,
    ],
)
def test_the_private_objects_under_other_names_are(text: str) -> None:
    assert broken(text) == set()


@pytest.mark.parametrize(
    "text",
    [
        "from opacus.optimizers import DPOptimizer\nDPOptimizer.add_noise = quiet\n",
        "import opacus.optimizers.optimizer as o\no._generate_noise = quiet\n",
        "torch.normal = quiet\n",
        "optimizer.add_noise = quiet\n",
        "setattr(optimizer, 'add_noise', quiet)\n",
        "from unittest.mock import patch\npatch('opacus.optimizers.DPOptimizer.step').start()\n",
        "getattr(opacus.schedulers, 'ExponentialNoise')(optimizer, gamma=0.9)\n",
    ],
)
def test_a_part_of_the_library_that_is_replaced_is_not_certified(text: str) -> None:
    assert is_stopped(HEAD + "import torch\n" + PRIVATE + text)


def test_what_accelerate_wraps_is_not_read_by_its_name() -> None:
    wrap = (
        "from accelerate import Accelerator\nm, o, loader = Accelerator().prepare(m, o, loader)\n"
    )
    partial = importer.read((HEAD + wrap + PRIVATE + EACH + STEP).encode())
    assert partial is not None
    assert "lot_size" not in partial.data["sampling"]
    assert any("one process trains" in text for text in partial.assumed)


def test_arguments_that_opacus_does_not_know_are_another_librarys() -> None:
    partial = importer.read(
        (HEAD + PRIVATE.replace("1.0)", "1.0, augmult=4)") + EACH + STEP).encode()
    )
    assert partial is not None
    assert any("ignores augmult" in text for text in partial.assumed)
    with pytest.raises(MalformedPlan, match="may not be Opacus"):
        broken(PRIVATE.replace("1.0)", "1.0, clipping='budget')") + EACH + STEP)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("from torchvision.datasets import MNIST\n", 60_000),
        ("from torchvision.datasets import MNIST\ndata.data = data.data[:9]\n", None),
        ("import torchvision\nfrom mine import MNIST\n", None),
    ],
)
def test_only_a_whole_training_set_of_torchvision_has_a_known_size(
    text: str, size: int | None
) -> None:
    head = text + "from opacus import PrivacyEngine\nfrom torch.utils.data import DataLoader\n"
    data = "data = MNIST('d', train=True)\nloader = DataLoader(data, batch_size=6)\n"
    partial = importer.read((head + data + "engine = PrivacyEngine()\n" + PRIVATE).encode())
    assert partial is not None
    assert partial.data.get("dataset", {}).get("size") == size


def test_a_run_that_is_continued_has_its_steps_asked_for() -> None:
    loop = EACH + STEP
    runs = {
        "": True,
        "engine.load_checkpoint(path=p)\n": False,
        "engine.accountant.load_state_dict(s)\n": False,
        "optimizer.load_state_dict(s)\n": False,
        "model.load_state_dict(s)\n": True,
        "if '':\n    optimizer.load_state_dict(s)\n": True,
    }
    for text, is_one in runs.items():
        partial = importer.read((HEAD + PRIVATE + text + loop).encode())
        assert partial is not None
        assert ("epochs" in partial.data) is is_one, text


@pytest.mark.parametrize(
    ("run", "is_one"),
    [
        ("app.run(main)", True),
        ("app.run(main, argv=[])", True),
        ("tune.run(main, num_samples=9)", False),
    ],
)
def test_what_runs_a_function_more_than_once_has_the_length_asked_for(
    run: str, is_one: bool
) -> None:
    body = PRIVATE.replace("loader =", "lots =") + EACH.replace("(loader)", "(lots)") + STEP
    text = "def main(_):\n" + "".join(f"    {line}\n" for line in body.splitlines()) + run
    partial = importer.read((HEAD + text).encode())
    assert partial is not None
    assert ("epochs" in partial.data) is is_one
    assert not broken(text)


KERAS = """\
import tensorflow as tf
import tensorflow_privacy as tfp
optimizer = tfp.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, num_microbatches=9)
model.compile(optimizer=optimizer, loss=loss)
model.fit(x, y, epochs=3, batch_size=9)
"""
PRIVATE_MODEL = KERAS.replace("optimizer = tfp.DPKerasSGDOptimizer", "model = tfp.DPSequential")
PRIVATE_MODEL = PRIVATE_MODEL.replace("optimizer=optimizer", "optimizer=tf.keras.optimizers.Adam()")
ENGINE = """\
from fastDP import PrivacyEngine
optimizer = SGD(m)
engine = PrivacyEngine(m, batch_size=9, sample_size=90, noise_multiplier=1.0, max_grad_norm=1.0)
engine.attach(optimizer)
for x in loader:
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "old", "new", "code"),
    [
        (KERAS, "", "", None),
        (KERAS, "optimizer=optimizer", "optimizer='adam'", "other_optimizer"),
        (KERAS, "model.compile(", "optimizer = Adam()\nmodel.compile(", "other_optimizer"),
        (KERAS, "=9)\n", "=9, callbacks=[EarlyStopping(monitor='val_loss')])\n", None),
        (KERAS, "=9)\n", "=9, callbacks=[EarlyStopping(monitor='loss')])\n", "data_dependent_stop"),
        (KERAS, "=9)\n", "=9, callbacks=[EarlyStopping('loss')])\n", "data_dependent_stop"),
        (KERAS, "model.fit(x, y", "x = load()\nmodel.fit(x, y, validation_data=(x, y), "
         "callbacks=[EarlyStopping()]", "data_dependent_stop"),
        (KERAS, "=9)\n", "=9, validation_data=(a, b), callbacks=[EarlyStopping()])\n", None),
        (KERAS, "model.fit(", "import re\nre.search('a', 'b')\nmodel.fit(", None),
        (KERAS, "=9)\n", "=9, validation_split=0.1, callbacks=[ModelCheckpoint('m', "
         "save_best_only=True)])\n", "data_dependent_stop"),
        (KERAS, "=9)\n", "=9, validation_split=0.1, callbacks=[ModelCheckpoint('m')])\n", None),
        (KERAS, "=9)\n", "=9, callbacks=[ModelCheckpoint('m', monitor='accuracy', "
         "save_best_only=True)])\n", "data_dependent_stop"),
        (KERAS, "=9)\n", "=9, callbacks=[ModelCheckpoint('m', monitor='loss', "
         "save_best_only=False)])\n", None),
        (KERAS, "model.fit(", "model.compile(optimizer='adam')\nmodel.fit(", "other_optimizer"),
        (KERAS, "model.compile(", "model.compile(optimizer='adam')\nmodel.compile(", None),
        (KERAS, "model.fit(", "x = load()\nmodel.layers[0].set_weights(x)\nmodel.fit(",
         "other_optimizer"),
        (KERAS, "model.fit(", "x = load()\nfor e in range(3):\n    if model.evaluate(x) > 9:\n"
         "        break\n    model.fit(", "data_dependent_stop"),
        (KERAS, "model.fit(", "x = load()\nfor e in range(3):\n    if model.evaluate(a) > 9:\n"
         "        break\n    model.fit(", None),
        (PRIVATE_MODEL, "", "", None),
        (KERAS, "model.compile(", "model.add(BatchNormalization())\nmodel.compile(",
         "joined_records"),
        (ENGINE, "", "", None),
        (ENGINE, "step()", "step(loss=f(m(x)).topk(3))", "joined_records"),
        (ENGINE, "step()", "step(loss=m(x).loss.unsqueeze(0))", "joined_records"),
        (ENGINE, "step()", "step(loss=f(m(x)).mean(dim=1))", None),
        (ENGINE, "    optimizer.step()", "    loss = f(m(x), reduction='none')\n"
         "    optimizer.step(loss=loss.topk(3).values)", "joined_records"),
        (ENGINE, "engine.attach(optimizer)\n", "", "other_optimizer"),
        (ENGINE, "optimizer.step()", "optimizer.virtual_step()\n    optimizer.step()",
         "repeated_gradients"),
        (ENGINE, "attach(optimizer)", "attach(other)", "other_optimizer"),
    ],
)  # fmt: skip
def test_what_the_private_call_makes_is_what_trains(
    text: str, old: str, new: str, code: str | None
) -> None:
    assert is_right(text[::-1].replace(old[::-1], new[::-1], 1)[::-1], faulty=code is not None)


def test_one_of_two_fits_that_exclude_each_other_trains() -> None:
    fit = "model.fit(x, y, epochs=3, batch_size=9{})\n"
    either = (
        "if w is None:\n    " + fit.format("") + "else:\n    " + fit.format(", sample_weight=w")
    )
    partial = importer.read(KERAS.replace(fit.format(""), either).encode())
    assert partial is not None
    assert (partial.data["epochs"], partial.data["sampling"]["lot_size"]) == (3, 9)


def test_the_passes_of_a_progress_bar_that_is_opened_are_read() -> None:
    loop = "for e in range(3):\n    with tqdm(loader) as bar:\n        for x in bar:\n"
    step = "            f(x).backward()\n            optimizer.step()\n"
    for opened, epochs in (("tqdm(loader)", 3), ("tqdm(other)", None), ("mine(loader)", None)):
        text = HEAD + PRIVATE + loop.replace("tqdm(loader)", opened) + step
        partial = importer.read(text.encode())
        assert partial is not None
        assert partial.data.get("epochs") == epochs


LIGHTNING = """\
from opacus import PrivacyEngine
class Module(LightningModule):
    def configure_optimizers(self):
        _, private, _ = PrivacyEngine().make_private(module=self, optimizer=o,
            data_loader=self.trainer.train_dataloader, noise_multiplier=1.0, max_grad_norm=1.0)
        return private
trainer = Trainer(max_epochs=3)
trainer.fit(Module(), DPLightningDataModule(data))
"""


def test_the_loop_of_a_trainer_is_asked_about() -> None:
    assert is_stopped(LIGHTNING)


def test_cells_that_run_python_below_a_magic_command_are_read() -> None:
    cells = [HEAD + PRIVATE, "%%time\n" + EACH + LOSS, "%%bash\npip install opacus"]
    document = {"cells": [{"cell_type": "code", "source": text} for text in cells]}
    partial = importer.read(notebook_source(json.dumps(document).encode()))
    assert partial is not None
    assert partial.data["epochs"] == 3


FOLDS = "for fold in folds.split(data):\n"
KERAS_IN_FOLDS = (
    "from tensorflow_privacy import DPKerasSGDOptimizer\n"
    + FOLDS
    + "    optimizer = DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0)\n"
    "    model.compile(optimizer=optimizer)\n"
    "    model.fit(x, y, epochs=3, batch_size=6)\n"
)
KERAS_TWICE = KERAS_IN_FOLDS.replace(FOLDS, "if True:\n") + (
    "model.fit(x, y, epochs=3, batch_size=6)\n"
)
TRAINER = (
    "import dp_transformers\n" + FOLDS + "    told = dp_transformers.TrainingArguments(\n"
    "        per_device_train_batch_size=6, num_train_epochs=3)\n"
    "    private = dp_transformers.PrivacyArguments(noise_multiplier=1.0)\n"
    "    trainer = dp_transformers.OpacusDPTrainer(args=told, privacy_args=private)\n"
    "    trainer.train()\n"
)
OPTAX = (
    "import optax\ntx = optax.contrib.differentially_private_aggregate(1, 1.0, 0)\n"
    "for e in range(3):\n    for batch in rows:\n        u, s = tx.update(g(batch), s)\n"
)
INDENTED = "".join(f"    {line}\n" for line in (EACH + LOSS).splitlines())
IN_FOLDS = HEAD + PRIVATE + FOLDS + INDENTED
RUN = HEAD + PRIVATE + f"def run():\n{INDENTED}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (IN_FOLDS, 6),
        (IN_FOLDS.replace(FOLDS, "while more():\n"), 6),
        (IN_FOLDS.replace(FOLDS, "for fold in range(n):\n"), 6),
        (HEAD + PRIVATE + f"def run():\n{INDENTED}{FOLDS}    run()\n", 12),
        (HEAD + PRIVATE + EACH.replace("3", "n") + LOSS, None),
        (RUN + "run()\nrun()\n", 6),
        (RUN + "study.optimize(run, n_trials=9)\n", 12),
        (RUN + "Pool(4).map(partial(run, 1), range(9))\n", 12),
        (RUN + "[run() for seed in seeds]\n", 12),
        (RUN + "each = lambda: run()\n", 12),
        (RUN + "app.run(run)\n", None),
        (KERAS_IN_FOLDS, 2),
        (KERAS_TWICE, 6),
        (TRAINER, 2),
        (OPTAX, 4),
    ],
)
def test_what_repeats_training_is_asked_about_unless_it_is_one_number(
    text: str, line: int | None
) -> None:
    partial = importer.read(f"{text}# affidavit: epochs=3\n".encode())
    assert partial is not None
    lines = [use.line for use in partial.open_uses]
    assert line in lines or (line is None and partial.data["epochs"] == 3 and not lines)


PLAIN = "other = SGD(m.parameters())\nfor x in others:\n    f(x).backward()\n    other.step()\n"
ACCUMULATING = "        with accelerator.accumulate(model):\n    " + LOSS.replace(
    "\n        ", "\n            "
)
PARTS = "BatchMemoryManager(data_loader=loader, optimizer=optimizer)"


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (PLAIN + PRIVATE + EACH + LOSS, {"other_optimizer"}),
        (PLAIN.replace("m.p", "n.p") + PRIVATE + EACH + LOSS, set()),
        (
            PRIVATE + PLAIN.replace("m.p", "model.head.p") + EACH + LOSS,
            {"other_optimizer", "accumulated_lots"},
        ),
        (
            "def plain(m):\n    for x in others:\n        other = SGD(m.parameters())\n"
            "        f(x).backward()\n        other.step()\n" + PRIVATE + EACH + LOSS,
            set(),
        ),
        ("accelerator = Accelerator()\n" + PRIVATE + EACH + ACCUMULATING, set()),
        (
            "accelerator = Accelerator(gradient_accumulation_steps=4)\n"
            + PRIVATE + EACH + ACCUMULATING,
            {"accumulated_lots"},
        ),
        ("data = ConcatDataset([data, more])\n" + PRIVATE + EACH + LOSS, set()),
        (
            f"{PRIVATE}with {PARTS} as parts:\n    bar = tqdm(parts)\n    for x in bar:\n"
            "        if x is last: break\n" + LOSS,
            {"repeated_gradients"},
        ),
        (
            f"{PRIVATE}opened = {PARTS} if big else nullcontext(loader)\n"
            "with opened as parts:\n    for x in parts:\n        if late: break\n" + LOSS,
            {"repeated_gradients"},
        ),
    ],
)  # fmt: skip
def test_what_trains_beside_a_lot_or_within_one_is_found(text: str, codes: set[str]) -> None:
    assert is_right(HEAD + text, faulty=bool(codes))


def test_noise_that_an_unknown_accountant_calibrates_is_not_read() -> None:
    arguments = ARGUMENTS.replace("noise_multiplier=1.0", "target_epsilon=8.0, epochs=3")
    text = HEAD.replace("Engine()", "Engine(accountant=['rdp'])") + PRIVATE.replace(
        f"make_private({ARGUMENTS}", f"make_private_with_epsilon({arguments}, target_delta=1e-5"
    )
    partial = importer.read(
        f"{text}{EACH}        optimizer.step()\n# affidavit: dataset_size=60\n".encode()
    )
    assert partial is not None
    with pytest.raises(MalformedPlan, match="accountant"):
        partial.completed({}, "train.py")


@pytest.mark.parametrize(
    ("line", "lacking"),
    [
        ("", set()),
        ("trainer.use_cuda_amp = False", set()),
        ("trainer.args.gradient_checkpointing = False", set()),
        ("self.num_train_epochs = 9", set()),
        ("told.num_train_epochs = 9", {"epochs"}),
        ("trainer.args.max_steps = 999", {"epochs"}),
        ("setattr(told, 'num_train_epochs', 9)", {"epochs"}),
        ("told.gradient_accumulation_steps = 8", {"lot_size"}),
    ],
)
def test_settings_that_change_once_they_are_made_are_asked_for(
    line: str, lacking: set[str]
) -> None:
    text = TRAINER.replace(FOLDS, "if True:\n").replace(
        "    trainer.t", f"    {line}\n    trainer.t"
    )
    partial = importer.read(text.encode())
    assert partial is not None
    known = {"epochs": partial.data.get("epochs"), **partial.data["sampling"]}
    assert {key for key in ("epochs", "lot_size") if known.get(key) is None} == lacking


def test_what_a_notebook_asks_of_its_shell_is_left_out() -> None:
    cells = ["SGD?\nSGD.step??\n", "files = !ls\nhere = %pwd\n", HEAD + PRIVATE + EACH + LOSS]
    document = {"cells": [{"cell_type": "code", "source": text} for text in cells]}
    partial = importer.read(notebook_source(json.dumps(document).encode()))
    assert partial is not None
    assert partial.data["epochs"] == 3
    cells[1] = "n = !wc -l data\n"
    cells[2] = cells[2].replace("range(3)", "range(n)")
    document = {"cells": [{"cell_type": "code", "source": text} for text in cells]}
    partial = importer.read(notebook_source(json.dumps(document).encode()))
    assert partial is not None
    assert "epochs" not in partial.data


def test_what_reads_a_device_or_unpacks_attributes_is_not_asked_about() -> None:
    meter = "class Meter:\n    def show(self): return '{a}'.format(**self.__dict__)\n"
    where = "import torch\nzero = torch.zeros(1).to(model.device)\n"
    partial = importer.read((HEAD + meter + PRIVATE + where + EACH + LOSS).encode())
    assert partial is not None
    assert partial.data["epochs"] == 3
    plain = importer.read((HEAD + PRIVATE + EACH + LOSS).encode())
    assert plain is not None
    assert len(partial.open_uses) == len(plain.open_uses)


@pytest.mark.parametrize(
    ("cell", "is_open"),
    [
        ({"source": "%run more.py"}, True),
        ({"source": "n = !pip list && python more.py"}, True),
        ({"source": "%%timeit\ntrain()"}, True),
        ({"source": "ip = get_ipython()\nip.run_cell(text)"}, True),
        ({"source": "s = 1", "metadata": {"tags": ["parameters"]}}, True),
        ({"source": "s = 1", "execution_count": 1}, True),
        ({"source": "%matplotlib inline\npip install opacus\n%%time\n!nvidia-smi"}, False),
        ({"source": "!python more.py", "cell_type": "raw"}, False),
    ],
)
def test_what_a_notebook_may_run_beside_its_cells_is_asked(
    cell: dict[str, Any], *, is_open: bool
) -> None:
    first = {"cell_type": "code", "source": HEAD + PRIVATE, "execution_count": 2}
    last = {"cell_type": "code", "source": EACH + LOSS, "execution_count": 3}
    document = {"cells": [first, {"cell_type": "code"} | cell, last]}
    partial = import_file("train.ipynb", json.dumps(document).encode())
    assert partial is not None
    assert partial.data["epochs"] == 3
    assert [use.line for use in partial.open_uses] == [7] * is_open


def test_a_stated_length_is_said_to_be_that_of_all_runs() -> None:
    text = HEAD + f"def objective(trial):\n    {PRIVATE}{INDENTED}"
    for end, why in (("study.optimize(objective)\n", "objective is passed on"), ("", "no call")):
        partial = importer.read(f"{text}{end}# affidavit: epochs=30\n".encode())
        assert partial is not None
        (told,) = (note for note in partial.assumed if "of all runs" in note)
        assert why in told


def test_a_loader_that_a_constructor_is_given_is_read() -> None:
    private = PRIVATE.replace("loader", "self.loader").replace("data_self.", "data_")
    text = (
        "class Run:\n    def __init__(self, lots):\n        self.loader, self.n = lots, 3\n"
        f"        {private}    def go(self):\n        for e in range(3):\n"
        "            for x in self.loader:\n                optimizer.step()\nRun(loader).go()\n"
    )
    partial = importer.read((HEAD + text).encode())
    assert partial is not None
    assert (partial.data["sampling"]["lot_size"], partial.data["epochs"]) == (6, 3)


@pytest.mark.parametrize(
    ("options", "drop_last"),
    [
        ("", False),
        (", drop_last=False", False),
        (", drop_last=True", None),
        (", drop_last=d", False),
    ],
)
def test_a_loader_that_drops_no_lot_leaves_no_record_out(
    options: str, drop_last: bool | None
) -> None:
    head = HEAD.replace("batch_size=6", "batch_size=6, shuffle=True" + options)
    text = head + PRIVATE.replace("m)", "m, poisson_sampling=False)").replace(
        "max_grad_norm=1.0", "max_grad_norm=1.0, poisson_sampling=False"
    )
    partial = importer.read((text + EACH + "        optimizer.step()\n").encode())
    assert partial is not None
    given = {"adjacency": "zero_out", "dataset": {"size": 100}, "target": {"delta": 1e-5}}
    sampling = partial.completed(given, partial.kind)["sampling"]
    assert sampling["scheme"] == "shuffled"
    assert sampling.get("drop_last") is drop_last
