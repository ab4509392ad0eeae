"""GPT-2's shape, as ``config.json`` of the Hugging Face libraries states it.

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
affidavit.trainer.models.gpt2_config.WrongConfig: config.json: n_embd 16 is no multiple of n_head 5.

Reference: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        found: dict[str, Any] = {
            **{name: _integer(document, name, default) for name, default in _INTEGERS.items()},
            **{name: _number(document, name, default) for name, default in _NUMBERS.items()},
            **{name: _boolean(document, name, default) for name, default in _BOOLEANS.items()},
            "activation_function": _activation(document),
        }
        if document.get("n_inner") is None:
            found["n_inner"] = 4 * found["n_embd"]
        else:
            found["n_inner"] = _integer(document, "n_inner", 0)
        if found["n_embd"] % found["n_head"]:
            raise WrongConfig(
                f"config.json: n_embd {found['n_embd']} is no multiple of n_head {found['n_head']}."
            )
        return cls(**found)

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
    found = document.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= 2**24:
        raise WrongConfig(f"config.json: {name} is {found!r}; it is a whole number from 1 up.")
    return found


def _number(document: dict[str, Any], name: str, default: float) -> float:
    found = document.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise WrongConfig(f"config.json: {name} is {found!r}; it is a positive number.")
    return float(found)


def _boolean(document: dict[str, Any], name: str, default: bool) -> bool:
    found = document.get(name, default)
    if not isinstance(found, bool):
        raise WrongConfig(f"config.json: {name} is {found!r}; it is true or false.")
    return found


def _activation(document: dict[str, Any]) -> str:
    found = document.get("activation_function", ACTIVATIONS[0])
    if found not in ACTIVATIONS:
        raise WrongConfig(
            f"config.json: activation_function {found!r}; known are {', '.join(ACTIVATIONS)}."
        )
    return str(found)
