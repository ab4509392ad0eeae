"""Assessment: what a plan costs, without cryptography.

Begin with ``certification``: ``certify`` joins mechanisms and accountants, and returns an
``assessment``. ``calibration`` finds noise, steps and lots, ``privacy_curves`` has the curves and
``charts`` draws them. ``diagnosis`` has the known mistakes that explain a wrong claim,
``diagnose`` answers one, ``plan_comparison`` and ``mechanism_advice`` compare, ``lower_end``
explains an attack, ``least_gaussian`` bounds a guarantee by one μ, and ``run_cost`` and
``step_requirements`` say what a run spends and has to do.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
