"""The kernels of clipping compute what PyTorch's operations do.

``make try-peers`` runs this by Triton's interpreter, in an environment that has Triton.
"""

from __future__ import annotations

from tests.support.triton_interpreter import interpreted

COMPARED = """
from contextlib import contextmanager
from unittest.mock import patch
import torch
from affidavit.trainer.clipping import device_operations as by_operations, fused
from affidavit.trainer.clipping.ghost_norm import (
    LinearFactors, bounds_from_grams, bounds_from_products)


@contextmanager
def kernels():
    names = ("squares_of_parts", "sum_clipped_by_squares", "squares_of_products",
             "squares_of_look_ups", "bounds_of_grams")
    with patch.multiple(torch.ops.affidavit, **{name: getattr(fused, name) for name in names}):
        yield

torch.manual_seed(3)
close = torch.testing.assert_close
for n, steps, width in ((1, 1, 1), (3, 5, 7), (2, 33, 130), (4, 16, 1025)):
    lost = torch.arange(n) == 1
    weights = torch.rand(n)
    weights[0] = 0
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(n, steps, width).to(dtype)
        x[lost] = torch.nan
        for values in (x.clone(), x.mT.contiguous().mT):
            fused.zero_records_(values, lost)
            assert torch.equal(values, x.masked_fill(lost.view(-1, 1, 1), 0))
    exact = x.masked_fill((lost | (weights == 0)).view(-1, 1, 1), 0).double()
    exact = exact * weights.double().view(-1, 1, 1)
    # The interpreter cuts bfloat16 where a device rounds it, which doubles each of two errors.
    for scaled, error in ((fused.scale_in_halves(x, weights, lost), 2.0**-14),
                          (by_operations.scale_in_halves(x, weights, lost), 2.0**-16)):
        high, low = scaled.double().view(n, steps, 2, width).unbind(2)
        assert bool(((high - low - exact).abs() <= error * exact.abs()).all())

    x, gy = torch.randn(2, n, steps, width)
    mean, rstd, weight = torch.randn(n, steps), torch.rand(n, steps), torch.randn(width)
    values = [of.double() for of in (x, mean, rstd, gy, weight)]
    exact = by_operations.layer_norm_backward(*values)
    normal = (values[0] - values[1].unsqueeze(2)) * values[2].unsqueeze(2)
    close(exact[1], torch.stack([values[3].sum(1), (values[3] * normal).sum(1)], 1))
    for found in (fused.layer_norm_backward(x, mean, rstd, gy, weight),
                  by_operations.layer_norm_backward(x, mean, rstd, gy, weight)):
        for one, other in zip(found, exact):
            close(one.double(), other, rtol=1e-4, atol=1e-4)

    for dtype in (torch.float32, torch.bfloat16):
        rows = (torch.randn(n, steps * width) * torch.rand(n, 1)).to(dtype)
        rows[lost, -1] = torch.nan
        kept = rows[~lost].double()
        exact = kept * (0.7 / kept.norm(dim=1)).clamp(max=1)[:, None]
        one = rows[:1].clone()
        expected = by_operations.clipped_sum_of_rows(rows, 0.7)
        close(expected.double(), exact.sum(0), rtol=2e-4, atol=1e-6)
        with kernels():
            found, alone = (by_operations.clipped_sum_of_rows(of, 0.7) for of in (rows, one))
        close(found, expected, rtol=1e-5, atol=1e-7)
        assert 0.69 < float(alone.double().norm()) <= 0.7 or one.double().norm() <= 0.7

    ids = torch.randint(3, (n, steps))
    expected = by_operations.norms_of_look_ups(ids, x)
    with kernels():
        found = by_operations.norms_of_look_ups(ids, x)
    close(found, expected, rtol=1e-5, atol=0)
    table = torch.zeros(n, 3, width, dtype=torch.float64)
    table.scatter_add_(1, ids.unsqueeze(2).expand(-1, -1, width), x.double())
    exact = table.flatten(1).norm(dim=1)
    assert bool(((found >= exact * (1 - 1e-6)) & (found <= exact * (1 + 1e-3))).all())

for n, steps, sizes in ((1, 2, (3, 4)), (3, 17, (8, 5)), (2, 70, (3, 90))):
    a, b = (torch.randn(n, steps, size) for size in sizes)
    a[-1, 0, 0] = 2.0**60
    if n > 1:
        b[0, 1, 1] = torch.nan
    uses = [LinearFactors(a, b), LinearFactors(b, a)]
    exact = [(of.pair[1].double().mT @ of.pair[0].double()).flatten(1).norm(dim=1) for of in uses]
    for way in (bounds_from_grams, bounds_from_products):
        lost, reach, bounds = way(uses)
        with kernels():
            found_lost, found_reach, found = way(uses)
        close(found, bounds, rtol=1e-5, atol=0)
        close(found_reach, reach, rtol=1e-5, atol=0)
        assert torch.equal(lost, found_lost)
        kept = ~lost
        assert kept.any() == (n > 2) and not kept[:, -1].any()
        assert bool((found[kept].double() >= torch.stack(exact)[kept]).all())
        assert bool((found[kept].double() <= 1.001 * torch.stack(exact)[kept]).all())

for n, steps, in_size, out_size, parts in (
        (1, 1, 3, 4, 1), (5, 16, 40, 33, 2), (6, 100, 8, 150, 3), (2, 65, 129, 5, 2)):
    lost = torch.arange(n) == 1
    weights = torch.rand(n)
    weights[2:3] = 0
    none = (lost | (weights == 0)).view(-1, 1, 1)
    a, b = torch.randn(n, steps, in_size), torch.randn(n, out_size, steps).mT
    a[lost], b[2:3] = torch.nan, torch.inf
    left, right = (of.masked_fill(none, 0).double() for of in (b, a))
    exact = (left.mT @ right * weights.double().view(-1, 1, 1)).split(-(-n // parts))
    exact = torch.stack([of.sum(0) for of in exact])
    for of in (fused, torch.ops.affidavit):
        close(of.sums_of_products(a, b, weights, lost, parts).double(), exact, rtol=0, atol=1e-4)

for n, steps, width in ((2, 3, 5), (1, 130, 70)):
    a = torch.randn(n, width, steps).mT
    for of in (fused, torch.ops.affidavit):
        out = torch.empty(n, steps, steps)
        of.gram_of_rows_(out, a, 64)
        close(out.double(), a.double() @ a.double().mT, rtol=1e-5, atol=1e-4)
print("the same")
"""


def test_the_kernels_compute_what_the_operations_do() -> None:
    finished = interpreted(COMPARED)
    assert finished.stdout.strip() == "the same", finished.stderr
