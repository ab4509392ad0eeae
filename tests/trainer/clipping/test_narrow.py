"""Operands in bfloat16, as an accelerator multiplies them: nothing passes the clip norm.

Run on a processor, with products that are exact and sums by a matrix unit at its worst.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from affidavit.trainer.clipping import ghost_norm as factors
from affidavit.trainer.clipping.ghost_norm import LinearFactors
from affidavit.trainer.norm_bounds import clip_weights

STEPS, WIDE, HIGH = 6, 10, 8


def truncating(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a b with exact products, added one at a time and cut, not rounded, to 24 bits."""
    left, right = a.double().numpy(), b.double().numpy()
    total = np.zeros((*left.shape[:-1], right.shape[-1]))
    for k in range(left.shape[-1]):
        total = cut(total + left[..., :, k, None] * right[..., k, None, :])
    result = torch.from_numpy(total).float()
    return result if out is None else out.copy_(result)


def cut(values: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.trunc(mantissa * 2**24), exponent - 24)


@pytest.fixture(autouse=True)
def _narrow_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "PROCESSORS", frozenset())
    monkeypatch.setattr(factors, "BFLOAT16_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(factors, "batched_matmul", truncating)
    monkeypatch.setattr(factors, "matmul", truncating)
    monkeypatch.setattr(
        factors, "add_batched_matmul_", lambda total, a, b: total.add_(truncating(a, b))
    )


def linear_factors(kind: str) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of forty records in bfloat16."""
    drawn = torch.Generator().manual_seed(5)
    a = torch.randn(40, STEPS, WIDE, generator=drawn)
    b = torch.randn(40, STEPS, HIGH, generator=drawn)
    match kind:
        case "cancelling":
            a[:, 1::2], b[:, 1::2] = -a[:, ::2], b[:, ::2]
        case "nearly cancelling":
            a[:, 1::2], b[:, 1::2] = -a[:, ::2] * (1 + 2.0**-6), b[:, ::2]
        case "huge":
            a, b = a * 2.0**45, b * 2.0**45
        case "tiny":
            a, b = a * 2.0**-60, b * 2.0**-60
        case "uneven":
            a = a * torch.logspace(-12, 12, 40, base=2).view(-1, 1, 1)
    return a.bfloat16(), b.bfloat16()


KINDS = ("plain", "cancelling", "nearly cancelling", "huge", "tiny", "uneven")


def contributions(way: Callable[[LinearFactors], Tensor], kind: str) -> Tensor:
    """The norm of what each record adds, taken in float64."""
    a, b = linear_factors(kind)
    item = [way(LinearFactors(a[i : i + 1], b[i : i + 1])) for i in range(len(a))]
    return torch.stack(item).double().flatten(1).norm(dim=1)


@pytest.mark.by_turns
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norms", ["gram_norms", "direct_norms"])
@pytest.mark.parametrize("clip_norm", [0.1, 1.0])
def test_no_contribution_passes_the_clip_norm(kind: str, norms: str, clip_norm: float) -> None:
    def way(found: LinearFactors) -> Tensor:
        bound = getattr(found, norms)() + found.slack()
        return found.weighted_sum(clip_weights(bound, clip_norm))

    assert bool((contributions(way, kind) <= clip_norm).all())


@pytest.fixture
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight products of two steps, which a matrix unit adds and cuts."""

    def weighted(a: Tensor, b: Tensor, weights: Tensor, lost: Tensor) -> Tensor:
        none = (lost | (weights[0] == 0)).view(-1, 1, 1)
        total = np.zeros((b.shape[2], a.shape[2]))
        for left, right in zip(b.split(2, 1), a.split(2, 1), strict=True):
            products = truncating(*(of.masked_fill(none, 0) for of in (left.mT, right)))
            for product, weight in zip(products.numpy(), weights[0].numpy(), strict=True):
                total = cut(total + cut(product.astype(float) * weight))
        return torch.from_numpy(total).float().unsqueeze(0)

    for name, value in (
        ("has_kernels", lambda _: True),
        ("gram_of_rows_", lambda out, values, _: truncating(values, values.mT, out)),
        ("LEAST_STEPS", 1),
        ("STEPS_AT_ONCE", 2),
        ("sums_of_products", weighted),
    ):
        monkeypatch.setattr(factors, name, value)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("kind", KINDS)
def test_weighted_products_do_not_pass_the_clip_norm(kind: str) -> None:
    result = contributions(lambda item: super(LinearFactors, item).clipped_sum(0.5), kind)
    assert bool((result <= 0.5).all())
    if kind == "plain":
        assert bool((result > 0.4999).all())


@pytest.mark.parametrize("kind", KINDS)
def test_reused_products_are_clipped_by_their_own_norm(kind: str) -> None:
    result = contributions(lambda item: item.reused_sum(0.5), kind)
    assert bool((result <= 0.5).all())
    if kind == "plain":
        assert bool((result > 0.499).all())


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_upper_bounds_of_the_exact_ones(kind: str) -> None:
    a, b = linear_factors(kind)
    exact = torch.bmm(b.double().mT, a.double()).flatten(1).norm(dim=1)
    result = LinearFactors(a, b)
    for norms in (result.gram_norms(), result.direct_norms()):
        lost = ~torch.isfinite(norms)  # such a record gets the weight 0
        assert bool(((norms.double() >= exact) | lost).all())
        assert kind == "huge" or not lost.any()


def test_without_the_correction_cancelling_records_pass_it() -> None:
    """The test above can fail: Gram matrices alone see nothing of what nearly cancels."""
    a, b = linear_factors("nearly cancelling")
    exact = torch.bmm(b.double().mT, a.double()).flatten(1).norm(dim=1)
    squares = (truncating(a, a.mT) * truncating(b, b.mT)).sum(-1).sum(-1).double()
    assert bool((squares.clamp(min=0).sqrt() < exact).any())


@pytest.mark.parametrize("has_shared_part", [False, True])
@pytest.mark.parametrize(
    ("steps", "wide", "high"),
    [(64, 24, 32), (512, 48, 64), pytest.param(1024, 64, 64, marks=pytest.mark.soak)],
)
def test_clipped_records_add_at_least_what_the_specification_says(
    steps: int, wide: int, high: int, has_shared_part: bool
) -> None:
    drawn = torch.Generator().manual_seed(6)
    a, b = (torch.randn(1, steps, size, generator=drawn) for size in (wide, high))
    if has_shared_part:
        a += 0.7 * torch.randn(1, 1, wide, generator=drawn)
        b += 0.3 * torch.randn(1, 1, high, generator=drawn)
    found = LinearFactors(a.bfloat16(), b.bfloat16())
    for norms in (found.gram_norms(), found.direct_norms()):
        added = found.weighted_sum(clip_weights(norms + found.slack(), 0.1))
        assert 0.0995 <= float(added.double().norm()) <= 0.1


def test_a_processor_widens() -> None:
    """Where bfloat16 is not narrow nothing is scaled in eight bits."""
    assert not LinearFactors(*(item.float() for item in linear_factors("plain"))).is_bfloat16
