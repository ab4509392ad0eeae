"""Loops of TF Privacy are replayed unchanged, and what a record changes in them is found.

``make try-tensorflow`` runs this in an environment that has TensorFlow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from affidavit.evidence import ReplayRecord
from affidavit.replay import replay_command, to_text
from affidavit.replay.driver import PACKAGES, Launch, interpreter

LOOP = """\
import numpy as np
import tensorflow as tf
import tensorflow_privacy

draw = np.random.default_rng(7)
x = draw.normal(size=(200, 6)).astype(np.float32)
y = draw.integers(0, 4, 200)
y = tf.keras.utils.to_categorical(y, num_classes=4)
# data
layers = [
    tf.keras.layers.Dense(8, activation="relu", input_shape=(6,)),
    # layer
    tf.keras.layers.Dense(4),
]
model = tf.keras.Sequential(layers)
optimizer = tensorflow_privacy.DPKerasSGDOptimizer(
    l2_norm_clip=1.0, noise_multiplier=1.1, num_microbatches=20, learning_rate=0.1)
loss = tf.keras.losses.CategoricalCrossentropy(
    from_logits=True, reduction=tf.losses.Reduction.NONE)
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
model.fit(x, y, epochs=3, batch_size=20, verbose=0)
model.save_weights("weights.h5")
"""
FIT = "model.fit(x, y, epochs=3, batch_size=20, verbose=0)\n"
OF_TENSORS = """\
pairs = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(200).batch(20, drop_remainder=True)
"""
OWN_LOOP = (
    OF_TENSORS
    + """\
@tf.function
def step(rows, labels):
    with tf.GradientTape(persistent=True) as tape:
        value = loss(labels, model(rows, training=True))
        # tape
    pairs = optimizer._compute_gradients(value, model.trainable_variables, tape=tape)
    optimizer.apply_gradients(pairs)
    # step
    return tf.reduce_mean(value)

for epoch in range(3):
    for rows, labels in pairs:
        value = step(rows, labels)
        # after
