"""The noise multiplier that Opacus' calibration returns, mostly by our own brackets of ε.

``opacus.accountants.utils.get_noise_multiplier`` halves an interval of noise multipliers until its
accountant's ε is at most the target and within 0.01 of it. What it returns depends on how each ε
compares with these two numbers alone. For ``PRVAccountant``, which takes a second for each, our
bracket decides: what that accountant reports is ε at 0.999 δ, from a grid, plus 0.01. A wide
bracket is asked first, a narrow one where it decides nothing, and Opacus where no bracket does, or
for its other accountants. More noise has a smaller ε.

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

from affidavit.accountants.fourier import approximate_epsilon
from affidavit.accountants.protocol import AccountantError, Adjustable
from affidavit.accountants.registry import accountant
from affidavit.plan import PoissonSubsampledGaussian, Repeated

TOLERANCE = 0.01
"""Nats below the target where the search ends."""
MAX_NOISE = 1e6
"""Noise multiplier at which the search gives up."""
ERROR = 0.01
"""Nats that ``PRVAccountant`` adds to what its grid shows."""
SHARE_OF_DELTA = 0.999
"""Where it reads its grid: at this share of δ."""
ORDERS = [*(1 + x / 10 for x in range(1, 100)), *range(12, 64)]
"""The orders of its ``RDPAccountant``."""
GRID_STEPS = 1.5
"""Steps of its grid by which what it reads may differ from the true ε. Of 170 random runs none
differs by more than this and ``FLAT`` together, and most by a tenth of it."""
FLAT = 2e-5
"""What is added to that, in nats, at ε = 1; more at smaller ε, where δ hardly falls with ε."""
NARROWING = 14
"""Halvings by an approximation of ε, before brackets decide."""
NEAR = 1.03
"""What the first brackets are away from its result, as a factor."""
WIDTHS = (0.01, 1e-3, 1e-4, 1e-5)
"""Widths of the brackets that are asked, as shares of ε, the cheapest first."""


@cache
def opacus_noise_multiplier(
    *, epsilon: float, delta: float, sampling_probability: float, steps: int, mechanism: str
) -> float:
    """The noise multiplier for ε (nats) and δ; ``mechanism`` names Opacus' accountant.

    Raises ``ImportError`` where Opacus is not installed, ``ValueError`` where more noise than it
    tries is needed, and what its accountant raises.
    """
    if mechanism == "prv" and epsilon < ERROR:
        raise ValueError("the privacy budget is too low")
    search = _Search(epsilon, delta, sampling_probability, steps, mechanism)
    search.narrow()
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
    """Which noise is too little (-1), right (0), or more than needed (1)."""

    def __init__(
        self, epsilon: float, delta: float, probability: float, steps: int, mechanism: str
    ) -> None:
        self.epsilon, self.delta = epsilon, delta
        self.run, self.mechanism = (probability, steps), mechanism
        self.ours = accountant("fourier") if mechanism == "prv" and probability < 1 else None
        grid = ERROR / math.sqrt(max(1, steps) / 2 * math.log(12 / ((1 - SHARE_OF_DELTA) * delta)))
        self.distance = GRID_STEPS * grid + FLAT / min(1.0, epsilon)
        self.too_little, self.too_much = 0.0, math.inf

    def narrow(self) -> None:
        """Find too little and too much noise near the result, which decide all that lie beyond."""
        if self.ours is None:
            return
        low, high = math.log(0.2), math.log(MAX_NOISE)
        for _ in range(NARROWING):
            middle = (low + high) / 2
            over = approximate_epsilon(self._event(math.exp(middle)), self.delta)
            low, high = (middle, high) if over > self.epsilon - ERROR else (low, middle)
        self.side(math.exp(low) / NEAR)
        self.side(math.exp(high) * NEAR)

    def side(self, noise: float) -> int:
        """Where ``noise`` lies."""
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
        return self._compare(self._theirs(noise))

    def _compare(self, epsilon: float) -> int:
        if not epsilon < self.epsilon:
            return -1
        return 1 if self.epsilon - epsilon > TOLERANCE else 0

    def _brackets(self, noise: float) -> Iterator[tuple[float, float]]:
        """What ``PRVAccountant`` reports lies between these two, from wide to narrow."""
        if self.ours is None:
            return
        try:
            curve = self.ours.curve(self._event(noise))
            for width in WIDTHS:
                adjusted = curve.with_width(width) if isinstance(curve, Adjustable) else curve
                bracket = adjusted.epsilon(SHARE_OF_DELTA * self.delta)
                yield (bracket.lower + ERROR - self.distance, bracket.upper + ERROR + self.distance)
        except AccountantError:
            return

    def _event(self, noise: float) -> Repeated:
        probability, steps = self.run
        step = PoissonSubsampledGaussian(sampling_probability=probability, noise_multiplier=noise)
        return Repeated(event=step, count=steps)

    def _theirs(self, noise: float) -> Any:
        if self.mechanism == "rdp":
            rdp = _analysis().compute_rdp(
                q=self.run[0], noise_multiplier=noise, steps=self.run[1], orders=ORDERS
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _analysis().get_privacy_spent(orders=ORDERS, rdp=rdp, delta=self.delta)[0]
        # Imported here because it loads torch, and seldom has to compute.
        theirs = import_module("opacus.accountants").create_accountant(self.mechanism)
        theirs.history = [(noise, *self.run)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of orders and precisions that it tries on its way
            return theirs.get_epsilon(delta=self.delta)


@cache
def _analysis() -> Any:
    """Opacus' analysis of Rényi divergences, without the package around it, which loads torch."""
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
