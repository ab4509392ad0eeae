"""The noise multiplier that Opacus' calibration returns, mostly from our own brackets of ε.

``opacus.accountants.utils.get_noise_multiplier`` bisects noise multipliers until its accountant's ε
is at most the target and within 0.01 of it. The result only depends on how each ε compares with
these two numbers. ``PRVAccountant`` takes a second for each ε, so our brackets decide for it: it
reports ε at 0.999 δ, from a grid, plus 0.01. A wide bracket is computed first, then narrower ones
if that does not decide, and Opacus itself if no bracket decides and for its other accountants. ε
decreases in the noise.

References: opacus 1.6, ``accountants/utils.py`` and ``accountants/prv.py``; Gopi, Lee and
Wutschitz, arXiv:2106.02848.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from affidavit.accountants.bracketing_curves import adjusted
from affidavit.accountants.fourier.evaluation import approximate_epsilon
from affidavit.accountants.protocol import AccountantError
from affidavit.accountants.registry import accountant
from affidavit.plan import events

TOLERANCE = 0.01
"""Nats below the target at which the search ends."""
MAX_NOISE = 1e6
"""Noise multiplier at which the search gives up."""
PRV_ERROR = 0.01
"""Nats that ``PRVAccountant`` adds to the ε of its grid."""
PRV_DELTA_SHARE = 0.999
"""Share of δ at which it reads its grid."""
ORDERS = [*(1 + x / 10 for x in range(1, 100)), *range(12, 64)]
"""The orders of its ``RDPAccountant``."""
MAX_GRID_STEPS = 1.5
"""Distance of its ε from the true ε in steps of its grid. In 170 random runs it never differed by
more than this plus ``FLAT_ERROR``, and mostly by a tenth of it."""
FLAT_ERROR = 2e-5
"""Nats added to that at ε = 1, and more at smaller ε, where δ hardly decreases in ε."""
GUESS_BISECTIONS = 14
"""Bisections by an approximation of ε, before brackets decide."""
GUESS_MARGIN = 1.03
"""Distance of the first brackets from the approximate result, as a factor."""
RELATIVE_WIDTHS = (0.01, 1e-3, 1e-4, 1e-5)
"""Relative widths of the brackets, the fastest first."""


@cache
def opacus_noise_multiplier(
    *, epsilon: float, delta: float, sampling_probability: float, steps: int, mechanism: str
) -> float:
    """Return the noise multiplier for ε (nats) and δ; ``mechanism`` names Opacus' accountant.

    Raises ``ImportError`` if Opacus is needed and not installed, ``ValueError`` if the result is
    above the noise that Opacus tries, and the errors of its accountant.
    """
    if mechanism == "prv" and epsilon < PRV_ERROR:
        raise ValueError("the privacy budget is too low")
    search = _Search(epsilon, delta, sampling_probability, steps, mechanism)
    search.start_near_result()
    least, most = 0.0, 10.0
    while True:
        most *= 2
        side = search.side(most)
        if most > MAX_NOISE:
            raise ValueError("the privacy budget is too low")
        if side >= 0:
            break
    while side > 0:
        middle = (least + most) / 2
        if (at := search.side(middle)) < 0:
            least = middle
        else:
            most, side = middle, at
    return most


class _Search:
    """Decides whether a noise multiplier is too small (-1), right (0) or larger than needed (1)."""

    def __init__(
        self, epsilon: float, delta: float, probability: float, steps: int, mechanism: str
    ) -> None:
        self.epsilon, self.delta = epsilon, delta
        self.run, self.mechanism = (probability, steps), mechanism
        self.ours = accountant("fourier") if mechanism == "prv" and probability < 1 else None
        log_term = math.log(12 / ((1 - PRV_DELTA_SHARE) * delta))
        grid = PRV_ERROR / math.sqrt(max(1, steps) / 2 * log_term)
        self.distance = MAX_GRID_STEPS * grid + FLAT_ERROR / min(1.0, epsilon)
        self.too_little, self.too_much = 0.0, math.inf

    def start_near_result(self) -> None:
        """Find too little and too much noise near the result, which decide all values beyond."""
        if self.ours is None:
            return
        low, high = math.log(0.2), math.log(MAX_NOISE)
        for _ in range(GUESS_BISECTIONS):
            middle = (low + high) / 2
            over = approximate_epsilon(self._event(math.exp(middle)), self.delta)
            low, high = (middle, high) if over > self.epsilon - PRV_ERROR else (low, middle)
        self.side(math.exp(low) / GUESS_MARGIN)
        self.side(math.exp(high) * GUESS_MARGIN)

    def side(self, noise: float) -> int:
        """Return -1, 0 or 1 for ``noise``."""
        if self.too_little < noise < self.too_much:
            side = self._side(noise)
            if side < 0:
                self.too_little = noise
            elif side > 0:
                self.too_much = noise
            return side
        return -1 if noise <= self.too_little else 1

    def _side(self, noise: float) -> int:
        for low, high in self._brackets(noise):
            if (side := self._compare(low)) == self._compare(high):
                return side
        return self._compare(self._opacus_epsilon(noise))

    def _compare(self, epsilon: float) -> int:
        if not epsilon < self.epsilon:
            return -1
        return 1 if self.epsilon - epsilon > TOLERANCE else 0

    def _brackets(self, noise: float) -> Iterator[tuple[float, float]]:
        """Yield bounds of the ε (nats) of ``PRVAccountant``, from wide to narrow."""
        if self.ours is None:
            return
        try:
            curve = self.ours.curve(self._event(noise))
            for width in RELATIVE_WIDTHS:
                bracket = adjusted(curve, width).epsilon(PRV_DELTA_SHARE * self.delta)
                low, high = bracket.lower + PRV_ERROR, bracket.upper + PRV_ERROR
                yield low - self.distance, high + self.distance
        except AccountantError:
            return

    def _event(self, noise: float) -> events.Repeated:
        probability, steps = self.run
        step = events.PoissonSubsampledGaussian(
            sampling_probability=probability, noise_multiplier=noise
        )
        return events.Repeated(event=step, count=steps)

    def _opacus_epsilon(self, noise: float) -> Any:
        if self.mechanism == "rdp":
            rdp = _rdp_analysis().compute_rdp(
                q=self.run[0], noise_multiplier=noise, steps=self.run[1], orders=ORDERS
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = _rdp_analysis().get_privacy_spent(orders=ORDERS, rdp=rdp, delta=self.delta)
                return result[0]
        # Imported here because it loads torch and is seldom needed.
        peer = import_module("opacus.accountants").create_accountant(self.mechanism)
        peer.history = [(noise, *self.run)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about orders and precisions that it tries
            return peer.get_epsilon(delta=self.delta)


@cache
def _rdp_analysis() -> Any:
    """Return Opacus' analysis of Rényi divergences without its package, which loads torch."""
    package = find_spec("opacus")
    if package is None or package.origin is None:
        raise ImportError("opacus")
    file = Path(package.origin).parent / "accountants/analysis/rdp.py"
    spec = spec_from_file_location("opacus_rdp_analysis", file)
    if spec is None or spec.loader is None:
        raise ImportError("opacus")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
