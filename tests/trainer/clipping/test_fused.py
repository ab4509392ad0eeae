"""The kernels of clipping compute what PyTorch's operations do; run by Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.support.triton_interpreter import interpreted

pytest.importorskip("triton")

COMPARED = """
import torch
from affidavit.trainer.clipping import device_operations as by_operations, fused
from affidavit.trainer.clipping.ghost_norm import LinearFactors, bounds_from_grams

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
    mean, rstd = torch.randn(n, steps), torch.rand(n, steps)
    normal = (x.double() - mean.double().unsqueeze(2)) * rstd.double().unsqueeze(2)
    exact = torch.stack([gy.double().sum(1), (gy.double() * normal).sum(1)], 1)
    for found in (fused.sums_of_normalized(x, mean, rstd, gy),
                  by_operations.sums_of_normalized(x, mean, rstd, gy)):
        close(found.double(), exact, rtol=1e-4, atol=1e-4)

for n, steps, sizes in ((1, 2, (3, 4)), (3, 17, (8, 5)), (2, 70, (3, 90))):
    a, b = (torch.randn(n, steps, size) for size in sizes)
    a[-1, 0, 0] = 2.0**60
    if n > 1:
        b[0, 1, 1] = torch.nan
    uses = [LinearFactors(a, b), LinearFactors(b, a)]
    exact = [(of.pair[1].double().mT @ of.pair[0].double()).flatten(1).norm(dim=1) for of in uses]
    lost, reach, bounds = bounds_from_grams(uses)
    grams = torch.stack([a @ a.mT, b @ b.mT, b @ b.mT, a @ a.mT]).unflatten(0, (2, 2))
    errors = torch.tensor([of.gram_errors(*of.part_lengths, torch.float32) for of in uses])
    found_reach, found = fused.bounds_of_grams(grams, errors)
    close(found, bounds, rtol=1e-5, atol=0)
    close(found_reach, reach, rtol=1e-5, atol=0)
    kept = ~lost
    assert kept.any() == (n > 2) and not kept[:, -1].any()
    assert bool((found[kept].double() >= torch.stack(exact)[kept]).all())
print("the same")
"""


def test_the_kernels_compute_what_the_operations_do() -> None:
    finished = interpreted(COMPARED)
    assert finished.stdout.strip() == "the same", finished.stderr
