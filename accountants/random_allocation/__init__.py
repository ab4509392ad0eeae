"""Two-sided accounting of balls in bins (1-of-b random allocation) with independent noise.

Throughout, ε is in nats, σ the noise multiplier of one bin's release and ``rate`` 1/σ. X, V, Θ,
S, and the nodes, steps and cuts of lattices are likelihood ratios, which have no unit.
"""

from affidavit.accountants.random_allocation.accountant import AllocationAccountant, AllocationCurve
from affidavit.accountants.random_allocation.conditional_moments import (
    NarrowerCurve,
    RemovedRecordBound,
)
from affidavit.accountants.random_allocation.renyi import RenyiAllocationAccountant
from affidavit.accountants.random_allocation.score_attack import ScoreAttack, ScoreTest

__all__ = [
    "AllocationAccountant",
    "AllocationCurve",
    "NarrowerCurve",
    "RemovedRecordBound",
    "RenyiAllocationAccountant",
    "ScoreAttack",
    "ScoreTest",
]
