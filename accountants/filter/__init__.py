"""The privacy filter: what further run a budget admits, however it was chosen.

Throughout, ε and Rényi divergences are in nats, and μ is sensitivity over noise.
"""

from affidavit.accountants.filter.cost import Cost
from affidavit.accountants.filter.divergences import ORDERS, divergences
from affidavit.accountants.filter.rule import Budget

__all__ = ["ORDERS", "Budget", "Cost", "divergences"]
