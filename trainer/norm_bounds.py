"""Upper bounds on norms: no record adds more to a sum than its clip norm.

A guarantee holds for the numbers that are *added*, after rounding, not for the intended gradient.
Every norm here is therefore an upper bound on the l2 norm of the contribution as computed in
float32, whatever the inputs are (cancelling, huge, bfloat16):

* A sum of n products in float32, in any order, differs from the exact sum by at most
  γ_n = n u / (1 - n u) times the sum of the absolute products, u = 2⁻²⁴ (Higham,
  *Accuracy and Stability of Numerical Algorithms*, 2nd ed., eq. 3.5).
* bfloat16 and float16 inputs are converted to float32 first, which is exact. float64 inputs stay
  float64. An accelerator multiplies two bfloat16 operands directly into float32: each product of
  two significands of 8 bits is exact, so only additions err. Matrix units truncate where a
  processor rounds, and truncate aligned terms (Fasi et al., PeerJ Comput. Sci. 7 (2021) e330).
  Their error is taken as ``MATRIX_UNIT_ERROR`` times u for each addition, a model that
  ``bench/gpu`` checks on the device. Factors that are scaled in
  bfloat16 are the sum of two, which leaves a relative error of ``BFLOAT16_ERROR`` squared.
* Squares below the smallest normal number are lost, so ``UNDERFLOW`` is added for each term.
* A record whose gradient is not finite, or longer than ``MAX_ROW_NORM``, gets weight zero and its
  factors are replaced by zeros: 0 · nan is nan, so the weight alone does not suffice.
* Products are taken in true float32: ``require_true_float32`` rejects the settings under
  which PyTorch rounds the operands of a float32 product to TF32 or bfloat16.

Not covered: the rounding of the sum *over* records, which belongs to no single record. It is at
most γ_n of the lot's total.

>>> norms = norm_of_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 0.0]]))
>>> [round(weight, 4) for weight in clip_weights(norms, 1.0).tolist()]
[0.2, 1.0, 0.0]
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MIN_CLIP_NORM = 1e-9
MAX_CLIP_NORM = 1e9
"""Range of clip norms for which no weighted factor of a finite record leaves the normal numbers."""

MAX_ROW_NORM = 2.0**50
"""Norm of a row of inputs or output gradients above which the record is discarded."""

MIN_WEIGHT = 2.0**-100
"""Smaller weights would be rounded coarsely. They become zero."""

UNDERFLOW = 2.0**-62
"""√(2⁻¹²⁶), rounded up: bound on an entry whose float32 square underflows."""
HALF_TYPES = (torch.bfloat16, torch.float16)
"""Types whose sums are taken in float32."""

MATRIX_UNIT_ERROR = 4
"""Error of an addition in a matrix unit, in u times the absolute values of the terms."""

BFLOAT16_ERROR = 2.0**-8
"""Relative error of rounding to bfloat16."""


def upcast(values: Tensor) -> Tensor:
    """Convert ``values`` to float32, exactly; float64 stays. The shape stays."""
    return values if values.dtype == torch.float64 else values.float()


def rounding_bound(terms: int, dtype: torch.dtype) -> float:
    """Return γ_n, a relative error bound for sums of ``terms`` products in ``dtype``.

    Raises ``ValueError`` if n u reaches 1/2, where no useful bound is known.
    """
    bound = terms * torch.finfo(dtype).eps / 2
    if bound >= 0.5:
        raise ValueError(f"sums of {terms} terms in {dtype} have no useful error bound")
    return bound / (1 - bound)


def norm_of_rows(values: Tensor) -> Tensor:
    """Return an upper bound on the l2 norm of each record; values (n, ...) to norms (n,).

    Two stages keep the bound small: a row of k by m entries is summed in k + m steps.
    """
    wide = upcast(values)
    if wide.ndim == 1:
        return wide.abs()
    inner = wide if wide.ndim == 2 else wide.flatten(2)
    norms: Tensor = torch.linalg.vector_norm(inner, dim=-1)
    terms = entries = inner.shape[-1]
    if norms.ndim == 2:
        terms, entries = terms + norms.shape[1], terms * norms.shape[1]
        norms = torch.linalg.vector_norm(norms, dim=-1)
    return norms * (1 + rounding_bound(terms + 8, wide.dtype)) + UNDERFLOW * entries**0.5


def joint_norm(norms: list[Tensor]) -> Tensor:
    """Return an upper bound on the joint norm of several parts from a bound on each; (n,)."""
    stacked = torch.stack(norms)
    joint: Tensor = torch.linalg.vector_norm(stacked, dim=0)
    return (
        joint * (1 + rounding_bound(len(norms) + 8, stacked.dtype)) + UNDERFLOW * len(norms) ** 0.5
    )


def clip_weights(norms: Tensor, clip_norm: float | Tensor) -> Tensor:
    """Return weights w in [0, 1] with w · norm ≤ clip_norm, zero for norms that are not finite.

    The weight is lowered by a few ulp to cover the rounding of its division and of the product,
    and is never so small that its own rounding matters. The shape is that of ``norms``; clip norms
    that are a tensor have one of (n, 1).
    """
    margin = 1 - 4 * torch.finfo(norms.dtype).eps
    weights = (clip_norm * margin / norms).clamp_(max=1.0)
    # Comparisons with nan are false, and an infinite norm gives a weight of zero.
    return weights.masked_fill_(~(weights >= MIN_WEIGHT), 0.0)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all entries are finite, in one read-only pass over each tensor.

    Norms are finite only if all entries are. Where the squares of finite entries overflow, a second
    pass takes the minimum and maximum, which are nan if any entry is. Tensors may have any shape.
    """
    every = [tensor for tensor in tensors if tensor.numel()]
    if not every or bool(torch.isfinite(torch.stack(torch._foreach_norm(every))).all()):
        return True
    ends = [end for tensor in every for end in torch.aminmax(tensor)]
    return bool(torch.isfinite(torch.stack(ends)).all())


def checksum(tensor: Tensor) -> Tensor:
    """Return the wrapping sum of the bits of the entries as integers; shape ().

    The result does not depend on the order of summation.
    >>> bool(checksum(torch.ones(3)) == checksum(torch.ones(3) * (1 + 2**-20)))
    False
    """
    accumulator = torch.int64 if tensor.dtype.itemsize > 4 else torch.int32
    return tensor.view(_INTEGERS[tensor.dtype.itemsize]).sum(dtype=accumulator).long()


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
