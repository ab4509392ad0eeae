"""Proofs of certificates: the signed witness, and its check.

A proof is about the solved plan of the certificate: first of σ_joint and of the sensitivity of
correlated noise, then of the releases. It adds to the accountants' bracket: the proved bound may
lie above the certified one by a ten-thousandth, and is stated. A certificate without a proof can be
proved too, by searching for a witness.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar

from flint import arb

from affidavit.accountants import (
    Bracket,
    Provable,
    accountant,
    leaves,
    parse_witness,
    search_witness,
    witness_document,
)
from affidavit.assessment import Assessment, PlanNotClosed, certified_plan, certify
from affidavit.certificate.issuance import statement
from affidavit.checker import (
    CHAIN,
    Proof,
    Unproved,
    Witness,
    bad_witness,
    dominating_pairs,
    no_statement,
    participation,
    prove,
    sensitivity,
)
from affidavit.mechanisms import (
    STRETCHES_PER_BLOCK,
    Lowered,
    lower,
    noise_multiplier,
    subsampled_pair,
)
from affidavit.plan import (
    ClippingQuantile,
    MalformedPlan,
    Phase,
    Plan,
    Reason,
    RefusedPlan,
    events,
    plan_from,
    schedule,
)

if TYPE_CHECKING:
    from affidavit.mechanisms import CorrelatedRun

T = TypeVar("T")

LOOSENESS = 1e-4
"""The most by which the ε of a proof may lie above the certified one, relatively."""


def proof_document(predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the proof to sign with ``predicate``; raises ``Unproved``.

    It has the witness and the statements of docs/theorems on which it rests.
    """
    witness, proof = _search(predicate)
    _require_tight(proof, predicate)
    return {**witness_document(witness), "statements": list(proof.theorems)}


def with_proof(assessment: Assessment) -> Assessment:
    """Add a proof of the bound to ``assessment``, or the reason why there is none.

    If the checker has no statement for the bound, a larger bound that it proves replaces it, unless
    the verdict would change.
    """
    provable = _provable(assessment)
    stated = statement(provable, requester="", issued_at=datetime.now(UTC), untrusted=False)
    try:
        proof = proof_document(stated["predicate"])
    except Unproved as failure:
        problem = Reason(code=failure.code, message=failure.message, remedy=failure.remedy)
        return replace(assessment, proof_problem=problem)
    return replace(
        provable,
        proof=proof,
        gaussian=assessment.gaussian,
        gaussian_problem=assessment.gaussian_problem,
        groups=assessment.groups,
    )


def _provable(assessment: Assessment) -> Assessment:
    """Assess the plan by provable bounds only; return ``assessment`` if this changes nothing."""
    epsilon, opinions = assessment.epsilon, assessment.accountants
    if epsilon is None or not opinions or not isinstance(accountant(opinions[0].name), Provable):
        return assessment
    plan = plan_from(assessment.plan)
    looser = certify(plan, second_opinion=False, provable=True)
    larger = looser.epsilon is not None and looser.epsilon.upper > epsilon.upper * (1 + LOOSENESS)
    # If the plan leaves the noise open, the noise differs instead of ε.
    noisier = any(map(operator.ne, looser.releases, assessment.releases))
    if looser.verdict != assessment.verdict or not (larger or noisier):
        return assessment
    return certify(plan, second_opinion=True, provable=True) if len(opinions) > 1 else looser


def prove_certificate(predicate: Mapping[str, Any]) -> Proof:
    """Prove ``predicate``'s guarantee from its signed witness, or search for a witness.

    Raises ``Unproved`` with the code of the obstacle.
    """
    signed = predicate.get("proof")
    if signed is None:
        _, proof = _search(predicate)
    elif isinstance(signed, Mapping):
        witness = parse_witness(signed)
        lowered, event = _lowered(predicate)
        bound = witness.event(event)
        if isinstance(bound, events.ChainOfNeighbours):
            for link in witness.links:
                _require_noise(lowered, link.event(bound.event), of_link=True)
        else:
            _require_noise(lowered, bound)
        proof = prove(witness, event)
    else:
        raise Unproved(
            "bad_witness", "The proof is not a JSON object.", "Ask for a new certificate."
        )
    _require_tight(proof, predicate)
    return proof


