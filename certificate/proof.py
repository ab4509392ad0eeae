"""Proofs of certificates: the witness that is signed, and the checker run on it.

A proof is about the plan that the certificate carries, with what it left open filled in as
certified: first of σ_joint and of the sensitivity of correlated noise, then of the releases. It is
an addition to the accountants' bracket: the bound that it proves may lie above the certified one
by a ten-thousandth, and says so. Certificates without one can be proved too, by searching for the
witness when asked.
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
    CHAIN,
    DOMINATING_PAIRS,
    MAX_ROWS,
    Bracket,
    CutLots,
    Draws,
    Patterns,
    Products,
    Proof,
    Provable,
    Unproved,
    Witness,
    accountant,
    bad_witness,
    buffered,
    by_distance,
    has_noise,
    leaves,
    matrix_products,
    matrix_sensitivity,
    moves_no_more,
    no_statement,
    parse_witness,
    prove,
    search_witness,
    takes_part_no_more,
    tells_no_less,
    toeplitz_products,
    toeplitz_sensitivity,
    tree_sensitivity,
    witness_document,
)
from affidavit.certificate.assessment import Assessment
from affidavit.certificate.certification import certify
from affidavit.certificate.runs.step_requirements import PlanNotClosed, certified_plan
from affidavit.certificate.statement import statement
from affidavit.mechanisms import (
    STRETCHES_PER_BLOCK,
    Lowered,
    lower,
    noise_multiplier,
    subsampled_pair,
)
from affidavit.plan import (
    ChainOfNeighbours,
    ClippingQuantile,
    Composed,
    Event,
    Gaussian,
    GaussianMixture,
    Leaf,
    MalformedPlan,
    RandomAllocationGaussian,
    Reason,
    RefusedPlan,
    plan_from,
    schedule,
)

if TYPE_CHECKING:
    from affidavit.mechanisms import CorrelatedRun

T = TypeVar("T")

LOOSENESS = 1e-4
"""How far the ε of a proof may lie above the certified one, relative to it."""


def proof_document(predicate: Mapping[str, Any]) -> dict[str, Any]:
    """The proof to sign with ``predicate``; raises ``Unproved``.

    It has the witness and the statements of docs/theorems that it rests on.
    """
    witness, proof = _search(predicate)
    _within(proof, predicate)
    return {**witness_document(witness), "statements": list(proof.theorems)}


def with_proof(assessment: Assessment) -> Assessment:
    """``assessment`` with a proof of its bound, or with the reason why there is none.

    Where the checker has no statement for the bound, a larger one that it proves takes its place if
    the verdict is the same.
    """
    provable = _provable(assessment)
    result = _with_own_proof(provable)
    if result.proof is None:
        return replace(assessment, proof_problem=result.proof_problem)
    return replace(result, groups=assessment.groups)


def _provable(assessment: Assessment) -> Assessment:
    """``assessment``, or the same verdict by the bounds that the checker has statements for."""
    own, opinions = assessment.epsilon, assessment.accountants
    if own is None or not opinions or not isinstance(accountant(opinions[0].name), Provable):
        return assessment
    plan = plan_from(assessment.plan)
    looser = certify(plan, second_opinion=False, provable=True)
    larger = looser.epsilon is not None and looser.epsilon.upper > own.upper * (1 + LOOSENESS)
    # At noise that the plan leaves open ε hardly differs, and the noise does.
    noisier = any(map(operator.ne, looser.releases, assessment.releases))
    if looser.verdict != assessment.verdict or not (larger or noisier):
        return assessment
    return certify(plan, second_opinion=True, provable=True) if len(opinions) > 1 else looser


def _with_own_proof(assessment: Assessment) -> Assessment:
    stated = statement(assessment, requester="", issued_at=datetime.now(UTC), untrusted=False)
    try:
        return replace(assessment, proof=proof_document(stated["predicate"]))
    except Unproved as failure:
        problem = Reason(code=failure.code, message=failure.message, remedy=failure.remedy)
        return replace(assessment, proof_problem=problem)


def prove_certificate(predicate: Mapping[str, Any]) -> Proof:
    """Prove ``predicate``'s guarantee from its own witness, or from one that is searched for.

    Raises ``Unproved`` where it cannot be proved, with the code of what is in the way.
    """
    signed = predicate.get("proof")
    if signed is None:
        _, proof = _search(predicate)
    elif isinstance(signed, Mapping):
        witness = parse_witness(signed)
        lowered, event = _lowered(predicate)
        bound = witness.event(event)
        if isinstance(bound, ChainOfNeighbours):
            for link in witness.links:
                _require_noise(lowered, link.event(bound.event), of_link=True)
        else:
            _require_noise(lowered, bound)
        proof = prove(witness, event)
    else:
        raise Unproved(
            "bad_witness", "The proof is not a JSON object.", "Ask for a new certificate."
        )
    return _within(proof, predicate)


def proof_sources(proof: Proof) -> tuple[str, ...]:
    """The pages of docs/theorems that ``proof`` rests on, the checker's own first."""
    pages = {
        "group-privacy" if name == CHAIN else DOMINATING_PAIRS[name].source
        for name in proof.theorems
    }
    return "checker", *sorted(pages)


