"""Models of common shapes for ``bench/trainer.py``, with a lot of made-up records.

>>> sorted(SHAPES)
['gpt', 'llama', 'resnet', 'small']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, TIME, WORDS, LOT = 4, 256, 4, 64, 5000, 32


class Attention(nn.Module):
    """Causal self-attention with four separate matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, d)."""
        q, k, v = (
            item(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for item in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a feed-forward part, with pre-normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, d)."""
        x = x + self.attention(self.first(x))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """Token and position embeddings, layers, and an untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (n, T, words)."""
        x = self.tokens(ids) + self.places(torch.arange(TIME).repeat(len(ids), 1))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Llama(nn.Module):
    """Hugging Face's Llama, with two heads of keys and values; logits (n, T, words)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=WIDTH,
                intermediate_size=3 * WIDTH,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=HEADS // 2,
                vocab_size=WORDS,
                tie_word_embeddings=False,
            )
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (n, T, words)."""
        return self.model(input_ids=ids, use_cache=False).logits


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(32, outputs) for _ in range(2))
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, outputs, height / stride, width / stride)."""
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(inner)) + self.around(x))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 by 32 pixels, with group normalisation."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.ReLU()]
    for before, width in ((64, 64), (64, 128), (128, 256), (256, 512)):
        layers += [Residual(before, width, 1 + (width > 64)), Residual(width, width, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class SmallTensors(nn.Module):
    """Many layers with a skip connection: 301 tensors of at most 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(32) for _ in range(100))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(100))
        self.head = nn.Linear(32, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, 10)."""
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return self.head(x)


def vectors() -> tuple[Tensor, Tensor]:
    """Return vectors (LOT, 32) and classes (LOT,)."""
    return torch.randn(LOT, 32), torch.randint(10, (LOT,))


def texts() -> tuple[Tensor, Tensor]:
    """Return ids and targets, (LOT, TIME) each."""
    return torch.randint(WORDS, (LOT, TIME)), torch.randint(WORDS, (LOT, TIME))


def images() -> tuple[Tensor, Tensor]:
    """Return images (LOT, 3, 32, 32) and classes (LOT,)."""
    return torch.randn(LOT, 3, 32, 32), torch.randint(10, (LOT,))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, its lot, and a text about their sizes."""

    build: Callable[[], nn.Module]
    lot: Callable[[], tuple[Tensor, Tensor]]
    size: str
    logits: tuple[int, ...]

    def data(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, the same on every call."""
        torch.manual_seed(1)
        return self.lot()

    def losses(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of each record, (n,)."""
        logits = model(inputs).flatten(0, -2)
        losses = functional.cross_entropy(logits, targets.flatten(), reduction="none")
        return losses.view(len(inputs), -1).mean(1)

    def hidden(self, model: nn.Module) -> list[str]:
        """Return the names of hidden matrices and kernels: all but embeddings and the head."""
        kinds = (nn.Linear, nn.Conv2d)
        *inner, _ = [name for name, layer in model.named_modules() if isinstance(layer, kinds)]
        return [f"{name}.weight" for name in inner]


LANGUAGE = f"{LAYERS} layers, d = {WIDTH}, T = {TIME}, {WORDS} words, lot {LOT}"
SHAPES = {
    "gpt": Shape(build=GPT, lot=texts, size=f"GPT, {LANGUAGE}", logits=(LOT, TIME, WORDS)),
    "llama": Shape(build=Llama, lot=texts, size=f"Llama, {LANGUAGE}", logits=(LOT, TIME, WORDS)),
    "resnet": Shape(
        build=resnet18, lot=images, size=f"ResNet-18, 32 x 32 pixels, lot {LOT}", logits=(LOT, 10)
    ),
    "small": Shape(
        build=SmallTensors,
        lot=vectors,
        size=f"301 tensors of at most 32 x 32, lot {LOT}",
        logits=(LOT, 10),
    ),
}
