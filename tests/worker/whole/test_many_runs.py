"""Two hundred short runs over four worker processes: each once, in order, within the slots."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from tests.worker.whole.conftest import STEPS, Crowd

RUNS, WORKERS, SLOTS = 200, 4, 2


def at_once(trainings: list[dict[str, Any]]) -> int:
    """How many of them overlap at most."""
    moments = sorted(
        [(training["began"], 1) for training in trainings]
        + [(item["ended"], -1) for item in trainings]
    )
    most = now = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    return most


def by(field: str, trainings: list[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    result: dict[Any, list[dict[str, Any]]] = {}
    for training in sorted(trainings, key=lambda one: one["began"]):
        result.setdefault(training[field], []).append(training)
    return result


@pytest.mark.soak
def test_two_hundred_runs_each_once_by_priority_and_within_the_slots(crowd: Crowd) -> None:
    certificate, drawn = crowd.shop.certify(STEPS), random.Random(200)
    priority = {
        crowd.request(certificate, priority=rank): rank
        for rank in (drawn.randrange(-2, 3) for _ in range(RUNS))
    }
    crowd.workers(WORKERS, SLOTS, "--once")
    crowd.wait()
    crowd.require_each_once(list(priority))
    assert {len(kinds) for kinds in crowd.happened().values()} == {3}

    trainings = crowd.trained()
    workers = by("worker", trainings)
    assert len(workers) == WORKERS
    assert {at_once(item) for item in workers.values()} <= {1, SLOTS}
    # All runs waited before the first was claimed, so a slot never gets a more urgent one later.
    for worker in workers.values():
        for slot in by("slot", worker).values():
            ranks = [priority[training["run"]] for training in slot]
            assert all(one >= other for one, other in pairwise(ranks))
    # Whoever claims passes over nothing but what other slots are claiming at that moment.
    claimed = crowd.rows(
        "SELECT subject FROM log_entries WHERE kind = 'run'"
        """ AND content LIKE '%"event":"claimed"%' ORDER BY id"""
    )
    ordered = crowd.rows("SELECT id FROM runs ORDER BY priority DESC, requested_at, id")
    order = {run: place for place, (run,) in enumerate(ordered)}
    places = [order[run] for (run,) in claimed]
    for number, place in enumerate(places):
        passed_over = sum(later < place for later in places[number + 1 :])
        assert passed_over < WORKERS * SLOTS