def proof_sources(proof: Proof) -> tuple[str, ...]:
    """Return the pages of docs/theorems on which ``proof`` rests, the checker's own first."""
    pages = {
        "group-privacy" if name == CHAIN else dominating_pairs.DOMINATING_PAIRS[name].source
        for name in proof.theorems
    }
    return "checker", *sorted(pages)


def _lowered(predicate: Mapping[str, Any]) -> tuple[Lowered, events.Event]:
    """Lower the solved plan of the certificate; raises ``Unproved``."""
    guarantee = predicate["guarantee"]
    if guarantee is None:
        raise Unproved("nothing_to_prove", "The certificate states no bound.", "Read its reasons.")
    if "confidence" in guarantee:
        raise no_statement("a bound that is sampled and holds with a confidence")
    try:
        lowered = lower(certified_plan(dict(predicate)))
        return lowered, lowered.event()
    except (PlanNotClosed, MalformedPlan, RefusedPlan, ValueError) as error:
        raise Unproved(
            "not_lowered", f"The plan has no events: {error}.", "Ask for a new certificate."
        ) from None


def _require_noise(lowered: Lowered, event: events.Event, of_link: bool = False) -> None:
    """Raise ``Unproved`` unless the plan gives its phases the noise and lots of ``event``.

    With ``of_link`` the event is of the neighbours of a chain.
    """
    if of_link:
        one = lowered.single_record_run
        if one is None and _is_shuffled(lowered):
            one = lowered  # a link to the run of others alone
        if one is None:
            raise bad_witness("it is for neighbours that the run has none of")
        lowered = one
    if isinstance(event, events.ChainOfNeighbours):
        if not _is_shuffled(lowered):
            raise no_statement("a chain of neighbours within another one")
        for link in events.alternatives(event.event):
            _require_noise(lowered, link)
        return
    # A selection has no statement.
    if lowered.extra.selection is None and isinstance(event, events.Composed):
        for index, phase in enumerate(event.events[: len(lowered.phases)]):
            _require_noise_of_phase(lowered, index, phase)


def _is_shuffled(lowered: Lowered) -> bool:
    """Whether others can stand in for a record of the run, if they fill its lots."""
    return all(phase.scheme == "shuffled" for phase in lowered.phases)


def _require_noise_of_phase(lowered: Lowered, index: int, event: events.Event) -> None:
    """Raise ``Unproved`` unless the plan gives phase ``index`` the noise and lots of ``event``."""
    plan, phase, own = lowered.plan, lowered.plan.phases[index], lowered.phases[index]
    blocks = [(release.count, noise_multiplier(release)) for release in phase.releases]
    if phase.clipping == "flat":
        blocks = [(1, min(sigma for _, sigma in blocks))]
    # A record adds 1/2 or -1/2 to a count.
    counts = [extra for extra in plan.extra if isinstance(extra, ClippingQuantile)]
    blocks += [(extra.count, 2 * Fraction(extra.noise_std)) for extra in counts]
    if own.whole is not None:
        raise no_statement(plan.optimizer.name)
    # A record that is set to zero is replaced by one that contributes nothing.
    pairs = {subsampled_pair(plan), *(["replace_one"] if plan.adjacency == "zero_out" else [])}
    if any(getattr(leaf, "pair", None) not in {None, *pairs} for leaf, _ in leaves(event)):
        raise bad_witness("it is for another adjacency")
    if _bounds_known_stretches(lowered, index, event, blocks):
        return
    for leaf, _ in leaves(event):
        if not _has_noise_and_lots(lowered, index, leaf, blocks):
            raise Unproved(
                "not_proved",
                f"Phase {index + 1} is not proved to have the noise that was accounted.",
                "Rely on the certificate's accountants.",
            )


