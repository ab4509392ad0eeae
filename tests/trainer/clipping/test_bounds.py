"""What one record adds, as computed, never passes the clip norm, whatever it holds.

A lot of one record is run and the norm of what came out is taken in float64, so that the
rounding of the norm, of the weight and of the sum are all inside what is judged.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from affidavit.trainer import norm_bounds
from affidavit.trainer.clipping.ghost_norm import (
    DenseFactors,
    EmbeddingFactors,
    Factors,
    LinearFactors,
)
from affidavit.trainer.clipping.hooks import norm_of_uses
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.norm_bounds import (
    all_finite,
    clip_weights,
    norm_of_rows,
    require_true_float32,
)

DRAWS = 6


def cancelling(rows: Tensor) -> Tensor:
    """Every second step the opposite of the one before, up to a little."""
    result = rows.clone()
    result[:, 1::2] = -rows[:, ::2][:, : result[:, 1::2].shape[1]] * (1 + 1e-4)
    return result


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda rows: rows,
    "tiny": lambda rows: rows * 1e-20,
    "subnormal": lambda rows: rows * 1e-39,
    "huge": lambda rows: rows * 1e14,
    "overflowing": lambda rows: rows * 1e25,
    "mixed scales": lambda rows: rows * torch.logspace(-15, 14, rows.shape[-1]),
    "one large step": lambda rows: torch.cat([rows[:, :1] * 1e6, rows[:, 1:]], 1),
    "equal": lambda rows: rows[:, :1].expand_as(rows).contiguous(),
    "nan": lambda rows: rows.index_fill(-1, torch.tensor([0]), torch.nan),
    "inf": lambda rows: rows.index_fill(-1, torch.tensor([0]), torch.inf),
}


def length(values: Tensor) -> float:
    """The l2 norm in float64."""
    return float(values.detach().double().norm())


def pairs(dtype: torch.dtype, steps: int, wide: int, high: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs that do not change beside outputs that cancel, for every pair of shapes."""
    torch.manual_seed(steps)
    result = []
    for of_inputs in SHAPES.values():
        for of_outputs in SHAPES.values():
            a, b = of_inputs(torch.randn(1, steps, wide)), of_outputs(torch.randn(1, steps, high))
            still = a[:, :1].expand_as(a).contiguous()
            result += [(a, b), (still, cancelling(b)), (cancelling(a), b)]
    return [(a.to(dtype), b.to(dtype)) for a, b in result]


@pytest.mark.by_turns
@pytest.mark.ordinary(
    "64-*-1e-09-*-dtype0", "6-*-100000.0-*-dtype1", "1-*-1e-09-*-dtype1", "1-*-100000.0-*-dtype0"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["gram", "direct", "reuse"])
@pytest.mark.parametrize("clip_norm", [1e-9, 1e5])
@pytest.mark.parametrize(("steps", "wide", "high"), [(64, 16, 8), (6, 40, 33), (1, 5, 4)])
def test_a_matrix_adds_no_more_than_its_clip_norm(
    dtype: torch.dtype, kernel: str, clip_norm: float, steps: int, wide: int, high: int
) -> None:
    for a, b in pairs(dtype, steps, wide, high):
        of = LinearFactors(a, b)
        if kernel == "reuse":
            added = of.reused_sum(clip_norm)
        else:
            norms = of.gram_norms() if kernel == "gram" else of.direct_norms()
            added = of.weighted_sum(clip_weights(norms + of.slack(), clip_norm))
        assert length(added) <= clip_norm


@pytest.mark.by_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip_norm", [1e-9, 1e5])
def test_tables_and_small_tensors_add_no_more_than_their_clip_norm(
    dtype: torch.dtype, clip_norm: float
) -> None:
    for _, b in pairs(dtype, 24, 2, 7):
        ids = torch.randint(0, 3, (1, 24))
        for of in (EmbeddingFactors.build(ids, b, 3), DenseFactors(b)):
            assert length(of.clipped_sum(clip_norm)) <= clip_norm


@pytest.mark.by_turns
@pytest.mark.ordinary("1e-09-*")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip_norm", [1e-9, 1e5])
def test_uses_that_cancel_add_no_more_than_their_clip_norm(
    dtype: torch.dtype, clip_norm: float
) -> None:
    for a, b in pairs(dtype, 20, 6, 7)[::6]:
        ids = torch.randint(0, 7, (1, 20))
        for again in (-b, -b * (1 + 1e-3), b):
            matrices: list[Factors] = [LinearFactors(a, b), LinearFactors(a, again)]
            tables: list[Factors] = [EmbeddingFactors.build(ids, x, 7) for x in (b, again)]
            # ∂ℓ/∂table of a look-up and of a head that reads out the same rows
            one_hot = nn.functional.one_hot(ids, 7).to(dtype)
            both: list[Factors] = [tables[0], LinearFactors(again, one_hot)]
            for uses in (matrices, tables, both):
                weights = clip_weights(norm_of_uses(uses), clip_norm)
                parts = [use.weighted_sum(weights) for use in uses]
                assert length(parts[0] + parts[1]) <= clip_norm


