"""The privacy filter: what further run a budget admits, however it was chosen."""

from affidavit.accountants.filter.cost import Cost
from affidavit.accountants.filter.divergences import ORDERS, divergences
from affidavit.accountants.filter.rule import Budget

__all__ = ["ORDERS", "Budget", "Cost", "divergences"]
