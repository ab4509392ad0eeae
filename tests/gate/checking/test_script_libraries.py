"""Scripts of other libraries than Opacus: what hides noise or steps is refused or asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan
from tests.gate.checking.script_codes import is_right, is_stopped

KERAS = "from tensorflow_privacy import DPKerasSGDOptimizer\n"
OPTIMIZER = "o = DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=4.0, num_microbatches=6)\n"
FIT = "model.fit(x, y, 6, 2)\n"
USED = "model.compile(optimizer=o)\n" + FIT
ENGINE = (
    "from private_transformers import PrivacyEngine\n"
    "e = PrivacyEngine(m, batch_size=6, sample_size=60, noise_multiplier=4.0, max_grad_norm=1)\n"
)
JAX = "from jax_privacy import execution_plan as p\n"
CONFIG = "c = p.DpsgdConfig(iterations=10, expected_participations=1, noise_multiplier=4.0)\n"
EVENTS = (
    "import dp_accounting as d\nevent = d.PoissonSampledDpEvent(0.01, d.GaussianDpEvent(4.0))\n"
)
TRAINER = (
    "import dp_transformers as t\n"
    "trainer = t.dp_utils.OpacusDPTrainer(args=t.TrainingArguments(num_train_epochs=2),"
    " privacy_args=t.PrivacyArguments(noise_multiplier=4.0), model=m)\n"
)


TOLD = (
    "from tensorflow_privacy import compute_dp_sgd_privacy as told\n"
    "tensorflow_privacy.compute_dp_sgd_privacy(n=60, batch_size=6, noise_multiplier=4.0, "
    "epochs=1, delta=1e-3)\n"
)


def data_of(text: str) -> dict[str, Any]:
    partial = importer.read(text.encode())
    assert partial is not None
    return partial.data


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import optax\ntx = optax.chain(optax.contrib.differentially_private_aggregate(2, 4.0, 0),"
         " optax.sgd(1))\nu, s = tx.update(g, s)\n", ""),
        ("from optax import dpsgd\ntx = dpsgd(0.1, 2, 4.0, 3)\nu, s = tx.update(g, s)\n", ""),
        ("import objax\ngv = objax.privacy.dpsgd.PrivateGradValues(loss, v, 4.0, 2, 1)\ngv(x)\n",
         ""),
        ("import objax as o\ngv = o.privacy.dpsgd.PrivateGradValues(loss, v, "
         "noise_multiplier=4.0, l2_norm_clip=2, microbatch=9)\ngv(x)\n", "microbatches"),
        ("from torchdp import PrivacyEngine\ne = PrivacyEngine(m, 6, 60, max_grad_norm=2,"
         " noise_multiplier=4.0)\ne.attach(o)\no.step()\n", ""),
    ],
)  # fmt: skip
def test_the_noise_of_jax_and_first_libraries_is_read(text: str, code: str) -> None:
    partial = importer.read(text.encode())
    assert partial is not None
    assert partial.data["releases"][0] == {"name": "all", "clip_norm": 2, "noise_multiplier": 4.0}
    assert {item.code for item in partial.broken} == {"private_divisor", code} - {""}


PYVACY = """\
from argparse import ArgumentParser
from pyvacy import optim, sampling
parser = ArgumentParser()
parser.add_argument("--size", type=int, default=6)
params = vars(parser.parse_args())
o = optim.DPSGD(1.0, 4.0, params["size"], 1, params=model.parameters())
minibatch_loader, microbatch_loader = sampling.get_data_loaders(6, 1, 30)
for lot in minibatch_loader(data):
    for x, y in microbatch_loader(lot):
        o.zero_microbatch_grad()
        f(model(x), y).backward()
        o.microbatch_step()
    o.step()
