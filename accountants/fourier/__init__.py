"""Two-sided accounting by tilted Fourier transforms, with every error bounded."""

from affidavit.accountants.fourier.accountant import FourierAccountant, FourierCurve
from affidavit.accountants.fourier.calibration import (
    approximate_delta,
    approximate_epsilon,
    calibrate_noise_multiplier,
    calibrate_steps,
)
from affidavit.accountants.fourier.cost import Cost, estimate_cost

__all__ = [
    "Cost",
    "FourierAccountant",
    "FourierCurve",
    "approximate_delta",
    "approximate_epsilon",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "estimate_cost",
]
