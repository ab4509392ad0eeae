"""Pretrained GPT-2 weights from a folder on this machine; nothing is fetched.

The folder has ``config.json`` and ``model.safetensors`` or ``pytorch_model.bin``, whole or in
parts with their index. Names may begin with ``transformer.`` or not; causal masks that old
files carry are passed over. Four kinds of matrices lie transposed in these files (they were
made with a layer called Conv1D) and are turned. Files are data, not programs: safetensors, or
``torch.load`` with ``weights_only``.

Tensors that are missing, left over, of the wrong shape or not finite are refused by name. A
head that the file does not have starts as a copy of the token table.

>>> turned("transformer.h.0.mlp.c_fc.weight", torch.zeros(2, 8)).shape
torch.Size([8, 2])
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from affidavit.trainer.models.gpt2 import GPT2, HIDDEN, GPT2Config

MASKS = re.compile(r"(^|\.)attn\.(bias|masked_bias)$")
FILES = ("model.safetensors", "pytorch_model.bin")


class WrongWeights(ValueError):
    """Weights that cannot be read, or are not those of the configuration beside them."""


def pretrained(folder: Path, *, tied: bool | None = None) -> GPT2:
    """The model in ``folder``; ``tied`` overrides ``tie_word_embeddings`` of its configuration.

    Raises ``WrongConfig`` and ``WrongWeights``.
    """
    config = GPT2Config.read(folder / "config.json")
    if tied is not None:
        config = replace(config, tie_word_embeddings=tied)
    model = GPT2(config, seed=0)  # every entry is overwritten below
    load_into(model, tensors_in(folder))
    return model


def load_into(model: GPT2, given: dict[str, Tensor]) -> None:
    """Copy tensors under their published names into ``model``; raises ``WrongWeights``.

    Tensors have the shapes of the model, those of ``Conv1D`` layers transposed.
    """
    result = {_full(name): value for name, value in given.items() if not MASKS.search(name)}
    table = "transformer.wte.weight"
    if "lm_head.weight" not in result and table in result:
        result["lm_head.weight"] = result[table]
    if model.config.tie_word_embeddings and not torch.equal(
        result.get("lm_head.weight", torch.empty(0)), result.get(table, torch.empty(0))
    ):
        raise WrongWeights(
            "lm_head.weight is not transformer.wte.weight, and config.json ties them "
            "(tie_word_embeddings). Load it untied."
        )
    requested = model.state_dict()
    missing, unknown = sorted(set(requested) - set(result)), sorted(set(result) - set(requested))
    if missing or unknown:
        raise WrongWeights(
            f"the file {_list('lacks', missing)}{' and ' * bool(missing and unknown)}"
            f"{_list('has', unknown)}, which config.json does not say."
        )
    for name, place in requested.items():
        value = turned(name, result[name])
        if value.shape != place.shape:
            raise WrongWeights(
                f"{name} has shape {tuple(value.shape)}; config.json says {tuple(place.shape)}."
            )
        if not (value.is_floating_point() and bool(torch.isfinite(value).all())):
            raise WrongWeights(f"{name} is not of finite floating-point numbers.")
        place.copy_(value)


def turned(name: str, value: Tensor) -> Tensor:
    """``value`` as (out, in) where the file holds (in, out)."""
    of_conv1d = any(name.endswith(f".{item}.weight") for item in HIDDEN)
    return value.mT if of_conv1d and value.ndim == 2 else value


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's weight files, safetensors before pickles.

    Raises ``WrongWeights``. Keys are published names; each tensor has the shape of its file.
    """
    for name in FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return _read(folder / name)
        if index.is_file():
            return _read_parts(folder, index)
    raise WrongWeights(f"{folder}: neither {' nor '.join(FILES)} is there.")


def _read_parts(folder: Path, index: Path) -> dict[str, Tensor]:
    try:
        parts = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongWeights(f"{index}: is no index of weight files ({error}).") from None
    if any(Path(part).name != part for part in parts):
        raise WrongWeights(f"{index}: names files outside its folder.")
    result: dict[str, Tensor] = {}
    for part in parts:
        result |= _read(folder / part)
    return result


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            result = _safetensors(path)
        else:
            result = torch.load(path, map_location="cpu", weights_only=True)
    except WrongWeights:
        raise
    except Exception as error:  # broken files make these readers raise nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WrongWeights(f"{path}: cannot be read ({reason}).") from None
    if not isinstance(result, dict) or not all(
        isinstance(item, Tensor) for item in result.values()
    ):
        raise WrongWeights(f"{path}: is no table of tensors by name.")
    return result


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise WrongWeights(f"{path}: install affidavit[trainer] to read safetensors.") from None
    return load_file(path)


def _full(name: str) -> str:
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _list(verb: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{verb} {shown}" if names else ""