def _has_noise_and_lots(
    lowered: Lowered, index: int, leaf: events.Leaf, blocks: list[tuple[int, Fraction]]
) -> bool:
    plan, phase, own = lowered.plan, lowered.plan.phases[index], lowered.phases[index]
    records = plan.dataset.records_per_unit
    squared = arb(1)
    if own.correlation is not None and own.steps is not None:
        at = own.correlation.at(own.steps)
        if isinstance(leaf, events.GaussianMixture):
            return _moves_no_more(lowered, index, leaf, blocks)
        if isinstance(leaf, events.Gaussian) and at.unsampled is not None:
            at = replace(at, route="gaussian", sensitivity=at.unsampled)
        # The pairs of samples are in clip norms.
        is_sample = at.route != "gaussian" or isinstance(leaf, events.WithoutReplacementGaussian)
        distance = 1.0 if is_sample else at.distance
        squared = (distance * _sensitivity(at)) ** 2
    elif (
        isinstance(leaf, events.Gaussian)
        and own.sampled.reach is not None
        and own.steps is not None
    ):
        squared = _squared_reach(plan, phase, own.steps)
    elif isinstance(leaf, events.Gaussian):
        squared = arb(own.sampled.distance) ** 2
    elif isinstance(leaf, events.RandomAllocationGaussian) and phase.sampling.scheme == "shuffled":
        # A record moves a lot two clip norms from the run in which another one has its place.
        size, lot = plan.dataset.size or 0, phase.sampling.lot_size or 1
        turn = schedule.lots_in_turn(plan, phase)
        hidden = own.steps is not None and min(own.steps, turn) * lot < size
        if not hidden or records > 1 or leaf.bins > size // lot:
            return False
        squared = arb(4)
    elif isinstance(leaf, events.ReplacedAllocationGaussian) and leaf.place is not None:
        size, lot = plan.dataset.size or 0, phase.sampling.lot_size or 1
        placed = "replace_one" if plan.adjacency == "replace_one" else "zero_out"
        drawn = Fraction(leaf.bins * lot, size)
        if records > 1 or leaf.place != placed or not drawn <= Fraction(leaf.drawn) or drawn >= 1:
            return False
    elif (
        isinstance(leaf, events.RandomAllocationGaussian | events.ReplacedAllocationGaussian)
        and own.steps
    ):
        once = phase.sampling.scheme == "balls_in_bins"
        once &= phase.sampling.bins_drawn != "each_epoch"
        squared = arb(own.sampled.times(own.steps) if once else 1)
    if phase.sampling.scheme in ("poisson", "truncated_poisson", "b_min_sep"):
        rate = Fraction(getattr(leaf, "sampling_probability", 1.0))
        sampled = rate >= schedule.highest_probability(plan, phase)
        sampled &= isinstance(leaf, events.Gaussian) or getattr(leaf, "records", 1) >= records
    else:
        sampled = True
    return sampled and sensitivity.has_noise(leaf.noise_multiplier, blocks, squared)