def _lowered(predicate: Mapping[str, Any]) -> tuple[Lowered, Event]:
    """What the certificate is of, with what the plan left open filled in as certified."""
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


def _require_noise(lowered: Lowered, event: Event, of_link: bool = False) -> None:
    """Raise ``Unproved`` unless the plan gives its phases the noise and lots of ``event``.

    That is of the neighbours of a chain where it is ``of_link``.
    """
    if of_link:
        one = lowered.single_record_run
        if one is None:
            raise bad_witness("it is for neighbours that the run has none of")
        lowered = one
    # A selection has no statement, whatever it selects from.
    if lowered.extra.selection is None and isinstance(event, Composed):
        for index, phase in enumerate(event.events[: len(lowered.phases)]):
            _require_noise_of_phase(lowered, index, phase)


def _require_noise_of_phase(lowered: Lowered, index: int, event: Event) -> None:
    """Raise ``Unproved`` unless the plan gives phase ``index`` the noise and lots of ``event``."""
    plan, phase, own = lowered.plan, lowered.plan.phases[index], lowered.phases[index]
    blocks = [(release.count, noise_multiplier(release)) for release in phase.releases]
    if phase.clipping == "flat":
        blocks = [(1, min(sigma for _, sigma in blocks))]
    # A count's record adds 1/2 or -1/2.
    counts = [extra for extra in plan.extra if isinstance(extra, ClippingQuantile)]
    blocks += [(extra.count, 2 * Fraction(extra.noise_std)) for extra in counts]
    if own.whole is not None:
        raise no_statement(plan.optimizer.name)
    pair = subsampled_pair(plan)
    if any(getattr(leaf, "pair", pair) != pair for leaf, _ in leaves(event)):
        raise bad_witness("it is for another adjacency")
    if _is_told(lowered, index, event, blocks):
        return
    for leaf, _ in leaves(event):
        if not _has_noise_and_lots(lowered, index, leaf, blocks):
            raise Unproved(
                "not_proved",
                f"Phase {index + 1} is not proved to have the noise that was accounted.",
                "Rely on the certificate's accountants.",
            )


def _has_noise_and_lots(
    lowered: Lowered, index: int, leaf: Leaf, blocks: list[tuple[int, Fraction]]
) -> bool:
    plan, phase, own = lowered.plan, lowered.plan.phases[index], lowered.phases[index]
    records = plan.dataset.records_per_unit
    squared = arb(1)
    if own.correlation is not None and own.steps is not None:
        at = own.correlation.at(own.steps)
        if isinstance(leaf, GaussianMixture):
            return _moves_no_more(lowered, index, leaf, blocks)
        if isinstance(leaf, Gaussian) and at.unsampled is not None:
            at = replace(at, route="gaussian", sensitivity=at.unsampled)
        # Lots that are drawn afresh have pairs that are in clip norms.
        distance = at.distance if at.route == "gaussian" else 1.0
        squared = (distance * _sensitivity(at)) ** 2
    elif isinstance(leaf, Gaussian):
        squared = arb(own.sampled.distance) ** 2
    elif isinstance(leaf, RandomAllocationGaussian) and own.steps is not None:
        once = phase.sampling.bins_drawn != "each_epoch"
        squared = arb(own.sampled.times(own.steps) if once else 1)
    if phase.sampling.scheme in ("poisson", "truncated_poisson", "b_min_sep"):
        rate = Fraction(getattr(leaf, "sampling_probability", 1.0))
        sampled = rate >= schedule.highest_probability(plan, phase)
        sampled &= isinstance(leaf, Gaussian) or getattr(leaf, "records", 1) >= records
    else:
        sampled = True
    return sampled and has_noise(leaf.noise_multiplier, blocks, squared)


def _moves_no_more(
    lowered: Lowered, index: int, leaf: GaussianMixture, blocks: list[tuple[int, Fraction]]
) -> bool:
    """Whether a record that takes part as it is drawn moves phase ``index`` by no more."""
    at, draws = _drawn(lowered, index)
    apart = lowered.plan.phases[index].sampling.separation
    if apart is not None and at.strategy.bands <= apart:
        return all(
            takes_part_no_more(leaf, blocks, by_distance(products), draws, apart)
            for products in _products(at)
        )
    cut = _cut_lots(lowered, index)
    return all(moves_no_more(leaf, blocks, products, draws, cut) for products in _products(at))


def _cut_lots(lowered: Lowered, index: int) -> CutLots | None:
    """The lots of phase ``index``, if they are cut."""
    plan, own = lowered.plan, lowered.phases[index]
    size, largest = plan.dataset.size, plan.phases[index].sampling.max_lot_size
    if size is None or largest is None or own.steps is None:
        return None
    adds, records = plan.adjacency == "add_remove", plan.dataset.records_per_unit
    return CutLots(
        steps=own.steps,
        probability=schedule.highest_probability(plan, plan.phases[index]),
        largest=largest,
        records=records,
        others=size if adds else size - records,
        # A record that is replaced moves the sum by as much as the one in its place.
        moved=records * (2 if adds else 1),
    )


