"""GPT-2: a decoder of causal self-attention, its tensors named as in published files.

    x = wte[ids] + wpe[0..T-1];  x += attn(ln_1(x));  x += mlp(ln_2(x));  y = lm_head(ln_f(x))

Every parameter belongs to a ``Linear``, ``Embedding`` or ``LayerNorm``, so that per-record
gradients are known, and every activation keeps the records in its first dimension. Matrices
are stored (out, in); published files hold their transposes. Records are padded on the right:
no token sees a later one, so that padding changes nothing before it and needs no mask.

>>> config = GPT2Config.parsed({"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50})
>>> model = GPT2(config, seed=1)
>>> model(torch.tensor([[3, 1, 4], [1, 5, 9]])).shape
torch.Size([2, 3, 50])
>>> len(hidden_matrices(model))
8

Reference: Radford et al., 2019; arXiv:2605.12994v1, appendix D (which matrices are hidden).

GPT-2's shape, as ``config.json`` of the Hugging Face libraries states it.

The loader reads the fields that change the function and refuses, by name, values that this
model does not compute; other fields (generation, file bookkeeping) are passed over. Dropout is
not applied: private training is regularised by its noise, and the fields of its rates are
passed over too.

>>> config = GPT2Config.parsed({"n_layer": 2, "n_head": 2, "n_embd": 16})
>>> config.vocab_size, config.n_inner, config.tie_word_embeddings
(50257, 64, True)
>>> GPT2Config.parsed({"n_head": 5, "n_embd": 16})
Traceback (most recent call last):
    ...
affidavit.trainer.models.gpt2.WrongConfig: config.json: n_embd 16 is no multiple of n_head 5.

Reference: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu")
"""Names of ``activation_function``; the first two are one function."""


class WrongConfig(ValueError):
    """A configuration that is malformed, or of another model than this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPT2Config:
    """The fields of ``config.json`` under their own names, with its defaults.

    ``scale_attn_by_inverse_layer_idx`` divides the attention logits of layer i (from 0) by i + 1;
    without ``scale_attn_weights`` they are not divided by the square root of a head's width.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def parsed(cls, document: Any) -> GPT2Config:
        """The configuration that a JSON object means; raises ``WrongConfig``."""
        if not isinstance(document, dict):
            raise WrongConfig("config.json: it is no object.")
        if (kind := document.get("model_type", "gpt2")) != "gpt2":
            raise WrongConfig(f"config.json: model_type {kind!r}; this model is 'gpt2'.")
        if document.get("add_cross_attention"):
            raise WrongConfig("config.json: add_cross_attention is set; there is no encoder here.")
        fields: dict[str, Any] = {
            **{name: _integer(document, name, default) for name, default in _INTEGERS.items()},
            **{name: _number(document, name, default) for name, default in _NUMBERS.items()},
            **{name: _boolean(document, name, default) for name, default in _BOOLEANS.items()},
            "activation_function": _activation(document),
        }
        if document.get("n_inner") is None:
            fields["n_inner"] = 4 * fields["n_embd"]
        else:
            fields["n_inner"] = _integer(document, "n_inner", 0)
        if fields["n_embd"] % fields["n_head"]:
            raise WrongConfig(
                f"config.json: n_embd {fields['n_embd']} is no multiple of n_head "
                f"{fields['n_head']}."
            )
        return cls(**fields)

    @classmethod
    def read(cls, path: Path) -> GPT2Config:
        """The configuration in a file; raises ``WrongConfig``."""
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise WrongConfig(f"{path}: cannot be read ({error.strerror}).") from None
        except (ValueError, RecursionError) as error:
            raise WrongConfig(f"{path}: is no JSON ({error}).") from None
        return cls.parsed(document)


_INTEGERS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
}  # fmt: skip
_NUMBERS = {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02}
_BOOLEANS = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def _integer(document: dict[str, Any], name: str, default: int) -> int:
    result = document.get(name, default)
    if isinstance(result, bool) or not isinstance(result, int) or not 1 <= result <= 2**24:
        raise WrongConfig(f"config.json: {name} is {result!r}; it is a whole number from 1 up.")
    return result


def _number(document: dict[str, Any], name: str, default: float) -> float:
    result = document.get(name, default)
    if isinstance(result, bool) or not isinstance(result, int | float) or not 0 < result < math.inf:
        raise WrongConfig(f"config.json: {name} is {result!r}; it is a positive number.")
    return float(result)


def _boolean(document: dict[str, Any], name: str, default: bool) -> bool:
    result = document.get(name, default)
    if not isinstance(result, bool):
        raise WrongConfig(f"config.json: {name} is {result!r}; it is true or false.")
    return result


def _activation(document: dict[str, Any]) -> str:
    result = document.get("activation_function", ACTIVATIONS[0])
    if result not in ACTIVATIONS:
        raise WrongConfig(
            f"config.json: activation_function {result!r}; known are {', '.join(ACTIVATIONS)}."
        )
    return str(result)


HIDDEN = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
"""The four matrices of a layer that DP-Muon orthogonalises, each with a block of its own."""

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


class Attention(nn.Module):
    """Causal self-attention of several heads; queries, keys and values from one matrix."""

    def __init__(self, config: GPT2Config, place: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.heads = config.n_head
        self.scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= place + 1

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, d)."""
        query, key, value = (
            item.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for item in self.c_attn(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale
        )
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two matrices with an activation between."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd)
        self.activation = ACTIVATION[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, d)."""
        return self.c_proj(self.activation(self.c_fc(x)))


class Layer(nn.Module):
    """Attention and feed-forward, each normalised before and added after."""

    def __init__(self, config: GPT2Config, place: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, place)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, d)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Everything but the head."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Layer(config, place) for place in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (n, T) to (n, T, d)."""
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self.wte(ids) + self.wpe(places)
        for layer in self.h:
            x = layer(x)
        return self.ln_f(x)


class GPT2(nn.Module):
    """The language model. ``seed`` is public: the first weights are a function of it alone."""

    def __init__(self, config: GPT2Config, *, seed: int) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        initialise(self, config, torch.Generator().manual_seed(seed))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (n, T, vocabulary) of what follows each of the ids (n, T)."""
        return self.lm_head(self.transformer(ids))


@torch.no_grad()
def initialise(model: nn.Module, config: GPT2Config, generator: torch.Generator) -> None:
    """Normal matrices, those that end a residual branch smaller; zero biases, unit scales."""
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            std = config.initializer_range
            if path.endswith("c_proj"):
                std /= (2 * config.n_layer) ** 0.5
            layer.weight.normal_(0, std, generator=generator)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            layer.bias.zero_()


def hidden_matrices(model: GPT2) -> list[str]:
    """Names of the matrices of all layers, in order; four a layer."""
    return [
        f"transformer.h.{place}.{name}.weight"
        for place in range(model.config.n_layer)
        for name in HIDDEN
    ]


@torch.no_grad()
def grow(model: GPT2, vocabulary: int) -> None:
    """Add rows for new tokens, each the mean of the rows there are; never takes any away."""
    for layer in (model.transformer.wte, model.lm_head):
        missing = vocabulary - len(layer.weight)
        if missing > 0:
            mean = layer.weight.mean(0, keepdim=True).expand(missing, -1)
            grown = nn.Parameter(torch.cat([layer.weight, mean]))
            if model.lm_head.weight is model.transformer.wte.weight:
                model.lm_head.weight = grown
            layer.weight = grown
    model.transformer.wte.num_embeddings = len(model.transformer.wte.weight)
    model.lm_head.out_features = len(model.lm_head.weight)
