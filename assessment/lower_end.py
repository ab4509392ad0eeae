"""What attains the lower end of a plan's ε, in words.

>>> from affidavit.assessment.certification import certify
>>> from affidavit.plan.parse import plan_from
>>> plan = plan_from({"version": 1, "adjacency": "zero_out", "steps": 10,
...     "sampling": {"scheme": "poisson", "probability": 0.1}, "target": {"delta": 1e-5},
...     "releases": [{"name": "all", "clip_norm": 1, "noise_multiplier": 1}]})
>>> explain_lower_end(plan, certify(plan, second_opinion=False))[2]
'All other records contribute nothing.'
"""

from __future__ import annotations

from affidavit.accountants import (
    AccountantError,
    CountingAttack,
    DisplacedSumAttack,
    ScoreAttack,
    accountant,
)
from affidavit.assessment.assessment import Assessment
from affidavit.assessment.calibration import Solver, lower_open
from affidavit.plan import (
    Plan,
    events,
)


def explain_lower_end(plan: Plan, assessment: Assessment) -> tuple[str, ...]:
    """Return sentences about the attack on ``plan`` with the largest ε, none if none has any.

    ``assessment`` is that of the plan. Its decisive engine compares the attacks.
    """
    if assessment.epsilon is None or assessment.delta is None or not assessment.accountants:
        return ()
    solver = Solver(lowered=lower_open(plan), engine=accountant(assessment.accountants[0].name))
    try:
        attack, epsilon = solver.strongest_attack(solver.solve(), assessment.delta.upper)
    except AccountantError:
        return ()
    if epsilon <= 0:
        return ()
    match attack.tested:
        case (events.ShuffledEpoch() as epoch, times):
            threshold, count = CountingAttack(epoch, times).test(assessment.delta.upper)
            how = (
                f"At this δ the threshold is {threshold:.3g} standard deviations of the noise "
                f"above sums without the record, and the test asks for {count} such epochs or more."
            )
        case (events.AllocatedRecord() as record, times):
            test = ScoreAttack(record, times).test(assessment.delta.upper)
            side = "large" if test.side == "remove" else "small"
            how = (
                f"At this δ the score is log(1 + {test.weight:.3g} X) with X the likelihood ratio "
                f"of a step in which the record is, and the test asks whether their sum is {side}."
            )
        case (events.DisplacedSum() as sums, _):
            threshold = DisplacedSumAttack(sums).test(assessment.delta.upper)
            how = (
                f"At this δ the threshold is {threshold:.3g} standard deviations of the noise "
                "above those of the others alone."
            )
        case None:
            return attack.sentences
    return (*attack.sentences, how)
