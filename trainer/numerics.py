"""Norms that are never too small: what a record adds to a sum stays within its clip norm.

A guarantee holds for the numbers that are *added*, after rounding, not for the gradient
that was meant. Every norm here is therefore an upper bound on the l2 norm of the
contribution as it is computed in float32, whatever the inputs (cancelling, huge, bf16):

* A sum of n products in float32, in any order, differs from the exact one by at most
  γ_n = n u / (1 - n u) times the sum of the absolute products, u = 2⁻²⁴ (Higham,
  *Accuracy and Stability of Numerical Algorithms*, 2nd ed., eq. 3.5).
* bfloat16 and float16 inputs are widened first, which is exact; float64 stays as it is. On an
  accelerator two bfloat16 operands are multiplied as they are into float32: each product of
  two significands of 8 bits is exact, so that only additions err. Matrix units truncate where
  a processor rounds, and cut what they align (Fasi et al., PeerJ Comput. Sci. 7 (2021) e330);
  ``MATRIX_UNIT`` times u an addition is taken for them, a model that ``bench/gpu`` checks on the
  device. Scaling in bfloat16 moves an entry by ``HALF_ULP`` of itself, which is added too.
* Squares below the least normal number are lost; ``LOST`` a term is added for them.
* A record with a gradient that is not finite, or longer than ``LARGEST``, gets weight zero
  and its factors are replaced by zeros (0 · nan is nan, so that a weight is not enough).
* Products are taken in true float32: ``require_true_float32`` refuses the settings under
  which PyTorch rounds the operands of a float32 product to TF32 or bfloat16.

What is left out: the rounding of the sum *over* records, which no single record owns; it
is at most γ_n of the lot's total.

>>> norms = norm_of_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 0.0]]))
>>> [round(weight, 4) for weight in clip_weights(norms, 1.0).tolist()]
[0.2, 1.0, 0.0]
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

MIN_CLIP_NORM = 1e-9
MAX_CLIP_NORM = 1e9
"""Clip norms for which no weighted factor of a finite record leaves the normal numbers."""

LARGEST = 2.0**50
"""Length of a row of inputs or of output gradients above which its record counts as lost."""

MIN_WEIGHT = 2.0**-100
"""Weights below would be rounded coarsely; they are zero."""

LOST = 2.0**-62
"""√(2⁻¹²⁶) rounded up a little: what one entry may have whose float32 square is lost."""


NARROW = (torch.bfloat16, torch.float16)
"""Types whose sums are taken in float32."""

MATRIX_UNIT = 4
"""How many times u an addition in a matrix unit may err, of the absolute values it adds."""

HALF_ULP = 2.0**-8
"""By how much of itself rounding to bfloat16 moves a number."""


def widened(values: Tensor) -> Tensor:
    """``values`` in float32, or in float64 where they are; exact for narrower types.

    The shape stays.
    """
    return values if values.dtype == torch.float64 else values.float()


@cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``value`` as a tensor of shape (), cached: creating one costs a launch on an accelerator."""
    return torch.tensor(value, dtype=dtype, device=device)


def rounding(terms: int, dtype: torch.dtype) -> float:
    """γ_n for sums of ``terms`` products in ``dtype``, a relative error bound.

    Raises ``ValueError`` where n u reaches 1/2 and nothing useful is known.
    """
    bound = terms * torch.finfo(dtype).eps / 2
    if bound >= 0.5:
        raise ValueError(f"sums of {terms} terms in {dtype} have no useful error bound")
    return bound / (1 - bound)


def norm_of_rows(values: Tensor) -> Tensor:
    """Upper bound on the l2 norm of each record; values (n, ...) to norms (n,).

    Two stages keep the bound small: a row of k by m entries is summed in k + m steps.
    """
    wide = widened(values)
    if wide.ndim == 1:
        return wide.abs()
    inner = wide if wide.ndim == 2 else wide.flatten(2)
    norms: Tensor = torch.linalg.vector_norm(inner, dim=-1)
    terms = entries = inner.shape[-1]
    if norms.ndim == 2:
        terms, entries = terms + norms.shape[1], terms * norms.shape[1]
        norms = torch.linalg.vector_norm(norms, dim=-1)
    return norms * (1 + rounding(terms + 8, wide.dtype)) + LOST * entries**0.5


def joint_norm(norms: list[Tensor]) -> Tensor:
    """Upper bound on the norm of several parts together, from bounds on each; (n,)."""
    stacked = torch.stack(norms)
    joint: Tensor = torch.linalg.vector_norm(stacked, dim=0)
    return joint * (1 + rounding(len(norms) + 8, stacked.dtype)) + LOST * len(norms) ** 0.5


def clip_weights(norms: Tensor, clip_norm: float) -> Tensor:
    """Weights w in [0, 1] with w · norm ≤ clip_norm, zero where a norm is not finite.

    The weight is lowered by a few ulp for its own division and for the product, and is never
    so small that its own rounding would matter.

    Shape (n,), as the norms.
    """
    margin = 1 - 4 * torch.finfo(norms.dtype).eps
    weights = (clip_norm * margin / norms).clamp_(max=1.0)
    # No comparison holds of nan, and what is infinite has a weight of zero.
    zero = constant(0.0, weights.dtype, weights.device)
    return torch.where(weights >= MIN_WEIGHT, weights, zero)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all entries are finite, in one pass over each tensor that writes none.

    The least and the largest entry are nan where any entry is.

    They may have any shapes.
    """
    ends = [end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]
    return bool(torch.isfinite(torch.stack(ends)).all()) if ends else True


def checksum(tensor: Tensor) -> Tensor:
    """The sum of the bits of the entries as integers, which wraps; shape ().

    It is the same in whatever order they are added up.

    >>> bool(checksum(torch.ones(3)) == checksum(torch.ones(3) * (1 + 2**-20)))
    False
    """
    whole = torch.int64 if tensor.dtype.itemsize > 4 else torch.int32
    return tensor.view(_INTEGERS[tensor.dtype.itemsize]).sum(dtype=whole).long()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_true_float32() -> None:
    """Raise ``RuntimeError`` if float32 products are set to a lower precision."""
    if torch.get_float32_matmul_precision() != "highest":
        raise RuntimeError(
            "torch.set_float32_matmul_precision is "
            f"{torch.get_float32_matmul_precision()!r}: norms would be computed from operands "
            "rounded to TF32 or bfloat16, and contributions could exceed the clip norm. Set it "
            "to 'highest' and use autocast for speed."
        )
