"""A sample of ``python -m tests.gate.checking.mutations``, and that its oracle bites."""

from __future__ import annotations

import random
from pathlib import Path

from tests.gate.checking.mutations import draw, least_epsilon, let_through


def test_mutated_plans_pass_where_an_oracle_of_its_own_says_so(tmp_path: Path) -> None:
    source = random.Random(7)
    plans = [draw(source) for _ in range(5)]
    least = [least_epsilon(plan) for plan in plans]
    room = [
        plan["target"]["epsilon"] / (epsilon * 1.03 + 0.1)
        for plan, epsilon in zip(plans, least, strict=True)
    ]
    assert min(room) < 0.9
    assert max(room) > 1
    for plan, epsilon, entry in zip(plans, least, room, strict=True):
        if epsilon > plan["target"]["epsilon"]:
            assert not let_through(plan, tmp_path), plan
        elif entry > 1:
            assert let_through(plan, tmp_path), plan
