"""A budget's ε as spent, committed, reserved and free: each run is in one of them, by its state."""

from __future__ import annotations

from decimal import Decimal

from affidavit.accountants import decimal_up
from affidavit.service.ledger import repository
from affidavit.service.ledger.wire_models import amounts_of, marginal_epsilon
from tests.service.ledger.conftest import TOY, Bench, call


def amounts(bench: Bench) -> dict[str, Decimal]:
    """The four, which always sum to the budget and to what the filter reads."""
    ledger = bench.ledger.read(repository.find_ledger, TOY)
    assert ledger is not None
    with bench.engine.connect() as connection:
        costs = repository.open_costs(connection, ledger.id, len(ledger.filter.orders))
    result = amounts_of(ledger, costs)
    assert result is not None
    assert sum(result.values()) == Decimal(ledger.state.budget.epsilon)
    taken = Decimal(ledger.state.budget.epsilon) - result["free"]
    assert abs(float(taken) - ledger.spent_epsilon()) <= 1e-4 * float(taken)
    assert min(result.values()) >= 0
    return result


def taken(bench: Bench) -> list[str]:
    """Which of the four are not zero."""
    return [name for name, epsilon in amounts(bench).items() if epsilon]


def test_each_run_is_in_the_amount_of_its_state(bench: Bench) -> None:
    bench.budget()
    assert taken(bench) == ["free"]
    claim = bench.claim()
    first, _ = bench.ledger.reserve(claim, call())
    assert taken(bench) == ["reserved", "free"]
    bench.commit(first.id)
    assert taken(bench) == ["committed", "free"]
    second, _ = bench.ledger.reserve(claim, call())
    assert taken(bench) == ["committed", "reserved", "free"]
    both = amounts(bench)
    bench.settle(first.id, 10, None)
    settled = amounts(bench)
    assert (settled["spent"], settled["committed"]) == (both["committed"], 0)
    assert settled["free"] == both["free"]
    bench.release(second.id, "")
    assert taken(bench) == ["spent", "free"]


def test_a_run_that_is_admitted_alone_is_reserved_whole(bench: Bench) -> None:
    claim = bench.claim()
    epsilon = claim.cost.as_document()["epsilon"]
    # As small as it can be on the page's six digits.
    bench.budget(decimal_up(float(epsilon), 6), "0.00001")
    assert bench.ledger.reserve(claim, call())[0].admitted_by == "alone"
    assert taken(bench) == ["reserved"]


def test_a_budget_below_what_was_taken_has_nothing_free(bench: Bench) -> None:
    bench.budget()
    bench.ledger.reserve(bench.claim(), call())
    bench.budget("0.01")
    ledger = bench.ledger.read(repository.find_ledger, TOY)
    assert ledger is not None
    with bench.engine.connect() as connection:
        costs = repository.open_costs(connection, ledger.id, len(ledger.filter.orders))
    result = amounts_of(ledger, costs)
    assert result is not None
    assert result["free"] == 0
    assert result["reserved"] > Decimal("0.01")


def test_what_a_run_adds_is_what_its_absence_would_save(bench: Bench) -> None:
    """Of Gaussian runs alike, each of n adds less than the first, and all of them the same."""
    bench.budget()
    runs = [bench.ledger.reserve(bench.claim(), call())[0] for _ in range(3)]
    spent = []
    for gone in (*runs, None):
        ledger = bench.ledger.read(repository.find_ledger, TOY)
        assert ledger is not None
        spent.append(ledger.spent_epsilon())
        if gone is not None:
            added = marginal_epsilon(ledger, gone)
            bench.release(gone.id, "")
            after = bench.ledger.read(repository.find_ledger, TOY)
            assert after is not None
            left = after.spent_epsilon() if after.state.runs else 0.0
            assert added == spent[-1] - left
            released = bench.ledger.reservation(gone.id)
            assert marginal_epsilon(after, released) == 0
    three, two, one, _ = spent
    assert 0 < three - two < two - one < one
