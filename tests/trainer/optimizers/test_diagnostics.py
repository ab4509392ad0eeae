"""Diagnostics of released values: the noise share, and the Muon probe."""

from __future__ import annotations

import math

import pytest
import torch

from affidavit.trainer.optimizers.diagnostics import Alignment, cosine, muon_probe, noise_share


def test_noise_share_is_phi_over_the_median() -> None:
    assert noise_share(torch.tensor([9.0, 1.0, 4.0]), phi=2.0) == 0.5
    assert noise_share(torch.zeros(3), phi=2.0) == math.inf
    for second, phi in ((torch.zeros(0), 1.0), (torch.ones(2), 0.0)):
        with pytest.raises(ValueError, match="Φ"):
            noise_share(second, phi=phi)


def test_noise_alone_has_a_share_of_about_one() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 0.3 * torch.randn(400, 50, generator=generator)
    assert noise_share(noise.square().mean(1), phi=0.09) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (3, 2, 2)])
def test_an_orthogonal_momentum_is_its_own_sign(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64).flatten(1)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    orthogonal = (left @ right).view(shape)
    result = muon_probe(3 * orthogonal, orthogonal)
    assert result.before == pytest.approx(1)
    assert result.gain == pytest.approx(0, abs=1e-12)


def test_the_probe_sees_what_orthogonalisation_does() -> None:
    """M = diag(3, 1) against a release of equal directions: cosines 4/√20 and 1."""
    result = muon_probe(torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2))
    assert result.before == pytest.approx(4 / math.sqrt(20))
    assert result.after == pytest.approx(1)
    assert Alignment(0.25, 0.5).gain == 0.25


def test_the_next_release_stands_in_for_the_clipped_mean() -> None:
    """Its noise is independent of M_t: inner products are those with the mean, on average."""
    generator = torch.Generator().manual_seed(2)
    momentum = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    mean = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    noise = torch.randn(4000, 8, 8, generator=generator, dtype=torch.float64)
    inner = ((mean + noise) * momentum).sum((1, 2))
    error = 5 * float(momentum.norm()) / math.sqrt(4000)
    assert float(inner.mean()) == pytest.approx(float((mean * momentum).sum()), abs=error)
    assert cosine(torch.zeros(3), torch.ones(3)) == 0
