"""Each row of the table of dominating pairs is at least what any data set shows, at every α.

The data sets, their exact laws and the rows' curves are computed in this folder, without the
engine and without the checker. New rows of the table are attacked without a change here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.accountants.falsifier.rows import Case, Row, binomial, table
from tests.accountants.falsifier.search import DATA_SETS, refutations
from tests.support.random_seeds import seeded

ROWS = table()


@pytest.mark.by_turns
@pytest.mark.parametrize("name", ROWS)
def test_no_data_set_shows_more_than_a_row_says(name: str) -> None:
    assert not [*refutations(ROWS[name], seeded(name), DATA_SETS)]


def edited(name: str, *changes: tuple[str, str], **fields: str) -> Row:
    """A row with texts replaced, all of which it has, in its pairs."""
    row = dict(ROWS[name], **fields)
    pairs = [dict(pair) for pair in row["pairs"]]
    for old, new in changes:
        assert any(old in text for pair in pairs for text in pair.values()), old
        pairs = [{side: text.replace(old, new) for side, text in pair.items()} for pair in pairs]
    return {**row, "pairs": pairs}


def moved(name: str, place: str) -> Row:
    """A row whose pairs hold on the sides of another place."""
    sides = {"above", "below"}
    pairs = [{**pair, **dict.fromkeys(sides & pair.keys(), place)} for pair in ROWS[name]["pairs"]]
    return {**ROWS[name], "pairs": pairs}


def without_last(name: str) -> Row:
    """A row without its last pair."""
    return {**ROWS[name], "pairs": ROWS[name]["pairs"][:-1]}


def merged(row: Row) -> Row:
    """A row with its first two pairs added up to one."""
    first, second, *rest = row["pairs"]
    one = {side: f"{first[side]} + {second[side]}" for side in first}
    return {**row, "pairs": [one, *rest]}


def with_left_over_merged() -> Row:
    """The left-over of a cover raised to a pair, and that merged with the lots of few others."""
    raised = edited(
        "truncated_hidden_add_remove", ("l*(1-q) N(0)", "l*(1-q)*(1-q) N(0) + l*(1-q)*q N(1)")
    )
    return merged(raised)


FAULTS: dict[str, Row] = {
    "a sign exchanged": edited("poisson_replace_one", ("q N(-1)", "q N(1)")),
    "a rate lower by a percent": edited(
        "poisson_add_remove", ("q N(1)", "0.01*q N(0) + 0.99*q N(1)")
    ),
    "an order forgotten": edited("poisson_add_remove", orders="symmetric"),
    "a replacement of zero": edited("gaussian_mixture_replace_one", ("N(-K)", "N(0)")),
    "half the distance": edited("without_replacement", ("N(2)", "N(1)")),
    "a place farther out": moved("without_replacement", "2"),
    "mass that is missing": edited("truncated_add_remove", (" + w*q N(1)", "")),
    "the rate of cut lots for that of others": edited("truncated_replace_one", ("u*q", "u*p")),
    "full lots hidden among others": merged(ROWS["truncated_add_remove"]),
    "a side without its pair": without_last("truncated_zero_out"),
    "a place moved": moved("truncated_zero_out", "3/2"),
    "a left-over in another pair": with_left_over_merged(),
    "smaller lots that hide and stay": edited("truncated_hidden_add_remove", ("*(1-t)", "")),
    "cut lots that hide and stay": edited("truncated_hidden_replace_one", ("*(1-f)", "")),
    "a cover that counts twice": edited("truncated_hidden_zero_out", ("c N(0)", "c N(0) + c N(0)")),
    "an order of bins forgotten": edited("random_allocation", orders="symmetric"),
    "a record that none displaces": edited("in_place_replace_one", ("1 N(2)", "1 N(1)")),
    "an order of places forgotten": edited("in_place_zero_out", orders="symmetric"),
}


@pytest.mark.by_turns
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_row_is_found(fault: str) -> None:
    assert next(refutations(FAULTS[fault], fault, 300), None)


BELIEFS: dict[str, tuple[str, Callable[[Case], Case]]] = {
    "a record of a user less": (
        "poisson_group",
        lambda case: replace(case, weights=tuple(binomial(len(case.weights) - 2, case.q))),
    ),
    "half of the data set": (
        "truncated_add_remove",
        lambda case: replace(case, size=max(case.lot, case.size // 2)),
    ),
    "a lot of one more": ("truncated_zero_out", lambda case: replace(case, lot=case.lot + 1)),
    "a bin more": ("random_allocation", lambda case: replace(case, bins=case.bins + 1)),
    "a percent more noise": ("gaussian", lambda case: replace(case, sigma=1.01 * case.sigma)),
}


@pytest.mark.parametrize("belief", BELIEFS)
def test_a_row_read_for_another_release_is_found(belief: str) -> None:
    name, believed = BELIEFS[belief]
    assert next(refutations(ROWS[name], belief, 300, believed), None)
