"""Whatever is read, it is a plan that every room can use, or ``MalformedPlan``."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from affidavit.mechanisms import lower, obligations_of
from affidavit.plan import Plan
from affidavit.plan.diagnostics import MalformedPlan, PlanError, RefusedPlan
from affidavit.plan.parse import parse_plan, plan_from
from affidavit.plan.serialization import as_document, digest
from affidavit.plan.strict_parsing import Syntax
from tests.support.random_seeds import examples

SEEDS: list[dict[str, Any]] = [
    {
        "version": 1,
        "dataset": {"size": 42043},
        "adjacency": "add_remove",
        "sampling": {"scheme": "poisson", "lot_size": 1024},
        "epochs": 10,
        "releases": [{"name": "a", "count": 48, "clip_norm": 0.1, "dimension": 10}],
        "allocation": "optimal",
        "noise": {"kind": "independent"},
        "optimizer": {"name": "dp_muon", "momentum": 0.95},
        "target": {"epsilon": 8, "delta": 8e-6},
    },
    {
        "version": 1,
        "dataset": {"size": 100, "unit": "user", "contributions_per_user": 3},
        "adjacency": "zero_out",
        "phases": [
            {
                "sampling": {"scheme": "shuffled", "lot_size": 10},
                "steps": 30,
                "clipping": "flat",
                "releases": [{"name": "a", "clip_norm": 1, "noise_multiplier": 2}],
            },
            {
                "sampling": {"scheme": "cyclic_poisson", "lot_size": 10, "groups": 2},
                "steps": 3,
                "releases": [{"name": "a", "clip_norm": 1, "noise_std": 2, "weight": 1}],
                "noise": {"kind": "blt", "decays": [0.9], "scales": [0.1]},
                "participation": {"schema": "single"},
            },
        ],
        "extra": [{"kind": "gaussian", "name": "m", "noise_multiplier": 3}],
        "target": {"delta": 1e-3},
        "allow_large_delta": "a test",
    },
]
WORDS = [
    *("steps", "epochs", "releases", "phases", "noise", "sampling", "probability", "lot_size"),
    *("groups", "max_lot_size", "noise_std", "noise_multiplier", "weight", "rows", "file", "kind"),
    *("matrix", "toeplitz", "bidiagonal", "coefficients", "lambda", "poisson", "full_batch"),
    *("fixed_size", "replace_one", "proportional", "user", "dp_dice", "unit", "0", "", "a/b~"),
]
SCALARS = (
    st.sampled_from(
        [None, True, False, 0, 1, -1, 2**53 - 1, 2**53, 1e300, 5e-324, 1e-100, 0.5, "1"]
    )
    | st.sampled_from(WORDS)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3)
    ),
    max_leaves=5,
)


def containers(node: Any) -> Iterator[Any]:
    """Every mapping and list of a tree."""
    if isinstance(node, dict | list):
        yield node
        for inner in node.values() if isinstance(node, dict) else node:
            yield from containers(inner)


@st.composite
def mutants(draw: st.DrawFn) -> dict[str, Any]:
    """A valid plan with one to three places replaced, removed or added."""
    result = copy.deepcopy(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 3))):
        node = draw(st.sampled_from(list(containers(result))))
        if isinstance(node, dict):
            key = draw(st.sampled_from([*node, *WORDS]))
            if draw(st.booleans()):
                node.pop(key, None)
            else:
                node[key] = draw(VALUES)
        else:
            node.insert(0, copy.deepcopy(draw(VALUES | st.sampled_from(node or [None]))))
    return result


def use(plan: Plan) -> None:
    """What every well-formed plan must stand: a digest, a way back, and a lowering."""
    assert plan_from(as_document(plan)) == plan
    assert digest(plan).startswith("sha256:")
    try:
        lowered = lower(plan)
        assert obligations_of(lowered)
        lowered.event(scale=1.0, steps=1)
    except RefusedPlan as refusal:
        check(refusal)


def check(error: PlanError) -> None:
    """A refusal says why, where and what to do, in finite words."""
    for reason in error.reasons:
        assert reason.code.isidentifier()
        assert reason.message
        assert reason.remedy
        assert reason.pointer == "" or reason.pointer.startswith("/")
        assert (reason.line is None) == (reason.column is None)


def read(raw: bytes, syntax: Syntax) -> None:
    """Read ``raw``; only a plan or ``MalformedPlan`` may come out."""
    try:
        plan = parse_plan(raw, syntax)
    except MalformedPlan as error:
        check(error)
    else:
        use(plan)


@given(mutants())
@settings(max_examples=examples(400))
def test_a_mutated_plan_is_a_plan_or_malformed(data: dict[str, Any]) -> None:
    try:
        plan = plan_from(data)
    except MalformedPlan as error:
        check(error)
    else:
        use(plan)


@given(mutants(), st.sampled_from(["json", "yaml"]))
@settings(max_examples=examples(200))
def test_the_text_of_a_mutated_plan_is_a_plan_or_malformed(data: Any, syntax: Syntax) -> None:
    read(json.dumps(data).encode(), syntax)


@given(st.sampled_from(SEEDS), st.data())
@settings(max_examples=examples(200))
def test_a_damaged_text_is_a_plan_or_malformed(seed: dict[str, Any], data: st.DataObject) -> None:
    raw = bytearray(json.dumps(seed, indent=1).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    for syntax in ("json", "yaml"):
        read(bytes(raw), syntax)


@given(
    st.text(st.sampled_from("ab01 -?:,[]{}#&*!|>'\"%@`~\\/.\n\tuUx\u00e9\u2028\ufeff"), max_size=40)
)
@settings(max_examples=examples(600))
@example('"\\UFFFFFFFF"')
@example("!%FF a")
@example("%YAML 1.2\n--- a")
@example("a: |9\n b")
@example("- &a\n- *a")
def test_noise_that_looks_like_yaml_is_a_plan_or_malformed(text: str) -> None:
    for syntax in ("json", "yaml"):
        read(text.encode(), syntax)


@given(st.binary(max_size=40))
def test_bytes_are_a_plan_or_malformed(raw: bytes) -> None:
    for syntax in ("json", "yaml"):
        read(raw, syntax)