"""


@pytest.mark.parametrize(
    ("old", "new", "steps", "codes"),
    [
        ("", "", 30, set()),
        ("for lot", "for e in range(3):\n  for lot", 90, set()),
        ("minibatch_loader", "lots", None, set()),
        ('params["size"], 1', 'params["size"], 2', 30, {"microbatches"}),
        ('params["size"], 1', "batch_size=6", 30, {"microbatches"}),
        ("        o.microbatch_step()\n", "", 30, {"accumulated_lots"}),
    ],
)
def test_each_record_of_pyvacy_is_a_microbatch(
    old: str, new: str, steps: int | None, codes: set[str]
) -> None:
    head, _, loop = PYVACY.partition("for lot")
    text = PYVACY.replace(old, new)
    if new.startswith("for e"):
        text = (
            head
            + "for e in range(3):\n"
            + "".join(f"    {line}\n" for line in ("for lot" + loop).splitlines())
        )
    partial = importer.read(text.encode())
    assert partial is not None
    assert partial.data["sampling"]["lot_size"] == 6
    assert partial.data.get("steps") == steps
    assert {item.code for item in partial.broken} == codes


@pytest.mark.parametrize(
    "drawn",
    [
        "np.random.rand(60) < 0.1",
        "np.random.choice(60, 6)",
    ],
)
def test_lots_that_the_script_draws_are_asked_about(drawn: str) -> None:
    text = (
        "RATE = 0.1\nfrom opacus import PrivacyEngine\n"
        "e = PrivacyEngine(m, sample_rate=RATE, noise_multiplier=4.0, max_grad_norm=1.0)\n"
        f"e.attach(o)\nfor i in range(30):\n    mask = {drawn}\n    f(m(rows[mask])).backward()\n"
        "    o.step()\n"
    )
    assert data_of(text)["sampling"] == {"probability": 0.1}
    partial = importer.read(text.encode())
    assert partial is not None
    assert partial.open_uses


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import keras\nlayers = [keras.Lambda(lambda t: t - t.mean(0))]\n", "joined_records"),
        ("import keras\nlayers = [keras.Lambda(lambda t: t - t.mean(1))]\n", None),
        ("class Own(Layer):\n    def call(self, t):\n        return t - t.mean(0)\nOwn()\n",
         "joined_records"),
        ("def own(a, b):\n    return a - b.mean(0)\nmodel.compile(o, loss=own)\n",
         "joined_records"),
        ("def own(a, b):\n    return (a - b) ** 2\nmodel.compile(o, loss=own)\n", None),
        ("class Own(Callback):\n    def on_epoch_end(self, e, logs):\n"
         "        if logs['loss'] < 1:\n            self.model.save('best')\n",
         "data_dependent_stop"),
        ("class Own(Callback):\n    def on_epoch_end(self, e, logs):\n"
         "        if logs['val_loss'] < 1:\n            self.model.save('best')\n", None),
        ("def on_epoch_end(self, e, logs):\n    o.learning_rate = 0.1 * logs['loss']\n",
         "data_dependent_stop"),
        ("def on_epoch_end(self, e, logs):\n    o.lr.assign(logs['loss'])\n",
         "data_dependent_stop"),
        ("def on_epoch_end(self, e, logs):\n    o.lr.assign(logs['val_loss'])\n", None),
        ("model.compile(o, loss=lambda a, b: a - b.mean(0))\n", "joined_records"),
        ("model.add_loss(f(model(x)))\n", "joined_records"),
        ("model.add_loss(f(model.weights))\n", None),
        ("norm.adapt(x)\n", "other_optimizer"),
        ("norm.adapt(public)\n", None),
        ("x = scaler.fit_transform(x)\njoblib.dump(scaler, 's')\n", "other_optimizer"),
        ("x = scaler.transform(x)\njoblib.dump(scaler, 's')\n", None),
        ("model.fit(x, y, 6, 2, class_weight={1: y.mean()})\n", "joined_records"),
        ("model.fit(x, y, 6, 2, class_weight={1: 3})\n", None),
    ],
)  # fmt: skip
def test_layers_losses_and_hooks_of_keras_keep_records_apart(text: str, code: str | None) -> None:
    rows = "x, y = load()\n"
    fit = "" if ".fit(" in text else FIT
    script = KERAS + OPTIMIZER + rows + text + "use(o)\n" + fit
    assert is_right(script, faulty=code is not None)


KERAS_MODEL = """\
import tensorflow as tf
import tensorflow_hub as hub
from tensorflow.keras import layers
from tensorflow.keras.applications import EfficientNetB0, VGG16
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras import DPKerasSGDOptimizer
{model}
# affidavit: adjacency=zero_out dataset_size=50000 target_delta=1e-5
optimizer = DPKerasSGDOptimizer(
    l2_norm_clip=1.0, noise_multiplier=1.1, num_microbatches=50, learning_rate=0.1)
