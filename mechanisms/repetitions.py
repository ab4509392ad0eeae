"""How often a run is repeated: the number K of a selection, from uniform bits.

The accountants bound a selection by the law of K: Poisson of mean m, or the negative binomial of
shape η and parameter γ, truncated to K ≥ 1 (η = 1 is geometric, η = 0 logarithmic), where γ gives
the mean m. K is here the inverse of its distribution function, in 60 digits, at a uniform number
of 512 bits, so that its law is the certified one up to 10⁻⁵⁰. γ is rounded up, by which K becomes
smaller and the bound stays one.

>>> selection = Selection(kind="repeat_and_select", name="search", distribution="geometric", mean=4)
>>> [draw_repetitions(selection, part << 509) for part in range(8)]
[1, 1, 2, 2, 3, 4, 5, 8]

Reference: Papernot and Steinke, arXiv:2110.03620, Definition 1 and Theorem 6.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache

from affidavit.plan import Selection

DIGITS = 60
LEAST = Decimal("1e-50")
"""Where a distribution that is past its mean is cut off."""
BITS = 512
SHAPES = {"geometric": 1.0, "logarithmic": 0.0}


def draw_repetitions(selection: Selection, uniform: int) -> int:
    """K at ``uniform`` / 2^512; a Poisson number may be 0.

    Raises ``ValueError`` for a number beyond 512 bits, or a selection without its shape.
    """
    if not 0 <= uniform < 1 << BITS:
        raise ValueError(f"give a number of {BITS} bits.")
    shape = SHAPES.get(selection.distribution, selection.shape)
    with localcontext(prec=DIGITS, Emin=-(10**17), Emax=10**17):
        place, mean = Decimal(uniform) / (1 << BITS), Decimal(selection.mean)
        if selection.distribution == "poisson":
            return _poisson(mean, place)
        if shape is None:
            raise ValueError("a truncated negative binomial needs a shape.")
        return 1 if mean == 1 else _negative_binomial(mean, Decimal(shape), place)


def _poisson(mean: Decimal, place: Decimal) -> int:
    count, mass = 0, (-mean).exp()
    below = mass
    while below <= place and (count < mean or mass > LEAST):
        count += 1
        mass *= mean / count
        below += mass
    return count


def _negative_binomial(mean: Decimal, shape: Decimal, place: Decimal) -> int:
    gamma = _gamma(mean, shape)
    count, rest = 1, 1 - gamma
    mass = rest / -gamma.ln() if shape == 0 else rest * shape / (gamma**-shape - 1)
    below = mass
    while below <= place and (count < mean or mass > LEAST):
        mass *= rest * (count + shape) / (count + 1)
        count += 1
        below += mass
    return count


@cache
def _gamma(mean: Decimal, shape: Decimal) -> Decimal:
    """γ of that mean or, by the last digits, of a smaller one."""
    if shape == 1:
        return 1 / mean
    low, high = Decimal(0), Decimal(1)
    for _ in range(4 * DIGITS):
        middle = (low + high) / 2
        if _mean(middle, shape) > mean:
            low = middle
        else:
            high = middle
    return high


def _mean(gamma: Decimal, shape: Decimal) -> Decimal:
    odds = (1 - gamma) / gamma
    return odds / -gamma.ln() if shape == 0 else odds * shape / (1 - gamma**shape)