def _squared_reach(plan: Plan, phase: Phase, steps: int) -> arb:
    """Return how far a user of more records than a lot moves a fixed order, squared."""
    size, lot, records = plan.dataset.size, phase.sampling.lot_size, plan.dataset.records_per_unit
    assert size is not None
    assert lot is not None
    distance = lot * (2 if plan.adjacency == "replace_one" else 1)
    filled = sensitivity.squared_lots(Fraction(records, lot), size // lot, steps)
    return arb(int(distance**2 * filled))


def _moves_no_more(
    lowered: Lowered, index: int, leaf: events.GaussianMixture, blocks: list[tuple[int, Fraction]]
) -> bool:
    """Whether a record that is drawn into phase ``index`` moves it by no more than ``leaf``."""
    (at, draws), plan = _drawn(lowered, index), lowered.plan
    if plan.phases[index].sampling.scheme == "fixed_size":
        if leaf.pair != "replace_one":
            return False
        # A record moves the sum two clip norms from the record whose place it takes.
        blocks = [(count, sigma / 2) for count, sigma in blocks]
    apart = plan.phases[index].sampling.separation
    if apart is not None and at.strategy.bands <= apart and plan.dataset.records_per_unit == 1:
        return all(
            participation.is_separated_participation_covered(
                leaf, blocks, participation.max_by_distance(products), draws, apart
            )
            for products in _products(at)
        )
    cut, pieces = _cut_lots(lowered, index), _steps_of(lowered, index, at)
    if all(
        participation.is_participation_covered(leaf, blocks, products, draws, cut)
        for products in pieces
    ):
        return True
    # Or nothing about the cut lots is revealed, and a record takes the place of another one.
    farther = [(count, sigma / 2) for count, sigma in blocks]
    is_hidden = cut is not None and (plan.adjacency == "add_remove" or leaf.pair == "replace_one")
    return is_hidden and all(
        participation.is_participation_covered(leaf, farther, products, draws)
        for products in pieces
    )


def _steps_of(
    lowered: Lowered, index: int, at: CorrelatedRun
) -> Sequence[participation.Nodes | participation.Products]:
    """Return the nodes of a tree, or products of columns; raises ``Unproved``."""
    from affidavit.mechanisms.strategies import Tree

    plan, strategy = lowered.plan, at.strategy
    if not isinstance(strategy, Tree):
        return [list(products) for products in _products(at)]
    if plan.phases[index].sampling.separation is not None:
        raise no_statement("records that wait, with the noise of a tree")
    records = plan.dataset.records_per_unit
    return [
        participation.Nodes(
            steps=strategy.steps, period=strategy.period, turn=at.turn, records=records
        )
    ]


def _cut_lots(lowered: Lowered, index: int) -> participation.CutLots | None:
    """Return the truncated lots of phase ``index``, or None."""
    plan, own = lowered.plan, lowered.phases[index]
    size, largest = plan.dataset.size, plan.phases[index].sampling.max_lot_size
    if size is None or largest is None or own.steps is None:
        return None
    adds, records = plan.adjacency == "add_remove", plan.dataset.records_per_unit
    return participation.CutLots(
        steps=own.steps,
        probability=schedule.highest_probability(plan, plan.phases[index]),
        largest=largest,
        records=records,
        others=size if adds else size - records,
        # A replaced record moves the sum by as much as its replacement.
        moved=2 if adds else 1,
    )


def _bounds_known_stretches(
    lowered: Lowered, index: int, event: events.Event, blocks: list[tuple[int, Fraction]]
) -> bool:
    """Whether ``event`` bounds phase ``index`` given the stretches in which a record may be."""
    plan, apart = lowered.plan, lowered.plan.phases[index].sampling.separation
    if apart is None or plan.dataset.records_per_unit > 1 or not isinstance(event, events.Composed):
        return False
    at, draws = _drawn(lowered, index)
    return all(
        any(
            participation.is_disclosure_covered(
                leaves(event), blocks, products, draws, apart, stretches
            )
            for stretches in STRETCHES_PER_BLOCK
        )
        for products in map(participation.max_by_distance, _products(at))
    )


def _drawn(lowered: Lowered, index: int) -> tuple[CorrelatedRun, participation.Draws]:
    """Return the correlated noise of phase ``index`` and the possible draws of a unit's records."""
    own, phase = lowered.phases[index], lowered.plan.phases[index]
    assert own.correlation is not None
    assert own.steps is not None
    at, records = own.correlation.at(own.steps), lowered.plan.dataset.records_per_unit
    turns = -(-own.steps // at.turn) * records
    rate = schedule.highest_probability(lowered.plan, phase) * at.turn
    if phase.sampling.scheme == "fixed_size" and (size := lowered.plan.dataset.size):
        # Fewer records are left after each of the unit's that is not in the lot.
        rate *= Fraction(size, size - records + 1)
    return at, participation.Draws(max_draws=turns, probability=rate)


def _sensitivity(at: CorrelatedRun) -> arb:
    """Return sens of a phase's strategy in clip norms, as a ball; raises ``Unproved``."""
    from affidavit.mechanisms.strategies import Tree  # slow to import, and seldom needed

    strategy, turns, factors = at.strategy.injected, at.participation, _factors(at)
    steps = strategy.steps
    patterns = sensitivity.Patterns(
        max_participations=turns.participations,
        separation=turns.separation,
        fixed_separation=turns.schema == "fixed_epoch",
        epoch=turns.epoch,
        lots_filled=turns.lots_filled,
    )
    if at.route == "white_noise":
        patterns = sensitivity.Patterns(
            max_participations=steps, separation=at.turn, white_noise=True
        )
    if at.route == "cyclic_poisson":
        patterns = sensitivity.Patterns(max_participations=1, separation=1)
    by_epoch = patterns.epoch is not None or patterns.lots_filled > 1
    of_nodes = not patterns.white_noise and not (by_epoch and steps <= sensitivity.MAX_ROWS)
    if isinstance(strategy, Tree) and of_nodes and set(factors) == {1.0}:
        return sensitivity.tree_sensitivity(steps, strategy.period, patterns)
    of_column = partial(sensitivity.toeplitz_sensitivity, patterns=patterns)
    return reduce(
        arb.max, _of_each(at, of_column, partial(sensitivity.matrix_sensitivity, patterns=patterns))
    )


def _products(at: CorrelatedRun) -> list[participation.Products]:
    """Return the products of the columns of C, for each C that the strategy's rounding allows."""
    return _of_each(
        at,
        partial(participation.toeplitz_products, turn=at.turn),
        partial(participation.matrix_products, turn=at.turn),
    )


def _of_each(at: CorrelatedRun, of_column: Callable[..., T], of_rows: Callable[..., T]) -> list[T]:
    factors = _factors(at)
    column, inverse = _toeplitz(at)
    if column is not None:
        return [of_column(column, factors, inverse=inverse)]
    matrices, inverse = _matrices(at)
    return [of_rows(rows, factors, inverse=inverse) for rows in matrices]


def _factors(at: CorrelatedRun) -> list[float]:
    """Return the clip norm of each step, in units of the plan's."""
    from affidavit.mechanisms.strategies import Scheduled

    if isinstance(at.strategy, Scheduled):
        return [float(factor) for factor in at.strategy.factors]
    return [1.0] * at.strategy.steps


def _toeplitz(at: CorrelatedRun) -> tuple[Sequence[float] | Sequence[arb] | None, bool]:
    """Return the first column of C, or None if C is not Toeplitz, and whether it is that of C⁻¹."""
    strategy = at.strategy.injected
    match dict(strategy.coefficients):
        case {"decays": decays, "scales": scales}:
            return sensitivity.blt_column(decays.tolist(), scales.tolist(), strategy.steps), False
        case {"strategy": numbers} | {"noise": numbers} if numbers.ndim == 1:
            return numbers.tolist(), "noise" in strategy.coefficients
    return None, False


def _matrices(at: CorrelatedRun) -> tuple[list[list[list[float]]], bool]:
    """Return C, with and without rounding errors above its diagonal, and whether it is C⁻¹."""
    from affidavit.mechanisms.strategies import Tree

    strategy = at.strategy.injected
    if strategy.steps > sensitivity.MAX_ROWS:
        raise no_statement(f"a matrix of {strategy.steps} steps")
    if "strategy" in strategy.coefficients or isinstance(strategy, Tree):
        return [strategy.strategy_matrix().tolist()], False
    noise, above = strategy.noise_matrix(), getattr(strategy, "above", None)
    return [noise.tolist()] + ([] if above is None else [(noise + above).tolist()]), True


def _search(predicate: Mapping[str, Any]) -> tuple[Witness, Proof]:
    lowered, event = _lowered(predicate)
    epsilon, delta = (float(predicate["guarantee"][name]["upper"]) for name in ("epsilon", "delta"))
    bracket = Bracket(lower=epsilon, upper=epsilon)
    return search_witness(
        event, bracket, delta, 0.99 * LOOSENESS, require=partial(_require_noise, lowered)
    )


def _require_tight(proof: Proof, predicate: Mapping[str, Any]) -> None:
    """Raise ``Unproved`` unless the proved bound is that of ``predicate`` within ``LOOSENESS``."""
    guarantee = predicate["guarantee"]
    epsilon, delta = (float(guarantee[name]["upper"]) for name in ("epsilon", "delta"))
    if float(proof.epsilon) > epsilon * (1 + LOOSENESS) or float(proof.delta) > delta:
        raise Unproved(
            "not_proved",
            f"The proof is of ε ≤ {proof.epsilon} at δ = {proof.delta}; the certificate states "
            f"{guarantee['epsilon']['upper']} at {guarantee['delta']['upper']}.",
            "Ask for a new certificate.",
        )
