"""One plan has one digest however it is written, and no two plans share one."""

from __future__ import annotations

import copy
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from affidavit.plan.parse import parse_plan, plan_from
from affidavit.plan.serialization import as_document, digest

Make = Callable[..., dict[str, Any]]

RICH: dict[str, Any] = {
    "version": 1,
    "name": "e2e",
    "notes": "as published",
    "dataset": {"name": "e2e-nlg", "size": 42043, "unit": "user", "contributions_per_user": 2},
    "adjacency": "zero_out",
    "sampling": {"scheme": "shuffled", "lot_size": 1024},
    "steps": 410,
    "releases": [
        {
            "name": "hidden",
            "count": 48,
            "clip_norm": 0.1,
            "noise_multiplier": 2.3395,
            "dimension": 589824,
            "weight": 1,
        },
        {"name": "auxiliary", "clip_norm": 0.1, "noise_multiplier": 2},
    ],
    "clipping": "per_block",
    "noise": {"kind": "bidiagonal", "lambda": 0.5, "normalized": False},
    "participation": {"schema": "min_separation", "participations": 10, "separation": 1},
    "allocation": "uniform",
    "optimizer": {
        "name": "dp_muon",
        "momentum": 0.95,
        "learning_rate": 0.01,
        "newton_schulz_steps": 5,
        "newton_schulz_start": "paper",
        "denoise": False,
    },
    "workload": {"kind": "momentum", "momentum": 0.9, "learning_rates": [0.1, 0.2]},
    "extra": [{"kind": "gaussian", "name": "metric", "noise_multiplier": 30, "count": 2}],
    "target": {"epsilon": 8, "delta": 8e-6},
    "allow_large_delta": {"reason": "a test"},
}
"""A plan that writes almost every field; mutations of it must be seen."""

GOLDEN = (
    b'{"adjacency":"add_remove","allocation":"uniform","clipping":"per_block",'
    b'"dataset":{"name":"e2e-nlg","size":42043,"unit":"example"},"extra":[],"name":"e2e",'
    b'"noise":{"kind":"independent"},'
    b'"optimizer":{"momentum":0.95,"name":"dp_muon","newton_schulz_steps":5},'
    b'"releases":[{"clip_norm":0.1,"count":48,"name":"hidden","noise_multiplier":2.3395}],'
    b'"sampling":{"lot_size":1024,"scheme":"poisson"},"steps":410,'
    b'"target":{"delta":0.000008,"epsilon":8},"trajectory":"all_iterates","version":1}'
)
"""RFC 8785 by hand: keys sorted, shortest numbers as ECMAScript writes them, no spaces."""
GOLDEN_DIGEST = "sha256:9dac4be64961abd2455aed169f5a3d040003d99421fb88b142ca8e2d30985c9c"


def test_the_digest_is_sha256_of_the_canonical_text_that_can_be_written_by_hand() -> None:
    assert "sha256:" + hashlib.sha256(GOLDEN).hexdigest() == GOLDEN_DIGEST
    written = {
        "version": 1,
        "name": "e2e",
        "dataset": {"name": "e2e-nlg", "size": 42043},
        "adjacency": "add_remove",
        "sampling": {"scheme": "poisson", "lot_size": 1024},
        "steps": 410,
        "releases": [{"name": "hidden", "count": 48, "clip_norm": 0.1, "noise_multiplier": 2.3395}],
        "optimizer": {"name": "dp_muon", "momentum": 0.95, "newton_schulz_steps": 5},
        "target": {"epsilon": 8, "delta": 8e-6},
    }
    assert digest(plan_from(written)) == GOLDEN_DIGEST
    assert digest(parse_plan(GOLDEN, "json")) == GOLDEN_DIGEST
    assert digest(parse_plan(GOLDEN, "yaml")) == GOLDEN_DIGEST


@pytest.mark.parametrize("one", ["1", "1.0", "1e0", "0.1e1", "10e-1", "1.000"])
@pytest.mark.parametrize("field", ["version", "count", "clip_norm"])
def test_one_number_has_one_digest_however_it_is_written(
    document: Make, field: str, one: str
) -> None:
    release = {"name": "all", "count": 1, "clip_norm": 1, "noise_multiplier": 20}
    text = json.dumps(document(releases=[release]))
    assert text.count(f'"{field}": 1') == 1
    same = text.replace(f'"{field}": 1', f'"{field}": {one}').encode()
    for syntax in ("json", "yaml"):
        assert digest(parse_plan(same, syntax)) == digest(plan_from(document()))


def shuffled(node: Any, order: Callable[[list[Any]], list[Any]]) -> Any:
    """The tree with the keys of every mapping in another order."""
    if isinstance(node, dict):
        return {key: shuffled(node[key], order) for key in order(list(node))}
    return [shuffled(item, order) for item in node] if isinstance(node, list) else node


