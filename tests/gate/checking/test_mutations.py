"""A sample of ``python -m tests.gate.checking.mutations``, and that its oracle bites."""

from __future__ import annotations

import random
from pathlib import Path

from tests.gate.checking.mutations import draw, least_epsilon, let_through, wrong


def test_no_mutated_plan_that_is_under_noised_is_let_through(tmp_path: Path) -> None:
    source = random.Random(20260701)
    assert [line for _ in range(15) for line in wrong(source, tmp_path)] == []


def test_the_oracle_finds_both_kinds_and_the_gate_is_no_wall(tmp_path: Path) -> None:
    source = random.Random(7)
    plans = [draw(source) for _ in range(12)]
    room = [plan["target"]["epsilon"] / (least_epsilon(plan) * 1.03 + 0.1) for plan in plans]
    assert sum(item < 0.9 for item in room) > 0
    passable = [plan for plan, entry in zip(plans, room, strict=True) if entry > 1]
    assert len(passable) > 0
    assert all(let_through(plan, tmp_path) for plan in passable)