class Tied(nn.Module):
    """A table that is looked up, projected and read out, with coefficients for a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(13, 8), nn.LayerNorm(8)
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 13, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        """Losses (n,) that are linear in the logits: ``scale`` (n, T, 13) is ∂ℓ/∂logits."""
        h = self.words(ids)
        h = h + self.linear(self.norm(h))
        return (self.head(h).float() * scale).flatten(1).sum(1)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, "cancelling"])
def test_a_model_adds_no_more_than_its_clip_norms(shape: str, autocast: bool) -> None:
    for draw in range(DRAWS):
        torch.manual_seed(draw)
        model = Tied()
        specs = [
            BlockSpec(name="tied", clip_norm=0.7, names=("words.weight",)),
            BlockSpec(name="linear", clip_norm=0.02, names=("linear.weight",)),
            BlockSpec(
                name="small", clip_norm=3.0, names=("norm.weight", "norm.bias", "linear.bias")
            ),
        ]
        private = PrivateModel(model, specs)
        ids = torch.randint(0, 13, (1, 20)) if draw % 2 else torch.full((1, 20), 5)
        scale = {**SHAPES, "cancelling": cancelling}[shape](torch.randn(1, 20, 13))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            private.accumulate(lambda m=model, i=ids, s=scale: m(i, s), records=1)
        result = private.sums()
        for spec in specs:
            norms = torch.tensor([length(result[name]) for name in spec.names]).double()
            assert length(norms) <= spec.clip_norm
            assert result[spec.names[0]].dtype == torch.float32
            if shape in ("nan", "inf", "overflowing"):
                assert length(norms) == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("together", [False, True])
def test_a_lost_record_adds_nothing_and_takes_nothing_from_others(
    bad: float, together: bool
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    names = tuple(name for name, _ in model.named_parameters())
    groups = [names] if together else [(name,) for name in names]
    private = PrivateModel(model, [BlockSpec(name=g[0], clip_norm=0.5, names=g) for g in groups])
    x = torch.randn(5, 4)
    private.accumulate(lambda: model(x[1:]).square().sum(1), records=4)
    expected = private.sums()
    private.clear_sums()
    x[0, 2] = bad
    private.accumulate(lambda: model(x).square().sum(1), records=5)
    for name, got in private.sums().items():
        assert torch.allclose(got, expected[name], rtol=1e-5, atol=1e-7)


def test_norms_are_at_least_those_in_float64() -> None:
    torch.manual_seed(0)
    for of_rows in SHAPES.values():
        for shape in ((3, 1000), (3, 30, 50), (3, 7, 5, 4), (3, 1)):
            rows = of_rows(torch.randn(shape))
            true = rows.double().flatten(1).norm(dim=1)
            result = norm_of_rows(rows).double()
            assert bool(((result >= true) | ~true.isfinite()).all())
            assert bool((result[true.isfinite() & (true < 1e18)] < torch.inf).all())


def test_weights_never_let_a_norm_through() -> None:
    norms = torch.logspace(-38, 38, 5001)
    for clip_norm in (norm_bounds.MIN_CLIP_NORM, 0.3, norm_bounds.MAX_CLIP_NORM):
        weights = clip_weights(norms, clip_norm)
        assert bool((weights.double() * norms.double() <= clip_norm).all())
        assert bool((weights[norms <= clip_norm * 0.99] == 1).all())
    assert clip_weights(torch.tensor([torch.nan, torch.inf, 0.0]), 1.0).tolist() == [0, 0, 1]


@pytest.mark.parametrize("kernel", ["gram", "reuse"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_a_lost_record_takes_no_other_with_it(kernel: str, bad: float) -> None:
    """Its rows are in the same batch of products, and in the same chunk."""
    a, b = torch.randn(4, 8, 5), torch.randn(4, 8, 6)
    whole = LinearFactors(a[[0, 1, 3]], b[[0, 1, 3]])
    a[2, 3, 1] = bad
    b[2] *= bad
    of = LinearFactors(a, b)
    if kernel == "gram":
        assert torch.isinf(of.gram_norms()[2])
        weights = clip_weights(of.gram_norms(), 0.1)
        added, expected = of.weighted_sum(weights), whole.weighted_sum(weights[[0, 1, 3]])
    else:
        added, expected = of.reused_sum(0.1), whole.reused_sum(0.1)
    assert torch.allclose(added, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_entry_that_is_not_finite_is_seen(bad: float) -> None:
    tensors = [torch.full((40,), 3e38), torch.empty(0), torch.randn(300, 70)]
    assert all_finite(tensors)
    for place in (0, 12345, 20999):
        result = tensors[2].clone()
        result.view(-1)[place] = bad
        assert not all_finite([*tensors[:2], result])


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_rounded_operands_are_refused(precision: str) -> None:
    require_true_float32()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with pytest.raises(RuntimeError, match="set_float32_matmul_precision"):
            require_true_float32()
    finally:
        torch.set_float32_matmul_precision(before)


def test_sums_without_an_error_bound_are_refused() -> None:
    assert norm_bounds.rounding_bound(1000, torch.float32) == pytest.approx(
        1000 * 2.0**-24, rel=1e-4
    )
    with pytest.raises(ValueError, match="no useful error bound"):
        norm_bounds.rounding_bound(2**23, torch.float32)
