"""One local search for all constructions: scipy's L-BFGS-B with the gradient at hand.

The same input gives the same bits on one machine and one numerical library; another machine
may end in another place of the same quality, and nothing here is proved. What a search finds
is certified by its own sensitivity afterwards.

>>> import numpy as np
>>> result = least(lambda x: (float(x @ x), 2 * x), np.ones(2))
>>> bool(np.allclose(result.point, 0)), round(result.value, 12)
(True, 0.0)

References: Byrd, Lu, Nocedal and Zhu, SIAM J. Sci. Comput. 16 (1995) 1190.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Array = NDArray[np.float64]
LossAndGradient = Callable[[Array], tuple[float, Array]]


class Minimum(NamedTuple):
    """Where the search ended, and the loss there."""

    point: Array
    value: float


def least(
    loss: LossAndGradient,
    start: Array,
    *,
    bounds: Sequence[tuple[float, float | None]] | None = None,
    precision: float = 1e-14,
    iterations: int = 1000,
    finished: Callable[[Array, float], bool] | None = None,
) -> Minimum:
    """A local minimum; stops when the loss changes by less than ``precision``, relatively.

    ``finished`` is asked after every step, with the point and its loss.

    ``start`` and the point that is found have shape (n,), and ``bounds`` are n pairs of ends.
    """
    objective: Any = loss
    options: Any = {
        "maxiter": iterations,
        "maxfun": 2 * iterations,
        "maxcor": 20,
        "ftol": precision,
        "gtol": 1e-8,
    }

    def ended(intermediate_result: Any) -> None:
        if finished is not None and finished(intermediate_result.x, intermediate_result.fun):
            raise StopIteration

    method: Any = "L-BFGS-B"
    result = minimize(
        objective, start, jac=True, method=method, bounds=bounds, options=options, callback=ended
    )
    return Minimum(point=np.asarray(result.x, dtype=np.float64), value=float(result.fun))
