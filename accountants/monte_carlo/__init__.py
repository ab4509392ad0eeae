"""Monte-Carlo accounting of balls in bins with correlated noise.

Throughout, ε and losses are in nats. The means m_i and their products are in units of the noise's
standard deviation and its square.
"""

from affidavit.accountants.monte_carlo.accountant import MonteCarloAccountant, MonteCarloCurve

__all__ = ["MonteCarloAccountant", "MonteCarloCurve"]
