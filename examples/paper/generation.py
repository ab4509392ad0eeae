"""Texts of a trained model by beam search, and its loss on given ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from examples.train.gpt2 import LanguageModel, transpose_conv1d
from examples.train.text import TextRecords, Tokenizer


def decoder_of(path: Path, state: dict[str, torch.Tensor], vocabulary: int) -> GPT2LMHeadModel:
    """Hugging Face's model of a folder's or file's shape, with trained weights."""
    config = GPT2Config.from_json_file(path / "config.json" if path.is_dir() else path)
    config.tie_word_embeddings, config.vocab_size = False, vocabulary
    result = GPT2LMHeadModel(config).eval()
    result.load_state_dict({name: transpose_conv1d(name, item) for name, item in state.items()})
    return result


def generated(
    model: GPT2LMHeadModel,
    sources: Sequence[str],
    tokenizer: Tokenizer,
    decode: Callable[[list[int]], str],
    *,
    batch: int,
    beams: int = 5,
) -> Iterator[str]:
    """A text for each source, by the paper's beam search; sources are padded on the left."""
    pad, bos, eos = tokenizer.marks
    prompts = [[*tokenizer.encode(source), bos] for source in sources]
    for some in (prompts[start : start + batch] for start in range(0, len(prompts), batch)):
        length = max(map(len, some))
        ids = torch.tensor([[pad] * (length - len(of)) + of for of in some], device=model.device)
        output = model.generate(
            input_ids=ids,
            attention_mask=(ids != pad).long(),
            num_beams=beams,
            do_sample=False,
            length_penalty=1.0,
            max_new_tokens=min(100, model.config.n_positions - length),
            min_new_tokens=5,
            early_stopping=beams > 1,
            bad_words_ids=[tokenizer.encode("\n")],
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
        )
        for tokens in output[:, length:].tolist():
            yield decode([item for item in tokens if item < min(pad, eos)]).strip()


@torch.no_grad()
def nll(model: LanguageModel, data: TextRecords, *, device: str, batch: int) -> float:
    """The mean negative log-likelihood of a token that counts, in nats."""
    total, tokens = 0.0, 0
    for some in torch.arange(len(data)).split(batch):
        inputs, counted = data.collate(some)
        counts = counted[:, 1:].sum(1)
        losses = model.losses((inputs.to(device), counted.to(device)))
        total += float((losses.cpu().double() * counts).sum())
        tokens += int(counts.sum())
    return total / tokens
