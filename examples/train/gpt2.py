"""GPT-2: a decoder with causal self-attention, and its adapter as a language model.

    x = wte[ids] + wpe[0..T-1];  x += attn(ln_1(x));  x += mlp(ln_2(x));  y = lm_head(ln_f(x))

Every parameter belongs to a ``Linear``, ``Embedding`` or ``LayerNorm``, so that per-record
gradients are known, and every activation keeps the records in its first dimension. Records are
padded on the right: no token sees a later one, so padding changes nothing before it and needs
no mask. Dropout is not applied: private training is regularised by its noise.

>>> config = GPT2Config.parsed({"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50})
>>> model = GPT2(config, seed=1)
>>> model(torch.tensor([[3, 1, 4], [1, 5, 9]])).shape
torch.Size([2, 3, 50])
>>> len(hidden_matrices(model)), config.n_inner, config.tie_word_embeddings
(8, 64, True)
>>> GPT2Config.parsed({"n_head": 5, "n_embd": 16})
Traceback (most recent call last):
    ...
examples.train.gpt2.WrongConfig: config.json: n_embd 16 is not a multiple of n_head 5.

Tensors have the names of published files. Of a ``config.json`` of the Hugging Face libraries, the
fields that change the function are read; values that this model does not compute are refused by
name. Pretrained weights are read from a folder on this machine, as data, not programs: safetensors,
or ``torch.load`` with ``weights_only``. Names may begin with ``transformer.``; causal masks in old
files are skipped. Matrices are stored (out, in) here. Four kinds are stored transposed in these
files, which were made with a layer called Conv1D, and are transposed. Missing and unknown tensors
are refused by name, and so are tensors of the wrong shape or with values that are not finite. A
head that the file does not have starts as a copy of the token table.

The adapter's loss of a record is the mean negative log-likelihood, in nats, over the tokens that
count (``examples.train.text``: the target, not its source prefix and not padding). A record
without such tokens has loss 0. Logits and losses are float32 or better.

examples/train/README.md lists the options of ``--model gpt2``. With ``tie=uses``, the token
table is a release ``tied`` of its own, and each of its uses is clipped to half of that release's
clip norm.

>>> language_model = LanguageModel(model, single_block(model), 50)
>>> language_model.losses(language_model.made_up(3)).shape
torch.Size([3])

References: Radford et al., Language Models are Unsupervised Multitask Learners, 2019;
arXiv:2605.12994v1, appendix D (which matrices are hidden).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.nn import functional

from affidavit.trainer.adapters import Batch, Group
from affidavit.trainer.models.layout import Layout, add_lora, group_hidden_matrices, single_block
from affidavit.trainer.sources import Options, WrongOption

Size = Annotated[int, Field(ge=1, le=2**24)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class WrongConfig(ValueError):
    """A configuration that is malformed or belongs to another model."""


class GPT2Config(BaseModel):
    """The fields of ``config.json`` under their own names, with its defaults.

    ``scale_attn_by_inverse_layer_idx`` divides the attention logits of layer i (from 0) by i + 1.
    Without ``scale_attn_weights``, they are not divided by the square root of a head's width. The
    first two names of ``activation_function`` are one function.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    model_type: Literal["gpt2"] = "gpt2"
    add_cross_attention: Literal[False] | None = False
    vocab_size: Size = 50257
    n_positions: Size = 1024
    n_embd: Size = 768
    n_layer: Size = 12
    n_head: Size = 12
    n_inner: Size = Field(default_factory=lambda fields: 4 * fields["n_embd"])
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu"] = (
        "gelu_new"
    )
    layer_norm_epsilon: Positive = 1e-5
    initializer_range: Positive = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def parsed(cls, document: Any) -> GPT2Config:
        """Parse a JSON object; raises ``WrongConfig``."""
        if not isinstance(document, dict):
            raise WrongConfig("config.json: not a JSON object.")
        settings = {name: value for name, value in document.items() if (name, value) != _NO_WIDTH}
        try:
            config = cls.model_validate(settings)
        except ValidationError as error:
            first = error.errors()[0]
            raise WrongConfig(
                f"config.json: {first['loc'][0]} is {first['input']!r}. {first['msg']}."
            ) from None
        if config.n_embd % config.n_head:
            raise WrongConfig(
                f"config.json: n_embd {config.n_embd} is not a multiple of n_head {config.n_head}."
            )
        return config

    @classmethod
    def read(cls, path: Path) -> GPT2Config:
        """Read a file; raises ``WrongConfig``."""
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise WrongConfig(f"cannot read {path}: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:
            raise WrongConfig(f"{path} is not valid JSON ({error}).") from None
        return cls.parsed(document)


_NO_WIDTH = ("n_inner", None)
"""Files may leave out the width between the two matrices of a layer."""

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
        """Map (n, T, d) to (n, T, d)."""
        query, key, value = (
            item.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for item in self.c_attn(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale
        )
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two matrices with an activation in between."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd)
        self.activation = ACTIVATION[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, T, d) to (n, T, d)."""
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
        """Map (n, T, d) to (n, T, d)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """All layers except the head."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Layer(config, place) for place in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (n, T) to (n, T, d)."""
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self.wte(ids) + self.wpe(places)
        for layer in self.h:
            x = layer(x)
        return self.ln_f(x)


class GPT2(nn.Module):
    """The language model. Initial weights depend only on ``seed``, which is public."""

    def __init__(self, config: GPT2Config, *, seed: int) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        initialize(self, config, torch.Generator().manual_seed(seed))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (n, T, vocabulary) of the token that follows each of the ids (n, T)."""
        return self.lm_head(self.transformer(ids))


@torch.no_grad()
def initialize(model: nn.Module, config: GPT2Config, generator: torch.Generator) -> None:
    """Draw normal matrices, smaller ones at the end of a residual branch; zero the biases."""
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            std = config.initializer_range
            if path.endswith("c_proj"):
                std /= (2 * config.n_layer) ** 0.5
            layer.weight.normal_(0, std, generator=generator)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            layer.bias.zero_()


def hidden_matrices(model: GPT2) -> list[str]:
    """Return the names of the matrices of all layers, in order; four per layer."""
    return [
        f"transformer.h.{place}.{name}.weight"
        for place in range(model.config.n_layer)
        for name in HIDDEN
    ]


@torch.no_grad()
def grow_vocabulary(model: GPT2, vocabulary: int) -> None:
    """Add rows for new tokens, each the mean of the existing rows; never remove rows."""
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


MASKS = re.compile(r"(^|\.)attn\.(bias|masked_bias)$")
FILES = ("model.safetensors", "pytorch_model.bin")


class WrongWeights(ValueError):
    """Weights that cannot be read, or do not match their configuration."""


def pretrained(folder: Path, *, tied: bool | None = None) -> GPT2:
    """Load the model in ``folder``; ``tied`` overrides the configuration.

    Raises ``WrongConfig`` and ``WrongWeights``.
    """
    config = GPT2Config.read(folder / "config.json")
    if tied is not None:
        config = config.model_copy(update={"tie_word_embeddings": tied})
    model = GPT2(config, seed=0)  # every entry is overwritten below
    load_weights(model, read_tensors(folder))
    return model


def load_weights(model: GPT2, tensors: dict[str, Tensor]) -> None:
    """Copy tensors under their published names into ``model``; raises ``WrongWeights``.

    Tensors have the shapes of the model, transposed for ``Conv1D`` layers.
    """
    result = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": value
        for name, value in tensors.items()
        if not MASKS.search(name)
    }
    table = "transformer.wte.weight"
    if "lm_head.weight" not in result and table in result:
        result["lm_head.weight"] = result[table]
    if model.config.tie_word_embeddings and not torch.equal(
        result.get("lm_head.weight", torch.empty(0)), result.get(table, torch.empty(0))
    ):
        raise WrongWeights(
            "lm_head.weight differs from transformer.wte.weight, but config.json ties them. Set "
            "tie_word_embeddings to false."
        )
    requested = model.state_dict()
    missing, unknown = sorted(set(requested) - set(result)), sorted(set(result) - set(requested))
    if missing or unknown:
        raise WrongWeights(
            f"the file {_list_names('lacks', missing)}{' and ' * bool(missing and unknown)}"
            f"{_list_names('has', unknown)}, contrary to config.json."
        )
    for name, place in requested.items():
        value = transpose_conv1d(name, result[name])
        if value.shape != place.shape:
            raise WrongWeights(
                f"{name} has shape {tuple(value.shape)}; config.json requires {tuple(place.shape)}."
            )
        if not (value.is_floating_point() and bool(torch.isfinite(value).all())):
            raise WrongWeights(f"{name} is not a tensor of finite floating-point numbers.")
        place.copy_(value)


def transpose_conv1d(name: str, value: Tensor) -> Tensor:
    """Return ``value`` as (out, in) if the file stores it as (in, out)."""
    of_conv1d = any(name.endswith(f".{item}.weight") for item in HIDDEN)
    return value.mT if of_conv1d and value.ndim == 2 else value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder's weight files; safetensors take precedence.

    Raises ``WrongWeights``. Keys are published names; each tensor has the shape of its file.
    """
    for name in FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return _read(folder / name)
        if index.is_file():
            return _read_parts(folder, index)
    raise WrongWeights(f"{folder} has neither {' nor '.join(FILES)}.")


def _read_parts(folder: Path, index: Path) -> dict[str, Tensor]:
    try:
        parts = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongWeights(f"{index} is not an index of weight files ({error}).") from None
    if any(Path(part).name != part for part in parts):
        raise WrongWeights(f"{index} names files outside its folder.")
    result: dict[str, Tensor] = {}
    for part in parts:
        result |= _read(folder / part)
    return result


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            result = load_file(path)
        else:
            result = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # broken files make these readers raise nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WrongWeights(f"cannot read {path}: {reason}.") from None
    if not isinstance(result, dict) or not all(
        isinstance(item, Tensor) for item in result.values()
    ):
        raise WrongWeights(f"{path} is not a mapping from names to tensors.")
    return result


def _list_names(verb: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{verb} {shown}" if names else ""


MADE_UP_TOKENS = 8
KINDS = dict(zip(("attention-in", "attention-out", "mlp-in", "mlp-out"), HIDDEN, strict=True))
"""Releases of the layout ``kinds``, and the matrices that each has."""


@dataclass(eq=False, slots=True)
class LanguageModel:
    """Any module from ids (n, T) to logits (n, T, vocabulary), and its blocks."""

    module: nn.Module
    layout: Layout
    vocabulary: int

    def losses(self, batch: Batch) -> Tensor:
        """Return the mean loss of each record over its tokens that count; (n,)."""
        tokens, counted = batch
        logits = self.module(tokens[:, :-1])
        requested, counts = tokens[:, 1:], counted[:, 1:]
        item = functional.cross_entropy(
            logits.flatten(0, 1).float() if logits.dtype != torch.float64 else logits.flatten(0, 1),
            requested.flatten(),
            reduction="none",
        ).view_as(requested)
        return (item * counts).sum(1) / counts.sum(1).clamp(min=1)

    def blocks(self) -> Mapping[str, Sequence[Group]]:
        """Return the layout."""
        return self.layout

    def made_up(self, records: int) -> Batch:
        """Return texts of consecutive tokens with different starts; all tokens count."""
        start = torch.arange(records).unsqueeze(1) * 3
        tokens = (start + torch.arange(MADE_UP_TOKENS)) % self.vocabulary
        return tokens, torch.ones_like(tokens, dtype=torch.bool)


def gpt2(argument: str, data: Any) -> LanguageModel:
    """Return GPT-2 from a folder with weights, or from a configuration and a seed.

    ``data`` has a ``vocabulary``, the number of its tokens, and ``longest``, the largest number of
    tokens of a record; both are public. Raises ``WrongOption`` and ``WrongWeights``.
    """
    options = Options.parse(argument, "--model gpt2")
    if not (hasattr(data, "vocabulary") and hasattr(data, "longest")):
        raise WrongOption("--model gpt2 needs text data.")
    model, tie = _loaded(options)
    grow_vocabulary(model, data.vocabulary)
    if data.longest - 1 > model.config.n_positions:
        raise WrongOption(
            f"--model gpt2: records have up to {data.longest} tokens, but the model has "
            f"{model.config.n_positions} positions; give the data longest="
            f"{model.config.n_positions + 1} or less."
        )
    layout = _layout(model, options, tie)
    options.require_all_read()
    return LanguageModel(model, layout, len(model.lm_head.weight))


def _loaded(options: Options) -> tuple[GPT2, str]:
    if not options.value:
        raise WrongOption("--model gpt2: name a folder with weights, or a config.json and a seed.")
    path = options.file()
    tie = options.choice("tie", ("", "exact", "uses", "untied"))
    tied = None if not tie else tie != "untied"
    if path.is_dir():
        model = pretrained(path, tied=tied)
    else:
        config = GPT2Config.read(path)
        if tied is not None:
            config = config.model_copy(update={"tie_word_embeddings": tied})
        model = GPT2(config, seed=options.integer("seed", minimum=0))
    return model, tie


def _layout(model: GPT2, options: Options, tie: str) -> Layout:
    blocks = options.choice("blocks", ("hidden", "kinds", "all"))
    rank = options.integer("lora", minimum=0, default=0)
    matrices = hidden_matrices(model)
    if rank:
        seed = options.integer("seed", minimum=0)
        alpha = options.integer("alpha", minimum=1, default=rank)
        matrices = add_lora(
            model, matrices, rank=rank, alpha=alpha, generator=torch.Generator().manual_seed(seed)
        )
    if blocks == "all":
        if tie == "uses":
            raise WrongOption("--model gpt2: tie=uses needs a separate block; give blocks=hidden.")
        return single_block(model, "adapters" if rank else "all")
    if tie == "uses" and rank:
        raise WrongOption("--model gpt2: lora freezes the token table; remove tie.")
    halves = {"transformer.wte": 0.5, "lm_head": 0.5}
    tied = Group(names=("transformer.wte.weight",), uses=halves)
    apart = {"tied": tied} if tie == "uses" else {}
    if blocks == "hidden":
        return group_hidden_matrices(model, {"hidden": matrices}, apart)
    return group_hidden_matrices(
        model, {kind: [n for n in matrices if f".{KINDS[kind]}." in n] for kind in KINDS}, apart
    )