@given(st.data())
def test_the_order_of_keys_does_not_matter(data: st.DataObject) -> None:
    other = shuffled(RICH, lambda keys: data.draw(st.permutations(keys)))
    assert digest(plan_from(other)) == digest(plan_from(RICH))


def test_json_block_yaml_and_flow_yaml_are_one_plan() -> None:
    stream = io.StringIO()
    YAML(typ="safe", pure=True).dump(RICH, stream)
    flow = json.dumps(RICH, indent=3)
    assert {
        digest(parse_plan(stream.getvalue().encode(), "yaml")),
        digest(parse_plan(flow.encode(), "yaml")),
        digest(parse_plan(flow.encode(), "json")),
    } == {digest(plan_from(RICH))}


@pytest.mark.parametrize(
    "written_out",
    [
        {"dataset": {"name": "toy", "size": 1000, "unit": "example"}},
        {"allocation": "uniform"},
        {"clipping": "per_block"},
        {"noise": {"kind": "independent"}},
        {"extra": []},
        {"trajectory": "all_iterates"},
        {"optimizer": {"name": "dp_sgd"}},
        {"optimizer": {}},
        {"optimizer": {"name": "dp_sgd", "momentum": None}},
        {"notes": None, "workload": None, "participation": None, "allow_large_delta": None},
        {"epochs": None},
        {"releases": [{"name": "all", "count": 1, "clip_norm": 1, "noise_multiplier": 20}]},
        {"releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 20, "noise_std": None}]},
    ],
)
def test_a_default_that_is_written_out_changes_nothing(
    document: Make, written_out: dict[str, Any]
) -> None:
    assert digest(plan_from(document(**written_out))) == digest(plan_from(document()))


def test_one_phase_at_the_top_or_in_phases_is_one_plan(document: Make) -> None:
    whole = document()
    phase = {key: whole.pop(key) for key in ("sampling", "steps", "releases")}
    in_phases = {**whole, "phases": [phase]}
    assert digest(plan_from(in_phases)) == digest(plan_from(document()))
    assert digest(plan_from({**whole, "phases": [phase, phase]})) != digest(plan_from(document()))


def test_a_reason_in_words_is_the_reason_written_as_a_field() -> None:
    in_words = {**RICH, "allow_large_delta": "a test"}
    assert digest(plan_from(in_words)) == digest(plan_from(RICH))


def test_steps_null_is_not_lost(document: Make) -> None:
    requested = plan_from(document(steps=None))
    assert as_document(requested)["steps"] is None
    assert digest(plan_from(as_document(requested))) == digest(requested)


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every scalar of a tree."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


OTHER_NAMES = {
    "uniform": "proportional",
    "per_block": "flat",
    "zero_out": "replace_one",
    "shuffled": "cyclic",
    "paper": "frobenius",
    "dp_muon": "dp_muonbc",
    "min_separation": "fixed_epoch",
}
STAY = {
    ("version",),
    ("dataset", "unit"),
    ("noise", "kind"),
    ("workload", "kind"),
    ("extra", 0, "kind"),
}
"""Fields that have one value, or whose change would make the plan malformed."""


def with_leaf(path: tuple[Any, ...], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The rich plan with one scalar changed."""
    result = copy.deepcopy(RICH)
    node: Any = result
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = change(node[path[-1]])
    return result


def another(value: Any) -> Any:
    """A value near ``value`` that is not it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return OTHER_NAMES.get(value, value + "x")
    return value + 1 if isinstance(value, int) else value * (1 + 2**-52)


def test_every_field_that_is_changed_by_the_least_makes_another_digest() -> None:
    seen = {digest(plan_from(RICH)): "the plan itself"}
    for path in leaves(RICH):
        if path in STAY:
            continue
        result = digest(plan_from(with_leaf(path, another)))
        assert result not in seen, (path, seen[result])
        seen[result] = str(path)
    assert len(seen) > 35


@given(st.integers(1, 10**6), st.floats(1e-100, 1e15), st.floats(1e-12, 0.9))
def test_digests_are_equal_exactly_when_the_numbers_are(
    steps: int, sigma: float, delta: float
) -> None:
    def made(steps: int, sigma: float, delta: float) -> str:
        result = copy.deepcopy(RICH)
        result["steps"] = steps
        result["releases"][0]["noise_multiplier"] = sigma
        result["target"]["delta"] = delta
        return digest(plan_from(result))

    assert made(steps, sigma, delta) == made(float(steps), sigma, delta)  # type: ignore[arg-type]
    others = {
        made(steps + 1, sigma, delta),
        made(steps, sigma, delta / 2),
        made(steps, sigma / 2 + 1e-99, delta),
    }
    assert made(steps, sigma, delta) not in others


def test_the_canonical_document_is_the_plan_again() -> None:
    plan = plan_from(RICH)
    assert plan_from(as_document(plan)) == plan
