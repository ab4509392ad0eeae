"""Who owns which record: counts, and choices that meet a bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from affidavit.trainer.data.ownership import (
    PartOwners,
    choose_records,
    count_ownership,
    group_records,
)

GRAPHS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=12)


@given(GRAPHS, st.integers(1, 4))
def test_a_choice_meets_the_bound_and_no_record_can_be_added(
    users: list[list[int]], most: int
) -> None:
    chosen = choose_records(users, most)
    assert count_ownership([users[record] for record in chosen]).contributions_per_user <= most
    for record in set(range(len(users))) - set(chosen):
        more = [users[record] for record in (*chosen, record)]
        assert count_ownership(more).contributions_per_user > most


@given(GRAPHS)
def test_groups_have_each_record_once_and_all_of_its_users(users: list[list[int]]) -> None:
    groups, members = group_records(users)
    assert sorted(record for group in groups for record in group) == list(range(len(users)))
    for group, names in zip(groups, members, strict=True):
        owners = [set(users[record]) for record in group]
        assert set(names) == set().union(*owners)
        assert set.intersection(*owners)
        whole = all(own == set(names) for own in owners)
        assert isinstance(names, PartOwners) is not whole


def test_records_of_one_user_are_cut_to_the_first() -> None:
    assert choose_records(["a", "b", "a", "a", "b"], 2) == [0, 1, 2, 4]
    assert choose_records(["a", ("b", "a"), "a"], 1) == [0, 1]  # a tuple is one name


@pytest.mark.parametrize(
    "users",
    [
        torch.tensor([7, 7, 8]),
        list(torch.tensor([7, 7, 8])),
        np.array([[7, 7], [7, 7], [8, 8]]),
        [{7}, [7, 7], 8],
    ],
)
def test_users_of_arrays_are_values(users: Any) -> None:
    assert count_ownership(users) == (2, 1)


@pytest.mark.parametrize("entry", [[], float("nan"), ["ann", float("nan")]])
def test_a_record_without_a_user_is_refused(entry: Any) -> None:
    with pytest.raises(ValueError, match="record 1 has no user"):
        choose_records(["ann", entry], 1)
    with pytest.raises(ValueError, match="at least 1"):
        choose_records(["ann"], 0)