def _is_told(
    lowered: Lowered, index: int, event: Event, blocks: list[tuple[int, Fraction]]
) -> bool:
    """Whether ``event`` bounds phase ``index`` where it is told in which steps a record may be."""
    plan, apart = lowered.plan, lowered.plan.phases[index].sampling.separation
    if apart is None or plan.dataset.records_per_unit > 1 or not isinstance(event, Composed):
        return False
    at, draws = _drawn(lowered, index)
    return all(
        any(
            tells_no_less(leaves(event), blocks, products, draws, apart, stretches)
            for stretches in STRETCHES_PER_BLOCK
        )
        for products in map(by_distance, _products(at))
    )


def _drawn(lowered: Lowered, index: int) -> tuple[CorrelatedRun, Draws]:
    """The correlated noise of phase ``index``, and how often a unit's records can be drawn."""
    own, phase = lowered.phases[index], lowered.plan.phases[index]
    assert own.correlation is not None
    assert own.steps is not None
    at = own.correlation.at(own.steps)
    turns = -(-own.steps // at.turn) * lowered.plan.dataset.records_per_unit
    rate = schedule.highest_probability(lowered.plan, phase) * at.turn
    return at, Draws(most=turns, probability=rate)


def _sensitivity(at: CorrelatedRun) -> arb:
    """sens of a phase's strategy in clip norms, a ball; raises ``Unproved``."""
    from affidavit.mechanisms.strategies import Tree  # slow to import, and seldom needed

    strategy, turns, factors = at.strategy.injected, at.participation, _factors(at)
    steps = strategy.steps
    patterns = Patterns(
        most=turns.participations, apart=turns.separation, exactly=turns.schema == "fixed_epoch"
    )
    if at.route == "white_noise":
        patterns = Patterns(most=steps, apart=at.turn, white=True)
    if at.route == "cyclic_poisson":
        patterns = Patterns(most=1, apart=1)
    if isinstance(strategy, Tree) and not patterns.white and set(factors) == {1.0}:
        return tree_sensitivity(steps, strategy.period, patterns)
    of_column = partial(toeplitz_sensitivity, patterns=patterns)
    return reduce(arb.max, _of_each(at, of_column, partial(matrix_sensitivity, patterns=patterns)))


def _products(at: CorrelatedRun) -> list[Products]:
    """Those of the columns of C, for each C that the strategy's rounding allows."""
    turn = at.turn
    return _of_each(at, partial(toeplitz_products, turn=turn), partial(matrix_products, turn=turn))


def _of_each(at: CorrelatedRun, of_column: Callable[..., T], of_rows: Callable[..., T]) -> list[T]:
    factors = _factors(at)
    column, inverse = _toeplitz(at)
    if column is not None:
        return [of_column(column, factors, inverse=inverse)]
    matrices, inverse = _matrices(at)
    return [of_rows(rows, factors, inverse=inverse) for rows in matrices]


def _factors(at: CorrelatedRun) -> list[float]:
    """The clip norm of each step, in units of the plan's."""
    from affidavit.mechanisms.strategies import Scheduled

    if isinstance(at.strategy, Scheduled):
        return [float(factor) for factor in at.strategy.factors]
    return [1.0] * at.strategy.steps


def _toeplitz(at: CorrelatedRun) -> tuple[Sequence[float] | Sequence[arb] | None, bool]:
    """The first column of C, and whether it is that of C⁻¹; None where C is not Toeplitz."""
    strategy = at.strategy.injected
    match dict(strategy.coefficients):
        case {"decays": decays, "scales": scales}:
            return buffered(decays.tolist(), scales.tolist(), strategy.steps), False
        case {"strategy": numbers} | {"noise": numbers} if numbers.ndim == 1:
            return numbers.tolist(), "noise" in strategy.coefficients
    return None, False


def _matrices(at: CorrelatedRun) -> tuple[list[list[list[float]]], bool]:
    """C, with and without what rounding left above its diagonal, and whether these are of C⁻¹."""
    from affidavit.mechanisms.strategies import Tree

    strategy = at.strategy.injected
    if strategy.steps > MAX_ROWS:
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


def _within(proof: Proof, predicate: Mapping[str, Any]) -> Proof:
    guarantee = predicate["guarantee"]
    stated = float(guarantee["epsilon"]["upper"]), float(guarantee["delta"]["upper"])
    if float(proof.epsilon) > stated[0] * (1 + LOOSENESS) or float(proof.delta) > stated[1]:
        raise Unproved(
            "not_proved",
            f"The proof is of ε ≤ {proof.epsilon} at δ = {proof.delta}; the certificate states "
            f"{guarantee['epsilon']['upper']} at {guarantee['delta']['upper']}.",
            "Ask for a new certificate.",
        )
    return proof
