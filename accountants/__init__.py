"""Accountants: privacy curves of events, with lower and upper bounds.

Begin with ``protocol`` (what an accountant and a curve are), ``bracket`` (both ends of a number)
and ``registry`` (all accountants). ``fourier_accountant`` answers most runs, by the transforms of
``fourier``; there is one file for each other method. ``bracketing_curves`` and ``chains`` join
bounds, ``calibration`` searches noise and steps, and ``witness_search`` finds what the checker
verifies.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
