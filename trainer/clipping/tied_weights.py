"""Tensors that several layers share: three rules, and the inner products that the third needs.

1. *Untied*: each layer gets a tensor of its own, with a block of its own (``untie``, here,
   before the blocks are named).
2. *Each use by itself*: the tensor stays one, and every layer that uses it has a clip norm;
   a record moves it by at most their sum (``BlockSpec.uses``).
3. *Exact*: the tensor stays one and is clipped by the norm of the sum of its uses, cross
   terms included; this is what happens where nothing else is said.

The rule changes what is released, so it belongs to the plan: it decides how many blocks
there are and what their clip norms are.

>>> words, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
>>> head.weight = words.weight
>>> model = nn.ModuleDict({"words": words, "head": head})
>>> untie(model), len(list(model.parameters()))
({'head.weight': 'words.weight'}, 2)

A tensor that a model uses twice (a tied embedding and output head, a layer called twice)
has the gradient G_i + H_i, and ‖G_i + H_i‖² = ‖G_i‖² + ‖H_i‖² + 2⟨G_i, H_i⟩. The last
term comes from the factors as well:

    linear, linear        Σ_{s,t} (A_i A'_iᵀ)_{st} (B_i B'_iᵀ)_{st}
    embedding, embedding  Σ_{s,t} [ids_s = ids'_t] ⟨b_s, b'_t⟩
    embedding, linear     Σ_{s,t} B_{t, ids_s} ⟨e_s, a_t⟩     (a table W of V × d, y = x Wᵀ)

Each is returned as an upper bound, the error of its rounding added.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from affidavit.trainer.clipping.ghost_norm import (
    DenseFactors,
    EmbeddingFactors,
    Factors,
    LinearFactors,
)
from affidavit.trainer.numerics import norm_of_rows, rounding, widened


def untie(model: nn.Module) -> dict[str, str]:
    """Give every layer but the first a copy of a tensor that it shares, in place.

    Returns the names of the copies with the names of what they were copied from. A layer
    that is called several times keeps its tensor: that is one layer.
    """
    first: dict[int, str] = {}
    result: dict[str, str] = {}
    for path, layer in model.named_modules():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            full = f"{path}.{name}" if path else name
            if id(parameter) not in first:
                first[id(parameter)] = full
                continue
            result[full] = first[id(parameter)]
            copy = parameter.detach().clone()
            setattr(layer, name, nn.Parameter(copy, requires_grad=parameter.requires_grad))
    return result


def upper_inner(first: Factors, second: Factors) -> Tensor:
    """Upper bound on ⟨G_i, H_i⟩ for every record, shape (n,).

    Of a dense and another kind the other's gradients are formed in full.
    """
    match first, second:
        case LinearFactors(), LinearFactors():
            return _linear(first, second)
        case EmbeddingFactors(), EmbeddingFactors():
            return _embeddings(first, second)
        case EmbeddingFactors(), LinearFactors():
            return _mixed(first, second)
        case LinearFactors(), EmbeddingFactors():
            return _mixed(second, first)
        case DenseFactors(), DenseFactors():
            return _dense(first, second)
        case _:
            return _formed(first, second)


def _linear(first: LinearFactors, second: LinearFactors) -> Tensor:
    a, b = widened(first.inputs), widened(first.outputs)
    c, d = widened(second.inputs), widened(second.outputs)
    inner = (torch.bmm(a, c.mT) * torch.bmm(b, d.mT)).sum(-1).sum(-1)
    terms = a.shape[2] + b.shape[2] + a.shape[1] + c.shape[1] + 8
    return inner + rounding(terms, a.dtype) * first.reach * second.reach


def _embeddings(first: EmbeddingFactors, second: EmbeddingFactors) -> Tensor:
    b, d = widened(first.outputs), widened(second.outputs)
    same = first.ids.unsqueeze(2) == second.ids.unsqueeze(1)
    inner = (torch.bmm(b, d.mT) * same).sum(-1).sum(-1)
    terms = b.shape[2] + b.shape[1] + d.shape[1] + 8
    return inner + rounding(terms, b.dtype) * first.reach * second.reach


def _mixed(table: EmbeddingFactors, head: LinearFactors) -> Tensor:
    e, a = widened(table.outputs), widened(head.inputs)
    steps = head.outputs.shape[1]
    ids = table.ids.unsqueeze(1).expand(-1, steps, -1)
    picked = widened(torch.gather(head.outputs, 2, ids))
    inner = (torch.bmm(a, e.mT) * picked).sum(-1).sum(-1)
    terms = e.shape[2] + e.shape[1] + steps + 8
    return inner + rounding(terms, e.dtype) * table.reach * head.reach


def _dense(first: DenseFactors, second: DenseFactors) -> Tensor:
    b, d = first.gradients.flatten(1), second.gradients.flatten(1)
    sizes = norm_of_rows(b) * norm_of_rows(d)
    return (b * d).sum(1) + rounding(b.shape[1] + 8, b.dtype) * sizes


def _formed(first: Factors, second: Factors) -> Tensor:
    b, d = full(first).flatten(1), full(second).flatten(1)
    ours, theirs = first.norms(), second.norms()
    lost = first.slack() * theirs + second.slack() * (ours + second.slack())
    return (b * d).sum(1) + rounding(b.shape[1] + 8, b.dtype) * ours * theirs + lost


def full(factors: Factors) -> Tensor:
    """The per-record gradients themselves, (n, *shape). Raises ``TypeError`` for other factors."""
    match factors:
        case LinearFactors():
            return torch.bmm(widened(factors.outputs).mT, widened(factors.inputs))
        case EmbeddingFactors():
            b = widened(factors.outputs)
            table = b.new_zeros(len(b), factors.rows, b.shape[2])
            return table.scatter_add_(1, factors.ids.unsqueeze(2).expand_as(b), b)
        case DenseFactors():
            return factors.gradients
    raise TypeError(f"{type(factors).__name__} has no full form")