model.compile(optimizer=optimizer, loss=tf.keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction=tf.keras.losses.Reduction.NONE))
(x_train, y_train), (x_test, y_test) = tf.keras.datasets.cifar10.load_data()
model.fit(x_train, y_train, epochs=1, batch_size=50)
"""


@pytest.mark.parametrize(
    ("model", "is_read"),
    [
        ("model = tf.keras.Sequential([layers.Flatten(), layers.Dense(10)])", True),
        ("model = VGG16(weights=None, classes=10)", True),
        ("model = EfficientNetB0(weights=None, classes=10)", False),
        ("make = EfficientNetB0\nmodel = make(weights=None)", False),
        ("model = tf.keras.applications.resnet50.ResNet50(weights=None)", False),
        ("base = tf.keras.applications.MobileNetV2()\n"
         "model = tf.keras.Sequential([base, layers.Dense(10)])", False),
        ("model = tf.keras.models.clone_model(tf.keras.applications.DenseNet121())", False),
        ("model = tf.keras.Sequential([layers.experimental.SyncBatchNormalization()])", False),
        ("model = tf.keras.Sequential([hub.KerasLayer('a', trainable=True)])", False),
        ("model = tf.keras.Sequential()\nmodel.add(hub.KerasLayer('a', trainable=True))", False),
        ("model = tf.keras.models.load_model('a.h5')", False),
    ],
)  # fmt: skip
def test_layers_of_keras_that_are_not_read_are_asked_about(model: str, is_read: bool) -> None:
    assert is_stopped(KERAS_MODEL.format(model=model)) is not is_read


OPTAX = """\
import jax, optax
tx = {tx}
rows = load()
@jax.jit
def train_step(params, state, batch):
    {lot}
    grads = {grads}(params, batch['x'], batch['y'])
    updates, state = tx.update(grads, {state})
    params = optax.apply_updates(params, {updates})
    {after}
    return params, state, {result}
for e in range(3):
    for batch in rows.batches():
        params, state, told = train_step(params, state, batch)
        {end}
    acc = evaluate(params, others)
    if acc > best:
        save(params)
"""
RIGHT = {
    "tx": "optax.chain(optax.contrib.differentially_private_aggregate(1.0, 1.1, 0), optax.sgd(1))",
    "grads": "jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))",
    "state": "state",
    "updates": "updates",
} | dict.fromkeys(("lot", "after", "result", "end"), "epoch")


@pytest.mark.parametrize(
    ("part", "text", "code"),
    [
        ("end", "log(told)", None),
        ("result", "loss(params, batch['x'], batch['y'])", None),
        ("after", "def f(x):\n        return x", None),
        ("after", "ema = jax.tree.map(lambda a, b: a + b, ema, params)", None),
        ("tx", "optax.dpsgd(0.1, 1.0, 1.1, 0)", None),
        ("grads", "jax.grad(loss)", "joined_records"),
        ("lot", "batch['x'] = batch['x'] - batch['x'].mean(0)", "joined_records"),
        ("lot", "tx.init(params)", "repeated_noise"),
        ("state", "tx.init(params)", "repeated_noise"),
        ("updates", "jax.tree.map(lambda g: -g.mean(0), grads)", "other_optimizer"),
        ("after", "params = params - grads[0]", "other_optimizer"),
        ("end", "if evaluate(params, rows) > 9: break", "data_dependent_stop"),
        ("tx", "optax.chain(optax.clip(1), optax.dpsgd(0.1, 1.0, 1.1, 0))", "joined_records"),
    ],
)
def test_functions_of_jax_learn_from_clipped_gradients_alone(
    part: str, text: str, code: str | None
) -> None:
    assert is_right(OPTAX.format(**RIGHT | {part: text}), faulty=code is not None)


TAPE = """\
import tensorflow as tf
x, y = load()
rows = tf.data.Dataset.from_tensor_slices((x, y))
@tf.function
def train_step(x, y):
    {lot}
    with tf.GradientTape() as tape:
        loss = f(y, model(x))
        told = o._compute_gradients(loss, model.trainable_variables, tape=tape)
    o.apply_gradients(told)
    {after}
    return tf.reduce_mean(loss)
