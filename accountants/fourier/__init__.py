"""Two-sided accounting by tilted Fourier transforms, with every error bounded."""

from affidavit.accountants.fourier.accountant import FourierAccountant, FourierCurve

__all__ = ["FourierAccountant", "FourierCurve"]
