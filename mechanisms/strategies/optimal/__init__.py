"""Optimal strategies: deterministic searches for what a plan leaves to be optimised.

* ``toeplitz``: the best λ, the best Toeplitz C and the best banded N.
* ``blt``: the best buffers, at a cost that does not grow with the steps.
* ``dense``: the best banded C, and the best C of all with a proof (``dual``) of how near it is to
  the optimum.

``loss`` has the minimised errors and sensitivities, and the minimiser. Whatever a search returns,
the certified sensitivity is that of the strategy itself: an early end costs accuracy of the run
and never privacy.
"""