for x, y in rows:
    loss = train_step(x, y)
    {end}
"""


@pytest.mark.parametrize(
    ("part", "text", "code"),
    [
        ("end", "print(loss)", None),
        ("after", "other.apply_gradients(zip(tape.gradient(noise, w), w))", None),
        ("after", "other.apply_gradients(zip(tape.gradient(loss, w), w))", "other_optimizer"),
        ("lot", "x = x - tf.reduce_mean(x, axis=0)", "joined_records"),
        ("end", "if loss < 1: break", "data_dependent_stop"),
    ],
)
def test_steps_of_keras_that_a_script_takes_itself_are_followed(
    part: str, text: str, code: str | None
) -> None:
    parts = {"lot": "pass", "after": "pass", "end": "pass"} | {part: text}
    script = (KERAS + OPTIMIZER).replace("num_microbatches=6", "num_microbatches=None")
    assert is_right(script + TAPE.format(**parts), faulty=code is not None)


@pytest.mark.parametrize(("key", "broken"), [("loss", True), ("val_loss", False)])
def test_the_history_of_own_records_stops_nothing(key: str, broken: bool) -> None:
    loop = f"for e in range(3):\n    h = {FIT}    if h.history['{key}'][0] < 1: break\n"
    assert is_right(KERAS + OPTIMIZER + "use(o)\n" + loop, faulty=broken)


def test_a_method_of_a_class_of_the_file_has_arguments_of_its_own() -> None:
    own = "class Own:\n    def fit(self, *rows):\n        pass\nOwn().fit(*rows)\n"
    assert data_of(KERAS + OPTIMIZER + own + FIT)["releases"][0]["noise_multiplier"] == 4.0


@pytest.mark.parametrize(
    "text",
    [
        KERAS + "make = DPKerasSGDOptimizer\nq = make(noise_multiplier=0.1)\n" + OPTIMIZER + FIT,
        KERAS + "class DPKerasSGDOptimizer:\n    pass\n" + OPTIMIZER + FIT,
        KERAS + "from functools import partial\nmake = partial(DPKerasSGDOptimizer)\n" + FIT,
        KERAS + "import tensorflow_privacy as t\nq = getattr(t, 'DPKerasSGDOptimizer')()\n"
        + OPTIMIZER + FIT,
        "import tensorflow_privacy as t\nt.DPKerasSGDOptimizer = other\n"
        + OPTIMIZER.replace("DPK", "t.DPK") + FIT,
        KERAS + OPTIMIZER + "o._noise_multiplier = 0.1\n" + FIT,
        KERAS + OPTIMIZER + "o._dp_sum_query = other\n" + FIT,
        KERAS + OPTIMIZER.replace("4.0", "0.0") + FIT,
        KERAS + OPTIMIZER.replace("4.0", "noise()") + FIT + TOLD,
        KERAS + OPTIMIZER + "vars(o)['noise_multiplier'] = 0.1\n" + FIT,
        KERAS + OPTIMIZER + "own = o.__dict__\nown['noise_multiplier'] = 0.1\n" + FIT,
        KERAS + OPTIMIZER + "object.__setattr__(o, 'noise_multiplier', 0.1)\n" + FIT,
        ENGINE + "e.detach()\nfor i in range(3):\n    optimizer.step(loss=l)\n",
        JAX + CONFIG + "from dataclasses import replace\nc = replace(c, noise_multiplier=0.1)\n",
        JAX + CONFIG + "c = c.replace(noise_multiplier=0.1)\n",
        TRAINER + "trainer.train()\ntransformers.Trainer(model=m, args=a).train()\n",
        TRAINER + "trainer.hyperparameter_search(n_trials=9)\ntrainer.train()\n",
    ],
)  # fmt: skip
def test_what_may_change_the_noise_is_not_certified(text: str) -> None:
    assert is_stopped(text)


def test_a_trainer_that_keeps_the_best_model_is_asked_about() -> None:
    text = TRAINER.replace("=2", "=2, load_best_model_at_end=True") + "trainer.train()\n"
    partial = importer.read(text.encode())
    assert partial is not None
    assert any("by a metric" in use.message for use in partial.open_uses)


@pytest.mark.parametrize(
    "text",
    [
        KERAS + OPTIMIZER + FIT + FIT,
        KERAS + OPTIMIZER + FIT + "model.train_on_batch(x, y)\n",
        KERAS + OPTIMIZER + "run = model.fit\nrun(x, y, 6, 2)\n" + FIT,
        KERAS + OPTIMIZER + "model.fit(x, y, 6, 2, steps_per_epoch=500)\n",
        KERAS + OPTIMIZER + "while more():\n    model.fit(x, y, 6, 2)\n",
        EVENTS + "a.compose(event, 3)\na.compose(event, 3)\n",
        EVENTS + "a.compose(d.SelfComposedDpEvent(event, 10), 3)\n",
        EVENTS
        + "event = d.SelfComposedDpEvent(event, 10)\nfor i in range(9):\n    a.compose(event)\n",
        KERAS + OPTIMIZER + "model.fit(x, y, 6, epochs())\n" + TOLD,
        KERAS + OPTIMIZER + "for i in range(runs()):\n    model.fit(x, y, 6, 2)\n" + TOLD,
        KERAS + OPTIMIZER + "for x in data:\n    loss(x)\n" + TOLD,
        TRAINER + "trainer.train()\ntrainer.train()\n",
        TRAINER + "go(trainer)\n",
        TRAINER + "trainer.train(resume_from_checkpoint=True)\n",
        KERAS + OPTIMIZER + "grid = GridSearchCV(model, {'lr': [1, 2]})\ngrid.fit(x, y, 6, 2)\n",
    ],
)
def test_a_length_that_the_text_does_not_settle_is_not_read(text: str) -> None:
    assert not {"epochs", "steps"} & data_of(text).keys()


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (KERAS + OPTIMIZER + "for run in range(3):\n    model.fit(x, y, 6, 2)\n", {"epochs": 6}),
        (JAX + "for run in range(7):\n    " + CONFIG, {"steps": 70}),
        (EVENTS + "for run in range(100):\n    a.compose(event, 3)\n", {"steps": 300}),
        (TRAINER + "for run in range(4):\n    trainer.train()\n", {"epochs": 8}),
    ],
)
def test_loops_around_what_trains_are_counted(text: str, length: dict[str, int]) -> None:
    assert length.items() <= data_of(text).items()


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("import secrets\ntf.random.set_seed(secrets.randbits(31))\n", None),
        ("if 0:\n    torch.manual_seed(0)\n", None),
        ("model.load_weights('w')\n", "the weights that line 3 loads are public"),
    ],
)
def test_what_the_claim_rests_on_is_listed(line: str, note: str | None) -> None:
    partial = importer.read(
        (KERAS + "import tensorflow as tf\n" + line + OPTIMIZER + USED).encode()
    )
    assert partial is not None
    assert not partial.open_uses
    notes = [item for item in partial.assumed if "weights" in item]
    assert [note in item for item in notes if note] == ([True] if note else [])
    assert bool(notes) is bool(note)
    assert any("only the model is released" in item for item in partial.assumed)


@pytest.mark.parametrize("seed", ["tf.random.set_seed(0)", "torch.manual_seed(0)"])
def test_noise_of_a_seed_in_the_text_is_asked_about(seed: str) -> None:
    text = f"{KERAS}import tensorflow as tf, torch\n{seed}\n{OPTIMIZER}{USED}"
    partial = importer.read(text.encode())
    assert partial is not None
    assert [use.line for use in partial.open_uses] == [text[: text.index(seed)].count("\n") + 1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("other", "line", "is_asked_about"),
    [
        ("def fix(n):\n    torch.manual_seed(n)\ndef prepare(n):\n    fix(n)\n",
         "prepare(4)", True),
        ("def prepare(n):\n    return n\ntorch.manual_seed(4)\n", "prepare(4)", True),
        ("class prepare:\n    def __init__(self, n):\n        torch.manual_seed(n)\n",
         "prepare(4)", True),
        ("def fix(n):\n    torch.manual_seed(n)\ndef prepare(n):\n    print(n)\n",
         "prepare(seed=4)", False),
        ("def prepare(n):\n    g = torch.Generator()\n    g.manual_seed(n)\n", "prepare(4)", False),
        ("def prepare(n):\n    print(n)\nif __name__ == '__main__':\n    torch.manual_seed(4)\n",
         "prepare(4)", False),
    ],
)  # fmt: skip
def test_another_file_that_seeds_is_asked_about(
    other: str, line: str, is_asked_about: bool, folder: Path
) -> None:
    (folder / "tools.py").write_text("import torch\n" + other)
    text = f"from tools import prepare\n{KERAS}{line}\n{OPTIMIZER}{USED}"
    partial = importer.read(text.encode(), folder, name="train.py")
    assert partial is not None
    assert bool(partial.open_uses) is is_asked_about


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (TRAINER.replace("4.0", "4.0, disable_dp=True"), "privacy_disabled"),
        (TRAINER + "arguments.disable_dp = True\n", "privacy_disabled"),
        (KERAS + OPTIMIZER + "model.compile(optimizer='sgd')\nprint(o)\n", "other_optimizer"),
        (
            "import keras\n" + KERAS + OPTIMIZER
            + "model.compile(optimizer=keras.optimizers.SGD(0.1))\nprint(o)\n",
            "other_optimizer",
        ),
    ],
)  # fmt: skip
def test_a_private_call_that_does_not_train_is_named(text: str, code: str) -> None:
    partial = importer.read(text.encode())
    assert partial is not None
    assert code in {item.code for item in partial.broken}


def test_the_optimiser_of_the_other_branch_is_another() -> None:
    text = KERAS + "if private:\n    " + OPTIMIZER + "else:\n    o = keras.SGD()\n"
    partial = importer.read((text + "model.compile(optimizer=o)\n" + FIT).encode())
    assert partial is not None
    assert partial.broken == ()


KERAS_API = """\
import keras
from jax_privacy import keras_api
(x, y), _ = keras.datasets.mnist.load_data()
model = keras.Sequential([keras.layers.Flatten(), {layer}keras.layers.Dense(10)])
config = keras_api.DPKerasConfig(epsilon=2.0, delta=1e-5, clipping_norm=1.0, batch_size=256,
    train_steps=1000, train_size=60000, noise_multiplier=1.1, gradient_accumulation_steps=1{seed})
{before}
{private}
model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
model.fit(x, y, epochs=5, batch_size=256)
"""


@pytest.mark.parametrize(
    ("place", "text", "holds"),
    [
        ("before", "", True),
        ("private", "", False),
        ("seed", ", seed=0", False),
        ("layer", "keras.layers.Softmax(axis=0), ", False),
        ("before", "x[1:] = x[:-1]", False),
        ("before", "keras.callbacks.TerminateOnNaN()", False),
    ],
)
def test_a_model_of_keras_that_jax_privacy_makes_private(
    place: str, text: str, holds: bool
) -> None:
    parts = {"layer": "", "seed": "", "before": ""}
    parts |= {"private": "keras_api.make_private(model, config)", place: text}
    partial = importer.read(KERAS_API.format(**parts).encode())
    assert partial is not None
    faults = [item for item in partial.broken if item.adjacencies is None]
    assert (not faults and not partial.open_uses) is holds


SAMPLED = """\
from jax_privacy import noise_addition
from jax_privacy.batch_selection import {sampler}
lots = {sampler}({arguments})
# affidavit: noise_multiplier=4.0
private = noise_addition.gaussian_privatizer(stddev=4.0, prng_key=key)
for lot in lots.batch_iterator(60, rng=rng):
    update, state = private.update(gradients(params, lot), state)
