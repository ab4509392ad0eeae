"""A Llama-shaped decoder in plain PyTorch, which needs no other package on the device machine.

RMS normalisation, rotary positions, grouped-query attention, a gated feed-forward part, and an
untied head. 22 layers of width 2048 are the 1.1 billion parameters of TinyLlama
(arXiv:2401.02385).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    """Attention and a gated feed-forward part, normalised before."""

    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.size = width // heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared * self.size, bias=False)
        self.value = nn.Linear(width, shared * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, width)."""
        y = self.first(x)
        q, k, v = (
            item(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for item in (self.query, self.key, self.value)
        )
        groups = q.shape[1] // k.shape[1]
        k, v = (item.repeat_interleave(groups, 1) for item in (rotate(k), v))
        mixed = functional.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor) -> Tensor:
    """Queries or keys (n, heads, T, d) with their rotary positions."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class Llama(nn.Module):
    """From ids (n, T) to logits (n, T, words)."""

    def __init__(
        self, *, layers: int, width: int, heads: int, shared: int, inner: int, words: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, shared, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(n, T, words)."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def hidden_matrices(model: Llama) -> list[str]:
    """Names of the matrices of all layers."""
    return [name for name, item in model.layers.named_parameters("layers") if item.ndim == 2]
