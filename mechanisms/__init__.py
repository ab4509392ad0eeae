"""What each mechanism releases: from a plan to events, or a refusal with its reason.

Begin with ``lowering``: ``lower`` turns a plan into a ``Lowered``, whose ``event`` bounds the run
and whose ``attained`` is an effect of one record. ``sampling_schemes`` has the samplers,
``correlation`` noise that is correlated across steps, ``strategies`` its matrices and their
sensitivities, ``joint_gaussian`` releases that share a lot. ``catalogue`` lists the optimisers,
``obligations`` what their training must do, and ``attacks`` what attains a lower end.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