"""


@pytest.mark.parametrize(
    ("sampler", "arguments", "drawn"),
    [
        ("CyclicPoissonSampling", "0.1, 100", {"scheme": "poisson", "probability": 0.1}),
        ("CyclicPoissonSampling", "0.1, 100, cycle_length=c", "cyclic_poisson"),
        ("CyclicPoissonSampling", "0.1, 100, 9", "truncated_poisson"),
        ("FixedBatchSampling", "6, 100", {"scheme": "fixed_size", "lot_size": 6}),
        ("FixedBatchSampling", "6, 100, replace=True", "without replacement"),
        ("BallsInBinsSampling", "iterations=100, cycle_length=5", {"scheme": "balls_in_bins"}),
        ("RandomAllocationSampling", "3, 100", {"scheme": "random_allocation"}),
        ("RandomAllocationSampling", "3, 100, cycle_length=2", "group"),
        ("BMinSepSampling", "0.1, 100, 4", {"scheme": "b_min_sep"}),
        ("BMinSepSampling", "0.1, 100, 4, warm_start=False", "warm"),
        ("UserSelectionStrategy", "base, 2", "records are users"),
        ("MultiOwnerMinSepSampling", "graph, 3, 4", "users_per_record"),
    ],
)
def test_each_sampler_of_jax_privacy_is_read_or_refused_by_name(
    sampler: str, arguments: str, drawn: dict[str, Any] | str
) -> None:
    text = SAMPLED.format(sampler=sampler, arguments=arguments)
    if isinstance(drawn, dict):
        assert data_of(text)["sampling"] == drawn
        text = text.replace("noise_multiplier", "scheme=cyclic noise_multiplier")
    with pytest.raises(MalformedPlan) as refused:
        importer.read(text.encode())
    (reason,) = refused.value.reasons
    expected = "given_conflict" if isinstance(drawn, dict) else "not_imported"
    assert reason.code == expected
    if isinstance(drawn, str):
        assert sampler in reason.message
        assert drawn in reason.remedy


def test_a_sampler_beside_a_plan_draws_the_plan_s_lots() -> None:
    text = "from jax_privacy.batch_selection import {0} as Lots\n" + JAX + CONFIG + "Lots(0.1, 9)\n"
    sampling = data_of(text.format("CyclicPoissonSampling"))["sampling"]
    assert sampling == {"scheme": "poisson", "probability": 0.1}
    with pytest.raises(MalformedPlan, match="draws balls_in_bins lots, and not poisson lots"):
        importer.read(text.format("BallsInBinsSampling").encode())


AGAIN = "model.compile(optimizer='sgd')\n"


@pytest.mark.parametrize(
    ("end", "trains"),
    [
        (USED + AGAIN + "model.evaluate(xt, yt)\n", False),
        (USED + AGAIN + FIT, True),
        (USED + AGAIN + "model.train_on_batch(x, y)\n", True),
        ("again = model.fit\n" + USED + AGAIN + "again(x, y)\n", True),
        ("for turn in range(2):\n    " + USED.replace("\n", "\n    ") + AGAIN, True),
        ("def run(first):\n    if first:\n        model.compile(optimizer=o)\n    "
         + FIT + "    " + AGAIN + "run(True)\nrun(False)\n", True),
        ("def learn():\n    " + FIT + "model.compile(optimizer=o)\nlearn()\n" + AGAIN
         + "learn()\n", True),
    ],
)  # fmt: skip
def test_a_model_may_be_compiled_again_only_to_be_evaluated(end: str, trains: bool) -> None:
    made = "import tensorflow as tf\nmodel = tf.keras.Sequential([tf.keras.layers.Dense(10)])\n"
    partial = importer.read((KERAS + made + OPTIMIZER + end).encode())
    assert partial is not None
    assert ("other_optimizer" in {item.code for item in partial.broken}) is trains


WRAPPED = """\
import copy
import torch
from model import create_model
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from peft import get_peft_model
from torchvision import datasets
loader = torch.utils.data.DataLoader(datasets.MNIST("data", train=True), batch_size=64)
{made}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()
# affidavit: adjacency=zero_out target_delta=1e-5
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
for epoch in range(3):
    for x, t in loader:
        optimizer.zero_grad()
        criterion(model(x), t).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("maker", ["torch.nn.Linear(784, 10)", "create_model()"])
@pytest.mark.parametrize(
    "made",
    [
        "model = {maker}",
        "model = {maker}\nmodel = ModuleValidator.fix(model)",
        "model = ModuleValidator.fix({maker})",
        "net = {maker}\nmodel = copy.deepcopy(net)",
        "net = {maker}\nmodel = get_peft_model(net, None)",
    ],
)
def test_a_copy_or_wrapper_of_a_model_that_is_not_read_is_asked_about(
    made: str, maker: str
) -> None:
    text = WRAPPED.format(made=made.format(maker=maker))
    assert is_stopped(text) is (maker == "create_model()")
