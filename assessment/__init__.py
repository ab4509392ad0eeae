"""Assessment: what a plan costs, without cryptography.

Begin with ``certification`` (the result of a plan). ``calibration`` finds noise and steps,
``privacy_curves`` has the curves, ``diagnosis`` explains wrong claims, and the rest compares,
advises and summarises.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
