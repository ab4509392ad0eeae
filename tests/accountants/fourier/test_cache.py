"""Cached answers equal computed ones, in any order, and the cache is bounded."""

from __future__ import annotations

import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from affidavit.accountants import fourier_accountant as accountant
from affidavit.accountants.bracket import Bracket
from affidavit.accountants.fourier.cache import SharedCache
from affidavit.accountants.fourier.discretized_pld import Grid
from affidavit.accountants.fourier.privacy_loss import Cells, LossLaw
from affidavit.accountants.fourier_accountant import FourierAccountant
from affidavit.accountants.protocol import OutOfReach
from affidavit.plan import events

pytestmark = pytest.mark.usefixtures("lattice_alone")

QUESTIONS = [(steps, delta) for steps in (50, 200) for delta in (1e-6, 1e-9)]


def plan(steps: int, sigma: float = 1.0) -> events.Repeated:
    leaf = events.PoissonSubsampledGaussian(sampling_probability=0.02, noise_multiplier=sigma)
    return events.Repeated(event=leaf, count=steps)


def ask(engine: FourierAccountant, steps: int, delta: float) -> tuple[Bracket, Bracket]:
    curve = engine.curve(plan(steps))
    epsilon = curve.epsilon(delta)
    return epsilon, curve.delta(epsilon.upper)


def test_answers_do_not_depend_on_earlier_requests() -> None:
    alone = [ask(FourierAccountant(), *question) for question in QUESTIONS]
    engine = FourierAccountant()
    assert [ask(engine, *question) for question in QUESTIONS] == alone
    other = FourierAccountant()
    assert [ask(other, *question) for question in reversed(QUESTIONS)] == alone[::-1]
    with ThreadPoolExecutor(4) as pool:
        requested = pool.map(lambda question: ask(engine, *question), QUESTIONS * 3)
        assert list(requested) == alone * 3


@pytest.mark.soak
def test_a_sweep_shares_measures_and_answers_as_its_plans_do_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured, true = [], Grid.cells

    def counted(self: Grid, law: LossLaw) -> Cells:
        measured.append(law)
        return true(self, law)

    monkeypatch.setattr(Grid, "cells", counted)
    warm = [plan(steps) for steps in range(1000, 2000, 50)]
    phases = [events.Composed(events=(event, plan(200, 1.5))) for event in warm[::8]]
    questions = list(itertools.product([*warm, *phases], (1e-5, 1e-7, 1e-9)))
    alone = [FourierAccountant().curve(event).epsilon(delta) for event, delta in questions]
    apart, engine = len(measured), FourierAccountant()
    assert [engine.curve(event).epsilon(delta) for event, delta in questions] == alone
    assert len(measured) - apart < apart / 2


def test_a_question_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FourierAccountant()
    curve = engine.curve(plan(50))
    first, wide = curve.epsilon(1e-6), curve.with_width(1e-2).epsilon(1e-6)
    assert first.width < wide.width

    def never(*_: object) -> float:
        raise AssertionError("computed again")

    monkeypatch.setattr(accountant, "saddle_at_delta", never)
    assert engine.curve(plan(50)).epsilon(1e-6) == first
    with pytest.raises(AssertionError, match="again"):
        engine.curve(plan(50, 1.0 + 1e-12)).epsilon(1e-6)


def test_a_refusal_is_given_again() -> None:
    curve = FourierAccountant().curve(plan(10_000_000, 0.2))
    for _ in range(2):
        with pytest.raises(OutOfReach):
            curve.epsilon(1e-6)


def test_the_least_recently_used_are_evicted() -> None:
    stored = SharedCache(10)

    def entry(key: int, found: int) -> int:
        return stored.get(key, lambda: found, lambda _: 2)

    for index in range(20):
        entry(index, index)
        entry(0, 99)
    assert len(stored) == 5
    assert [entry(0, 99), entry(19, 99), entry(3, 99)] == [0, 19, 99]


def test_a_value_that_would_evict_the_others_is_not_cached() -> None:
    stored = SharedCache(10)
    assert [stored.get("large", lambda at=at: at, lambda _: 3) for at in (1, 2)] == [1, 2]  # type: ignore[misc]
    assert len(stored) == 0


def test_a_copy_for_another_process_is_empty() -> None:
    engine = FourierAccountant()
    result = engine.curve(plan(50)).epsilon(1e-6)
    copy = pickle.loads(pickle.dumps(engine))
    assert len(engine.cache) > 0
    assert len(copy.cache) == 0
    assert copy.curve(plan(50)).epsilon(1e-6) == result