"""
)
ORDINARY_OPTIMIZER = {
    "tensorflow_privacy.DPKerasSGDOptimizer(\n"
    "    l2_norm_clip=1.0, noise_multiplier=1.1, num_microbatches=20, learning_rate=0.1)":
    "tf.keras.optimizers.SGD(0.1)",
    "Reduction.NONE": "Reduction.AUTO",
}  # fmt: skip
SEQUENTIAL = "model = tf.keras.Sequential(layers)"
OF_MODEL = "model = tensorflow_privacy.DPSequential(1.0, 1.1, 20, layers=layers)"
FAST = (
    "from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry\n"
    "layers = [tf.keras.layers.InputLayer((6,)), *layers]\n"
    "registry = layer_registry.make_default_layer_registry()\n"
    "model = tensorflow_privacy.DPSequential(\n"
    "    1.0, 1.1, 20, use_xla=False, layer_registry=registry, layers=layers)"
)
HONEST = {
    "optimizer": {},
    "vectorized optimizer": {"DPKerasSGD": "VectorizedDPKerasSGD"},
    "Adam, a record a microbatch": {"DPKerasSGD": "DPKerasAdam", "=20, learning_rate=0.1": "=None"},
    "microbatches of four records": {"num_microbatches=20": "num_microbatches=5"},
    "drop-out": {"# layer": "tf.keras.layers.Dropout(0.3),"},
    "model": {SEQUENTIAL: OF_MODEL, **ORDINARY_OPTIMIZER},
    "model with fast clipping": {SEQUENTIAL: FAST, **ORDINARY_OPTIMIZER},
    "tf.data": {FIT: OF_TENSORS + "model.fit(pairs, epochs=3, verbose=0)\n"},
    "own loop": {FIT: OWN_LOOP},
    "scores of all records": {
        FIT: f"{FIT}score = (model.predict(x, verbose=0).argmax(1) == y.argmax(1)).mean()\n"
        "model.evaluate(x, y, verbose=0)\nmodel.fit(x, y, epochs=1, batch_size=20, verbose=0)\n"
    },
}
CALLBACK = "model.fit(x, y, epochs=6, batch_size=20, verbose=0, callbacks=[tf.keras.callbacks."
FAULTS = {
    "batch normalisation": (
        {"# layer": "tf.keras.layers.BatchNormalization(),"},
        "state_differs",
        "batch_normalization/moving_mean",
    ),
    "layer adapted to the records": (
        {
            "# data": "norm = tf.keras.layers.Normalization(input_shape=(6,))\nnorm.adapt(x)",
            "layers = [": "layers = [norm,",
        },
        "state_differs",
        "mean",
    ),
    "all records are scaled by their mean": (
        {"# data": "x = x - x.mean(axis=0)"},
        "sensitivity_exceeded",
        None,
    ),
    "rows are centred in their batch": (
        {FIT: OWN_LOOP.replace("model(rows,", "model(rows - tf.reduce_mean(rows, axis=0),")},
        "records_mixed",
        None,
    ),
    "learning rate by the training loss": (
        {FIT: CALLBACK + "ReduceLROnPlateau(monitor='loss', patience=0, min_delta=0.01)])\n"},
        "state_differs",
        "learning_rate",
    ),
    "stop by the training loss": (
        {
            FIT: CALLBACK + "LambdaCallback(on_epoch_end=lambda epoch, logs: "
            "setattr(model, 'stop_training', logs['loss'] < 1.58))])\n"
        },
        "steps_differ",
        None,
    ),
    "best weights by training loss": (
        {
            FIT: CALLBACK + "ModelCheckpoint('best.h5', monitor='loss', save_best_only=True, "
            "save_weights_only=True)])\n"
        },
        "file_differs",
        "best.h5",
    ),
    "moving loss sets the learning rate": (
        {
            FIT: "mean = tf.Variable(0.0)\n" + OWN_LOOP.replace(
                "# after",
                "mean.assign(0.9 * mean + 0.1 * value)\n"
                "        optimizer.learning_rate.assign(0.1 / (1 + mean))",
            )
        },
        "state_differs",
        "learning_rate",
    ),
    "a bias is also trained without noise": (
        {
            FIT: "other = tf.keras.optimizers.SGD(0.1)\n" + OWN_LOOP.replace(
                "# step",
                "bias = model.trainable_variables[-1]\n"
                "    other.apply_gradients([(tape.gradient(value, bias), bias)])",
            )
        },
        "state_differs",
        "bias",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    """An interpreter that has imported TensorFlow once."""
    with interpreter(sys.executable, PACKAGES["tensorflow_privacy"]) as started:
        yield started


def replayed(folder: Path, launch: Launch, changes: dict[str, str]) -> ReplayRecord:
    """Replay the loop with changes of its text."""
    text = LOOP
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "train.py").write_text(text)
    return replay_command([sys.executable, "train.py"], folder=folder, records=2, launch=launch)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_loop_is_not_refuted(tmp_path: Path, launch: Launch, name: str) -> None:
    record = replayed(tmp_path, launch, HONEST[name])
    shown = {check for check, verdict in record.checks if verdict == "shown"}
    assert record.verdict == "not_refuted", to_text(record)
    assert record.steps in (6, 8)
    assert {"sensitivity", "non_interference", "noise"} <= shown, to_text(record)
    assert record.largest_move is not None
    assert 0 < record.largest_move <= 1


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_record_changes_is_found(tmp_path: Path, launch: Launch, name: str) -> None:
    changes, code, subject = FAULTS[name]
    record = replayed(tmp_path, launch, changes)
    assert record.verdict == "refuted", to_text(record)
    found = [item for item in record.findings if item.code == code]
    assert found, to_text(record)
    assert subject is None or subject in str(found[0].subject), to_text(record)


def test_a_batch_of_unknown_records_is_refused(tmp_path: Path, launch: Launch) -> None:
    mapped = OF_TENSORS.replace(".shuffle", ".map(lambda a, b: (2 * a, b)).shuffle")
    with pytest.raises(Exception, match="from_tensor_slices"):
        replayed(tmp_path, launch, {FIT: mapped + "model.fit(pairs, epochs=3, verbose=0)\n"})
