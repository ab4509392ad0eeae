"""What the calls of each training library mean: one entry a library.

A quantity of a plan is an expression of a call's arguments, as ``"batch_size"`` or
``"expected_participations / iterations"``. An argument that the call leaves out has the library's
default, or makes the quantity unknown. ``Rule`` lists what the library is known not to do, so that
no claim may rest on it. Facts are those of the libraries' own sources: TensorFlow Privacy 0.8 and
0.9, jax-privacy 2.0, private-transformers 0.2, fastDP, dp-transformers 1.0, Flower 1.x, pfl 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from affidavit.importers.base import Broken, is_number
from affidavit.importers.library import Call, Library, Rule


def _absent_or(expected: Any) -> Callable[[Any, Any], bool]:
    return lambda value, _: value is None or value == expected


_CLIPPED = {"noise_multiplier": "noise_multiplier", "clip_norm": "max_grad_norm"}
_TARGET = {"target_epsilon": "target_epsilon", "target_delta": "target_delta"}

PRIVATE_DIVISOR = Broken(
    code="private_divisor",
    adjacencies=("add_remove",),
    message="Opacus divides each sum by ⌊qN⌋, which is another number when a record is added or "
    "removed, so add_remove is not what this script provides (opacus#571, arXiv:2605.15648).",
    remedy="Call guard.opacus(...) after make_private, which fixes the divisor, or claim "
    "adjacency zero_out, under which the number of records is public.",
)
OPACUS = Library(
    name="Opacus",
    modules=("opacus",),
    private=Call(
        names=("make_private", "make_private_with_epsilon"),
        quantities=_CLIPPED | _TARGET,
    ),
    beside=(
        Call(names=("get_epsilon", "get_privacy_spent"), positional=("delta",),
             quantities={"target_delta": "delta"}, accounts=True),
    ),
    poisson=("poisson_sampling", True),
    notes=("all trainable parameters are taken as one release.",),
)  # fmt: skip

OPACUS_BEFORE_1 = Library(
    name="Opacus before 1.0",
    modules=("opacus",),
    private=Call(
        names=("PrivacyEngine",),
        positional=("module", "batch_size", "sample_size", "alphas", "noise_multiplier",
                    "max_grad_norm"),
        quantities=_CLIPPED
        | _TARGET
        | {
            "lot_size": "batch_size",
            "dataset_size": "sample_size",
            "probability": "sample_rate",
        },
    ),
    beside=(
        Call(
            names=("get_privacy_spent",),
            positional=("target_delta",),
            quantities={"target_delta": "target_delta"},
            accounts=True,
        ),
    ),
    rules=(
        Rule(
            argument="max_grad_norm",
            holds=lambda value, _: is_number(value),
            broken=Broken(
                code="noise_of_a_layer",
                message="max_grad_norm is not known to be one number. With one for each layer "
                "this version of Opacus adds to each layer the noise of its own norm, which is "
                "that of one layer alone.",
                remedy='Give one number, or add "# affidavit: clip_norm=..." with it. Else use '
                "Opacus 1.6, or write a plan with a release for each layer.",
            ),
        ),
    ),
    broken=(
        Broken(
            code="private_divisor",
            adjacencies=("add_remove",),
            message="Opacus before 1.0 divides by the number of records in each lot, which is "
            "another number when a record is added or removed.",
            remedy="Claim adjacency zero_out, or use Opacus 1.6 with guard.opacus(...).",
        ),
    ),
    notes=("the library draws no lots: they are those of the script's own loader.",),
)  # fmt: skip
OPACUS_OPTIMIZER = Library(
    name="Opacus' optimisers",
    modules=("opacus",),
    private=Call(
        names=(
            "DPOptimizer",
            "DPOptimizerFastGradientClipping",
            "DistributedDPOptimizer",
            "DistributedDPOptimizerFastGradientClipping",
            "FSDPOptimizerFastGradientClipping",
        ),
        positional=("optimizer",),
        quantities=_CLIPPED | {"lot_size": "expected_batch_size"},
    ),
    notes=("lots are those of the script's own loader.",),
)

_KERAS_FIT = Call(
    names=("fit",),
    positional=("x", "y", "batch_size", "epochs"),
    quantities={"lot_size": "batch_size", "epochs": "epochs"},
    trains=True,
)
_TF_STATEMENTS = (
    Call(
        names=("compute_dp_sgd_privacy",),
        positional=("n", "batch_size", "noise_multiplier", "epochs", "delta"),
        quantities={"dataset_size": "n", "lot_size": "batch_size", "target_delta": "delta",
                    "noise_multiplier": "noise_multiplier", "epochs": "epochs"},
        accounts=True,
    ),
    Call(
        names=("compute_dp_sgd_privacy_statement",),
        positional=("number_of_examples", "batch_size", "num_epochs", "noise_multiplier", "delta"),
        quantities={"dataset_size": "number_of_examples", "lot_size": "batch_size",
                    "target_delta": "delta", "noise_multiplier": "noise_multiplier",
                    "epochs": "num_epochs"},
        accounts=True,
    ),
    Call(names=("get_privacy_spent",), quantities={"target_delta": "target_delta"}, accounts=True),
)  # fmt: skip
_TF_OPTIMIZERS = (
    "DPModel",
    "DPSequential",
    *(
        f"{prefix}{kind}{suffix}"
        for prefix, suffix in (
            ("DPKeras", "Optimizer"),
            ("VectorizedDPKeras", "Optimizer"),
            ("VectorizedDP", "Optimizer"),
            ("VectorizedDP", ""),
            ("DP", "GaussianOptimizer"),
        )
        for kind in ("SGD", "GradientDescent", "Adam", "Adagrad", "RMSProp")
    ),
)
_MICROBATCHES = Broken(
    code="microbatches",
    message="num_microbatches is not known to be the batch size. A record changes the clipped "
    "mean of its whole microbatch by up to twice l2_norm_clip, so that the noise is half of what "
    "noise_multiplier says.",
    remedy="Leave one record in each microbatch (num_microbatches = batch size), or write a plan "
    "with half the noise multiplier.",
)
TENSORFLOW = Library(
    name="TensorFlow Privacy",
    modules=("tensorflow_privacy", "privacy"),
    private=Call(
        names=_TF_OPTIMIZERS,
        positional=("l2_norm_clip", "noise_multiplier", "num_microbatches"),
        quantities={"noise_multiplier": "noise_multiplier", "clip_norm": "l2_norm_clip"},
    ),
    beside=(_KERAS_FIT, *_TF_STATEMENTS),
    scheme="shuffled",
    rules=(
        Rule(
            argument="num_microbatches",
            holds=lambda value, lot: value is None or (lot is not None and value == lot),
            broken=_MICROBATCHES,
        ),
        Rule(
            argument="num_microbatches",
            holds=lambda value, _: value is not None,
            broken=Broken(
                code="private_divisor",
                adjacencies=("add_remove",),
                message="without num_microbatches TensorFlow Privacy divides by the number of "
                "records in each lot, which is another number when a record is added or removed.",
                remedy="Give num_microbatches, or claim adjacency zero_out.",
            ),
        ),
        Rule(
            argument="gradient_accumulation_steps",
            holds=_absent_or(1),
            broken=Broken(
                code="accumulated_noise",
                message="with gradient_accumulation_steps the optimiser adds noise to each part "
                "of a lot, which is not accounted here.",
                remedy="Write a plan with the noise of the whole lot.",
            ),
        ),
    ),
    notes=("without a sampler of the script's own no amplification is claimed.",),
)
TENSORFLOW_QUERY = replace(
    TENSORFLOW,
    private=Call(
        names=("DPGradientDescentOptimizer", "DPAdamOptimizer", "DPAdagradOptimizer"),
        positional=("dp_sum_query", "num_microbatches"),
    ),
    notes=("lots are those of the script's own input.",),
)
"""Optimisers that take their noise from a query."""
TENSORFLOW_MADE = replace(
    TENSORFLOW,
    private=Call(
        names=(
            "make_optimizer_class",
            "make_gaussian_optimizer_class",
            "make_keras_optimizer_class",
            "make_keras_generic_optimizer_class",
            "make_vectorized_optimizer_class",
        ),
        quantities=TENSORFLOW.private.quantities,
    ),
    makes_classes=True,
    notes=TENSORFLOW_QUERY.notes,
)
"""Optimisers of classes that the script makes of its own."""
TENSORFLOW_ACCOUNTING = Library(
    name="TensorFlow Privacy accounting",
    modules=("tensorflow_privacy", "privacy"),
    private=_TF_STATEMENTS[0],
    notes=("these are an accountant's numbers; state how the training draws its lots.",),
)
_PLAN_TARGET = Call(names=("calibrate",), positional=("epsilon", "delta"),
                    replaces=("noise_multiplier",),
                    quantities={"target_epsilon": "epsilon", "target_delta": "delta"})  # fmt: skip
_BANDS = Rule(
    argument="num_bands",
    holds=_absent_or(1),
    broken=Broken(
        code="strategy_not_read",
        message="num_bands is not known to be 1; the coefficients of more bands are computed while "
        "the script runs.",
        remedy="Save the configuration as JSON, which is read with its coefficients.",
    ),
)
JAX_PLAN = Library(
    name="jax-privacy",
    modules=("jax_privacy",),
    private=Call(
        names=("BandMFExecutionPlanConfig", "BandMFExecutionPlan", "DpsgdConfig"),
        makers=("default",),
        quantities={
            "steps": "iterations",
            "probability": "sampling_prob",
            "expected_rate": "expected_participations / iterations",
            "noise_multiplier": "noise_multiplier",
            "clip_norm": "l2_clip_norm",
            "dataset_size": "num_examples",
            "target_epsilon": "epsilon",
            "target_delta": "delta",
        },
    ),
    beside=(_PLAN_TARGET,),
    scheme="poisson",
    rules=(
        _BANDS,
        *(
            Rule(argument=name, holds=_absent_or(None), broken=_BANDS.broken)
            for name in ("strategy", "truncated_batch_size")
        ),
    ),
    notes=("lots are those of the plan's batch_selection_strategy.",),
)
JAX_KERAS = Library(
    name="jax-privacy",
    modules=("jax_privacy",),
    private=Call(
        names=("DPKerasConfig",),
        quantities={
            "steps": "train_steps",
            "lot_size": "batch_size * gradient_accumulation_steps",
            "noise_multiplier": "noise_multiplier",
            "clip_norm": "clipping_norm",
            "dataset_size": "train_size",
            "target_epsilon": "epsilon",
            "target_delta": "delta",
        },
    ),
    beside=(
        Call(
            names=("update_with_calibrated_noise_multiplier",),
            replaces=("noise_multiplier",),
        ),
    ),
    poisson=("poisson_sampling_in_fit", False),
    scheme="shuffled",
    rules=(
        Rule(
            argument="sampling_prob",
            holds=_absent_or(None),
            broken=Broken(
                code="sampling_not_read",
                message="sampling_prob is not known to be None: lots are then drawn with it, and "
                "not with batch_size / train_size.",
                remedy="Leave it out, or write a plan with that probability.",
            ),
        ),
    ),
)
JAX_CORE = Library(
    name="jax-privacy's privatizers",
    modules=("jax_privacy",),
    private=Call(names=("gaussian_privatizer", "matrix_factorization_privatizer")),
    methods=("update",),
    rules=(Rule(argument="noising_matrix", holds=_absent_or(None), broken=_BANDS.broken),),
    notes=("stddev is noise_multiplier times the sensitivity of the clipped gradients.",),
)


def _engine(name: str, module: str, rules: tuple[Rule, ...] = ()) -> Library:
    """private-transformers and its descendant fastDP: an engine that draws no lots."""
    return Library(
        name=name,
        modules=(module,),
        private=Call(
            names=("PrivacyEngine",),
            positional=("module",),
            quantities=_CLIPPED
            | _TARGET
            | {"lot_size": "batch_size", "dataset_size": "sample_size"},
        ),
        rules=rules,
        notes=("the library draws no lots: they are those of the script's own loader.",),
    )


PRIVATE_TRANSFORMERS = _engine("private-transformers", "private_transformers")
FAST_DP = _engine(
    "fastDP",
    "fastDP",
    tuple(
        Rule(
            argument=name,
            holds=_absent_or(expected),
            broken=Broken(
                code="noise_of_a_device",
                message=f"{name} is not known to be {expected}: each device then adds a share of "
                "the noise, which is all of it only on that many devices.",
                remedy="Leave it out, or write a plan with the noise that is added.",
            ),
        )
        for name, expected in (("num_GPUs", 1), ("torch_seed_is_fixed", False))
    ),
)
_ARGUMENTS = Call(
    names=("TrainingArguments",),
    quantities={
        "lot_size": "per_device_train_batch_size * gradient_accumulation_steps",
        "steps": "max_steps",
        "epochs": "num_train_epochs",
    },
    defaults={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
              "num_train_epochs": 3},
)  # fmt: skip
DP_TRANSFORMERS = Library(
    name="dp-transformers",
    modules=("dp_transformers",),
    private=Call(names=("OpacusDPTrainer",)),
    beside=(
        _ARGUMENTS,
        Call(
            names=("PrivacyArguments",),
            quantities=_TARGET
            | {"noise_multiplier": "noise_multiplier", "clip_norm": "per_sample_max_grad_norm"},
        ),
    ),
    scheme="shuffled",
    runs="train",
    rules=(
        Rule(
            argument="disable_dp",
            holds=_absent_or(False),
            broken=Broken(
                code="privacy_disabled",
                message="disable_dp is not known to be False: with it the trainer neither clips "
                "nor adds noise.",
                remedy="Leave it out, or set it to False.",
            ),
        ),
    ),
    notes=(
        "its trainer draws shuffled lots of records or authors, and reports the ε of Poisson lots.",
        "one device is assumed.",
    ),
)
_FEDERATED = Broken(
    code="weighted_average",
    message="Flower's FedAvg weights each clipped update by the client's num_examples, and the "
    "noise is that of an equal average: a client with many examples counts for more than "
    "clipping_norm / num_sampled_clients.",
    remedy="Return the same num_examples from every client, and write a plan.",
)
FLOWER = Library(
    name="Flower",
    modules=("flwr",),
    private=Call(
        names=(
            "DifferentialPrivacyServerSideFixedClipping",
            "DifferentialPrivacyClientSideFixedClipping",
        ),
        positional=("strategy", "noise_multiplier", "clipping_norm", "num_sampled_clients"),
        quantities={
            "noise_multiplier": "noise_multiplier",
            "clip_norm": "clipping_norm",
            "lot_size": "num_sampled_clients",
        },
    ),
    beside=(
        Call(
            names=("ServerConfig", "ServerAppConfig", "start"),
            quantities={"steps": "num_rounds"},
        ),
    ),
    scheme="fixed_size",
    broken=(_FEDERATED,),
    notes=("a record is the update of one client.",),
)
PFL = Library(
    name="pfl",
    modules=("pfl",),
    private=Call(
        names=("PLDPrivacyAccountant", "PRVPrivacyAccountant", "RDPPrivacyAccountant"),
        positional=("num_compositions", "sampling_probability", "mechanism", "epsilon", "delta",
                    "noise_parameter", "noise_scale"),
        quantities={
            "noise_multiplier": "noise_parameter",
            "steps": "num_compositions",
            "probability": "sampling_probability",
            "target_epsilon": "epsilon",
            "target_delta": "delta",
        },
    ),
    rules=(
        Rule(
            argument="mechanism",
            holds=lambda value, _: str(value).lower() == "gaussian",
            broken=Broken(
                code="mechanism_not_read",
                message="its mechanism is not known to be the Gaussian one.",
                remedy="Write a plan.",
            ),
        ),
        Rule(
            argument="noise_scale",
            holds=lambda value, _: value is None or value == 1,
            broken=Broken(
                code="scaled_noise",
                message="noise_scale is not known to be 1: the noise that runs is that of a "
                "larger cohort, scaled down, and protects only a run with that cohort.",
                remedy="Set noise_scale to 1, or write a plan of the cohort that runs.",
            ),
        ),
    ),
    notes=(
        "its accountant takes cohorts for Poisson lots; state how they are drawn.",
        "a record is the update of one user.",
    ),
)  # fmt: skip
DP_ACCOUNTING = Library(
    name="dp-accounting",
    modules=("dp_accounting",),
    private=Call(
        names=("GaussianDpEvent",),
        positional=("noise_multiplier",),
        quantities={"noise_multiplier": "noise_multiplier"},
    ),
    beside=(
        Call(names=("PoissonSampledDpEvent",), positional=("sampling_probability", "event"),
             quantities={"probability": "sampling_probability"}),
        *(Call(names=(name,), positional=("event", "count"), quantities={"steps": "count"},
               trains=True) for name in ("SelfComposedDpEvent", "compose")),
        Call(names=("get_epsilon", "get_epsilon_and_optimal_order"), positional=("target_delta",),
             quantities={"target_delta": "target_delta"}, accounts=True),
    ),
    notes=("these are an accountant's numbers; state how the training draws its lots.",),
)  # fmt: skip

TRAINING = (
    OPACUS, OPACUS_BEFORE_1, OPACUS_OPTIMIZER, TENSORFLOW, TENSORFLOW_QUERY, TENSORFLOW_MADE,
    JAX_PLAN, JAX_KERAS, JAX_CORE, PRIVATE_TRANSFORMERS, FAST_DP, DP_TRANSFORMERS, FLOWER, PFL,
)  # fmt: skip
ACCOUNTING = (TENSORFLOW_ACCOUNTING, DP_ACCOUNTING)
"""Libraries that train nothing: read only where no training library is called."""
