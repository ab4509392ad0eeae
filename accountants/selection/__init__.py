"""Two-sided accounting of the best of a random number of runs, from the curves of one run.

Throughout, ε and losses are in nats; P and Q are the laws of what one run releases.
"""

from affidavit.accountants.selection.accountant import SelectionAccountant, SelectionCurve
from affidavit.accountants.selection.attacks import SelectionAttacks

__all__ = ["SelectionAccountant", "SelectionAttacks", "SelectionCurve"]
