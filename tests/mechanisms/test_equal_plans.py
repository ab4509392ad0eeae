"""Plans that mean the same run are lowered to the same events, in whatever words they are written.

Each law draws a random plan and writes it in two ways, and compares ``plan_meaning`` of both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from affidavit.accountants import Bracket
from affidavit.assessment import certify
from affidavit.plan import plan_from
from tests.mechanisms.plan_meaning import REFUSED, Document, meaning
from tests.support.random_seeds import examples, seeded

Law = Callable[[random.Random], tuple[Document, Document]]

ADJACENCIES = "add_remove", "replace_one", "zero_out"
LOTS_OF_ALL = (
    {"scheme": "poisson"},
    {"scheme": "fixed_size"},
    {"scheme": "cyclic"},
    {"scheme": "shuffled"},
    {"scheme": "balls_in_bins"},
    {"scheme": "balls_in_bins", "bins_drawn": "once"},
    {"scheme": "cyclic_poisson", "groups": 1},
    {"scheme": "b_min_sep", "separation": 1},
)
CORRELATED = (
    {"kind": "bidiagonal", "lambda": 0.6},
    {"kind": "bidiagonal", "lambda": -0.4},
    {"kind": "toeplitz", "coefficients": [1, 0.5, 0.25]},
    {"kind": "toeplitz", "coefficients": [1, -0.5, 0.4]},
    {"kind": "sqrt"},
    {"kind": "bsr", "bands": 3},
    {"kind": "banded", "bands": 2},
    {"kind": "tree"},
    {"kind": "dense"},
)
IDENTITY = (
    {"kind": "toeplitz", "coefficients": [1]},
    {"kind": "toeplitz", "coefficients": [-1, 0, 0]},
    {"kind": "toeplitz_inverse", "coefficients": [1]},
    {"kind": "bidiagonal", "lambda": 0},
    {"kind": "bsr", "bands": 1},
    {"kind": "bisr", "bands": 1},
    {"kind": "banded", "bands": 1},
    {"kind": "matrix", "rows": [[1.0, 0.0], [0.0, 1.0]]},
)


def drawn(draw: random.Random, **changes: Any) -> Document:
    """A random plan with ``changes``."""
    size = draw.choice([60, 400, 1000])
    steps = draw.randint(1, 24)
    dataset: Document = {"name": "toy", "size": size}
    if draw.random() < 0.3:
        dataset |= {"unit": "user", "contributions_per_user": draw.randint(1, 4)}
    result: Document = {
        "version": 1,
        "dataset": dataset,
        "adjacency": draw.choice(ADJACENCIES),
        "sampling": sampling(draw, size),
        "steps": steps,
        "releases": [blocks(draw) for _ in range(draw.randint(1, 3))],
        "target": {"delta": 1e-5},
        **changes,
    }
    for place, release in enumerate(result["releases"]):
        release["name"] = f"block{place}"
    return result


def blocks(draw: random.Random) -> Document:
    return {
        "count": draw.randint(1, 5),
        "clip_norm": draw.choice([0.3, 1, 7]),
        "noise_multiplier": round(draw.uniform(0.5, 8), 3),
    }


def sampling(draw: random.Random, size: int) -> Document:
    lot = draw.randint(1, size // 2)
    several = draw.randint(2, 5)
    small = max(1, lot // several)
    return draw.choice(
        [
            {"scheme": "poisson", "lot_size": lot},
            {"scheme": "truncated_poisson", "lot_size": lot, "max_lot_size": lot + 3},
            {"scheme": "fixed_size", "lot_size": lot},
            {"scheme": "shuffled", "lot_size": lot},
            {"scheme": "cyclic", "lot_size": lot},
            {"scheme": "balls_in_bins", "lot_size": lot},
            {"scheme": "balls_in_bins", "lot_size": lot, "bins_drawn": "each_epoch"},
            {"scheme": "full_batch"},
            {"scheme": "cyclic_poisson", "lot_size": small, "groups": several},
            {"scheme": "b_min_sep", "lot_size": small, "separation": several},
        ]
    )


def with_some_noise(draw: random.Random, document: Document) -> Document:
    return {**document, "noise": dict(draw.choice(({"kind": "independent"}, *CORRELATED)))}


def lots_of_all_records(draw: random.Random) -> tuple[Document, Document]:
    plan = with_some_noise(draw, drawn(draw, sampling={"scheme": "full_batch"}))
    all_records = {**draw.choice(LOTS_OF_ALL), "lot_size": plan["dataset"]["size"]}
    if plan["adjacency"] == "add_remove" and all_records["scheme"] in (
        "fixed_size",
        "cyclic",
        "shuffled",
    ):
        plan["adjacency"] = "zero_out"  # these have no data set with another number of records
    return {**plan, "sampling": all_records}, plan


def one_lot_an_epoch(draw: random.Random) -> tuple[Document, Document]:
    """A lot of more than half of the records is alone in its epoch."""
    plan = drawn(draw, adjacency=draw.choice(["replace_one", "zero_out"]))
    size = plan["dataset"]["size"]
    lot = draw.randint(size // 2 + 1, size - 1)
    fresh, other = draw.choice([("shuffled", "fixed_size"), ("cyclic", "full_batch")])
    plan = with_some_noise(draw, plan)
    words = {"scheme": other} | ({"lot_size": lot} if other == "fixed_size" else {})
    return {**plan, "sampling": {"scheme": fresh, "lot_size": lot}}, {**plan, "sampling": words}


def one_group(draw: random.Random) -> tuple[Document, Document]:
    plan = with_some_noise(draw, drawn(draw))
    lot = {"lot_size": draw.randint(1, plan["dataset"]["size"])}
    words = draw.choice(
        [{"scheme": "cyclic_poisson", "groups": 1}, {"scheme": "b_min_sep", "separation": 1}]
    )
    poisson = {"scheme": "poisson"} | lot
    return {**plan, "sampling": words | lot}, {**plan, "sampling": poisson}


def a_cap_that_never_cuts(draw: random.Random) -> tuple[Document, Document]:
    plan = with_some_noise(draw, drawn(draw))
    data = plan["dataset"]
    lot = {"lot_size": draw.randint(1, data["size"])}
    most = data["size"] + data.get("contributions_per_user", 1)
    capped = {"scheme": "truncated_poisson", "max_lot_size": most} | lot
    return {**plan, "sampling": capped}, {**plan, "sampling": {"scheme": "poisson"} | lot}


def a_cap_that_always_cuts(draw: random.Random) -> tuple[Document, Document]:
    plan = with_some_noise(draw, drawn(draw, adjacency=draw.choice(["replace_one", "zero_out"])))
    size = plan["dataset"]["size"]
    most = draw.randint(1, size)
    capped = {"scheme": "truncated_poisson", "max_lot_size": most, "probability": 1}
    fixed = {"scheme": "fixed_size", "lot_size": most}
    return {**plan, "sampling": capped}, {**plan, "sampling": fixed}


def first_lot_of_an_order(draw: random.Random) -> tuple[Document, Document]:
    plan = drawn(draw, adjacency=draw.choice(["replace_one", "zero_out"]), steps=1)
    lot = {"lot_size": draw.randint(1, plan["dataset"]["size"] // 2)}
    fixed = {"scheme": "fixed_size"} | lot
    return {**plan, "sampling": {"scheme": "shuffled"} | lot}, {**plan, "sampling": fixed}


def a_probability_and_a_lot_size(draw: random.Random) -> tuple[Document, Document]:
    plan = with_some_noise(draw, drawn(draw))
    size = plan["dataset"]["size"]
    lot = draw.randint(1, size)
    words = {"scheme": "poisson"}
    if draw.random() < 0.5:
        words = {"scheme": "truncated_poisson", "max_lot_size": min(size, lot + 2)}
    rate = {"probability": float(Fraction(lot, size))}
    if Fraction(str(rate["probability"])) != Fraction(lot, size):
        lot, rate = size // 4, {"probability": 0.25}
    return {**plan, "sampling": words | {"lot_size": lot}}, {**plan, "sampling": words | rate}


def users_of_one_record(draw: random.Random) -> tuple[Document, Document]:
    plan = with_some_noise(draw, drawn(draw))
    size = plan["dataset"]["size"]
    user = {"name": "toy", "size": size, "unit": "user", "contributions_per_user": 1}
    return {**plan, "dataset": user}, {**plan, "dataset": {"name": "toy", "size": size}}


def blocks_of_equal_noise(draw: random.Random) -> tuple[Document, Document]:
    plan = with_some_noise(draw, drawn(draw))
    number, sigma = draw.choice([4, 9, 16]), draw.choice([0.5, 1.0, 3.0])
    one = {"name": "all", "clip_norm": 1, "noise_multiplier": sigma}
    many = one | {"noise_multiplier": sigma * number**0.5}
    if draw.random() < 0.5:
        return {**plan, "releases": [many | {"count": number}]}, {**plan, "releases": [one]}
    named = [many | {"name": f"block{place}"} for place in range(number)]
    return {**plan, "releases": named}, {**plan, "releases": [one]}


def noise_in_other_units(draw: random.Random) -> tuple[Document, Document]:
    plan = with_some_noise(draw, drawn(draw))
    absolute = [
        {key: value for key, value in release.items() if key != "noise_multiplier"}
        | {"noise_std": release["noise_multiplier"] * release["clip_norm"]}
        for release in plan["releases"]
    ]
    return {**plan, "releases": absolute}, plan


def another_order_and_other_names(draw: random.Random) -> tuple[Document, Document]:
    plan = with_some_noise(draw, drawn(draw))
    names = [{**release, "name": f"other{place}"} for place, release in enumerate(plan["releases"])]
    draw.shuffle(names)
    fields = list({**plan, "name": "other", "notes": "other", "releases": names}.items())
    draw.shuffle(fields)
    return dict(fields), plan


def phase_of(plan: Document) -> Document:
    return {name: plan[name] for name in ("sampling", "steps", "releases")}


def in_phases(plan: Document, *phases: Document) -> Document:
    rest = {name: value for name, value in plan.items() if name not in phase_of(plan)}
    return {**rest, "phases": list(phases)}


def a_phase_cut_in_two(draw: random.Random) -> tuple[Document, Document]:
    """An order that is drawn for each epoch is cut between two epochs; kept bins cannot be cut."""
    plan = drawn(draw)
    while plan["sampling"]["scheme"] in ("balls_in_bins", "cyclic_poisson", "b_min_sep"):
        plan = drawn(draw)
    first = draw.randint(1, 20)
    second = draw.randint(1, 20)
    if plan["sampling"]["scheme"] in ("shuffled", "cyclic"):
        first *= plan["dataset"]["size"] // plan["sampling"]["lot_size"]
    part = phase_of(plan)
    cut = in_phases(plan, {**part, "steps": first}, {**part, "steps": second})
    return cut, {**plan, "steps": first + second}


def phases_in_another_order(draw: random.Random) -> tuple[Document, Document]:
    plan = drawn(draw)
    parts = [phase_of(drawn(draw, dataset=plan["dataset"])) for _ in range(2)]
    for part in parts:
        part["sampling"] = sampling(draw, plan["dataset"]["size"])
    return in_phases(plan, *parts), in_phases(plan, *parts[::-1])


def steps_and_epochs(draw: random.Random) -> tuple[Document, Document]:
    plan = drawn(draw)
    scheme, size = plan["sampling"]["scheme"], plan["dataset"]["size"]
    lot = plan["sampling"].get("lot_size", size)
    epochs = draw.randint(1, 4)
    steps = epochs * Fraction(size, lot)
    if scheme in ("shuffled", "cyclic", "balls_in_bins"):
        steps = Fraction(epochs * (size // lot))
    by_epochs = {name: value for name, value in plan.items() if name != "steps"}
    return {**by_epochs, "epochs": epochs}, {**plan, "steps": -(-steps // 1)}


def the_identity(draw: random.Random) -> tuple[Document, Document]:
    plan = drawn(draw)
    while plan["sampling"].get("bins_drawn") == "each_epoch":
        plan = drawn(draw)  # with correlated noise no record is thrown anew
    if plan["sampling"]["scheme"] == "shuffled":
        plan["steps"] = 1
    noise = draw.choice(IDENTITY)
    if noise["kind"] == "matrix":
        plan["steps"] = 2
    return {**plan, "noise": dict(noise)}, plan


def two_names_of_one_matrix(draw: random.Random) -> tuple[Document, Document]:
    plan = drawn(draw)
    steps, ratio = plan["steps"], draw.choice([0.25, 0.5, -0.5])
    powers = [ratio**place for place in range(steps)]
    names: list[Document] = [
        {"kind": "bidiagonal", "lambda": ratio},
        {"kind": "toeplitz", "coefficients": powers},
        {"kind": "toeplitz", "coefficients": [-power for power in powers]},
        {"kind": "toeplitz", "coefficients": [*powers, 0]},
        {"kind": "toeplitz_inverse", "coefficients": [1, -ratio]},
        {"kind": "toeplitz_inverse", "coefficients": [1, -ratio, 0]},
    ]
    one, other = draw.sample(names, 2)
    return {**plan, "noise": one}, {**plan, "noise": other}


def trees_of_one_step(draw: random.Random) -> tuple[Document, Document]:
    plan = drawn(draw, sampling={"scheme": "full_batch"})
    return {**plan, "noise": {"kind": "tree", "restart": True}}, plan


def a_record_that_is_missing_or_zero(draw: random.Random) -> tuple[Document, Document]:
    """Where the lots of others do not depend on it, these are one theorem."""
    plan = with_some_noise(draw, drawn(draw))
    while plan["sampling"]["scheme"] in ("fixed_size", "shuffled", "cyclic", "truncated_poisson"):
        plan = with_some_noise(draw, drawn(draw))
    return {**plan, "adjacency": "add_remove"}, {**plan, "adjacency": "zero_out"}


LAWS: tuple[Law, ...] = (
    lots_of_all_records,
    one_lot_an_epoch,
    one_group,
    a_cap_that_never_cuts,
    a_cap_that_always_cuts,
    first_lot_of_an_order,
    a_probability_and_a_lot_size,
    users_of_one_record,
    blocks_of_equal_noise,
    noise_in_other_units,
    another_order_and_other_names,
    a_phase_cut_in_two,
    phases_in_another_order,
    steps_and_epochs,
    the_identity,
    two_names_of_one_matrix,
    trees_of_one_step,
    a_record_that_is_missing_or_zero,
)


@pytest.mark.by_turns
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_two_descriptions_of_one_run_have_one_meaning(law: Law) -> None:
    draw = random.Random(seeded(f"equal plans: {law.__name__}"))
    certified = 0
    for _ in range(examples(60)):
        one, other = law(draw)
        expected = meaning(other)
        assert meaning(one) == expected, (one, other)
        certified += expected != REFUSED
    assert certified  # a law about refusals alone would say nothing


def priced(**changes: Any) -> Bracket:
    """The bracket of a plan of one release with noise of one clip norm."""
    one = {"name": "all", "clip_norm": 1, "noise_multiplier": 1}
    document: Document = {"version": 1, "adjacency": "zero_out", "releases": [one], **changes}
    result = certify(plan_from(document), second_opinion=False).epsilon
    assert result is not None
    return result


def test_a_new_tree_in_each_step_is_independent_noise() -> None:
    """The reference is the ε of one Gaussian release of μ = 4, of another program."""
    result = priced(
        dataset={"name": "toy", "size": 10},
        sampling={"scheme": "full_batch"},
        noise={"kind": "tree", "restart": True},
        steps=16,
        target={"delta": 1e-5},
    )
    assert result.lower <= 24.38161088311273 <= result.upper <= 24.3817


@pytest.mark.parametrize("scheme", ["shuffled", "fixed_size"])
def test_the_first_lot_of_an_order_costs_what_a_sample_does(scheme: str) -> None:
    """δ = 1e-3 of ((1-γ) N(0) + γ N(2)) against N(0), γ = 1/50, by quadrature at both ends."""
    result = priced(
        adjacency="replace_one",
        dataset={"name": "toy", "size": 50},
        sampling={"scheme": scheme, "lot_size": 1},
        releases=[{"name": "all", "clip_norm": 1, "noise_multiplier": 4.745}],
        steps=1,
        target={"delta": 1e-3},
    )
    assert 0.009255 < result.lower <= result.upper < 0.009257
    beyond = (one_sample_delta(end) for end in (result.lower, result.upper))
    assert [round(delta, 6) for delta in beyond] == [1e-3, 1e-3]


def one_sample_delta(epsilon: float, rate: float = 0.02, sigma: float = 4.745) -> float:
    """The larger δ of both orders of the pair of one sample, by quadrature."""
    at = np.linspace(-60, 62, 1_000_001)
    without = np.exp(-((at / sigma) ** 2) / 2)
    drawn = (1 - rate) * without + rate * np.exp(-(((at - 2) / sigma) ** 2) / 2)
    scale = (at[1] - at[0]) / sigma / np.sqrt(2 * np.pi)
    orders = (drawn, without), (without, drawn)
    return max(scale * np.maximum(p - np.exp(epsilon) * q, 0).sum() for p, q in orders)


def test_a_shuffled_run_costs_at_most_its_gaussian() -> None:
    """Other bounds beside an exact one take nothing of it."""
    run: Document = {
        "dataset": {"name": "toy", "size": 60000},
        "steps": 1000,
        "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 2}],
        "target": {"delta": 1e-5},
    }
    shuffled, cyclic = (
        priced(**run, sampling={"scheme": scheme, "lot_size": 256})
        for scheme in ("shuffled", "cyclic")
    )
    assert shuffled.upper <= cyclic.upper
