"""The rows of the DP-Muon paper: what their plans cost, the trained model, scores of texts."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from affidavit.assessment import certify
from affidavit.plan import plan_from

PAGE = (Path(__file__).parents[2] / "docs/explanation/papers.md").read_text()
SIZES = {"e2e": 42_043, "dart": 60_591}


@pytest.fixture(scope="module")
def paper() -> Any:
    """The example, imported late: every process of the tests collects this module."""
    return import_module("examples.paper.__main__")


@pytest.mark.parametrize(
    ("row", "method", "name"),
    [
        ("e2e", "dp-sgd", "E2E, DP-SGD and DP-Adam"),
        ("e2e", "dp-muon", "E2E, DP-Muon and DP-MuonBC"),
        ("dart", "dp-adam", "DART, DP-SGD and DP-Adam"),
        ("dart", "dp-muonbc", "DART, DP-Muon and DP-MuonBC"),
    ],
)
@pytest.mark.ordinary("not shuffled-*")
@pytest.mark.parametrize("scheme", ["poisson", "shuffled"])
def test_the_page_has_the_certified_numbers(
    paper: Any, scheme: str, row: str, method: str, name: str
) -> None:
    (line,) = (of for of in PAGE.splitlines() if of.startswith(f"| {name} |"))
    columns = [of.strip() for of in line.split("|")]
    adjacency = {"poisson": "add_remove", "shuffled": "zero_out"}[scheme]
    offset = scheme == "shuffled"
    for noise, written in (
        ("published", columns[4 + offset]),
        ("certified", columns[6 + offset]),
    ):
        document = paper.plan(row, method, noise, size=SIZES[row], matrices=48)
        document |= {"adjacency": adjacency}
        document["sampling"]["scheme"] = scheme
        result = certify(plan_from(document), second_opinion=False)
        assert result.epsilon is not None
        if noise == "published":
            assert result.epsilon.lower < float(written) < result.epsilon.upper + 1e-4
        else:
            assert float(written) == result.releases[0].required


def test_tokens_that_are_no_characters_have_a_text(paper: Any) -> None:
    """A model that learned little writes halves of characters."""
    (half, *_) = paper.TOKENIZER.encode("日")
    (word,) = paper.TOKENIZER.encode("word")
    assert paper.text_of([word]) == "word"
    assert paper.text_of([half, word]) == "\ufffdword"


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # of the packages that generate and score
def test_a_slice_ends_in_a_conformant_record_and_scores(
    paper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFFIDAVIT_HOME", str(tmp_path))
    paper.command(paper.gate, "keys", "new", "--label", "test")
    result = paper.main(["--row=dart", "--method=dp-muonbc", "--slice", f"--out={tmp_path}"])
    assert result == json.loads((tmp_path / "scores.json").read_text())
    assert all(math.isfinite(value) for value in result.values())
    written = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [len(of["references"]) for of in written] == [2, 1]
    config = paper.HERE / "slice" / "gpt2.json"
    state = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)
    ours = paper.gpt2(f"{config},seed=2", paper.records("dart", str(config.parent))).module
    ours.load_state_dict(state)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        theirs = paper.decoder_of(config, state, paper.TOKENIZER.vocabulary)(
            input_ids=tokens
        ).logits
        torch.testing.assert_close(ours(tokens), theirs, rtol=1e-5, atol=1e-5)


TEXTS = ["the cat sat on the mat .", "a dog runs home"]
REFERENCES = [["the cat is on the mat .", "the mat has a cat on it ."], ["a dog runs away home"]]


def grams(text: str, n: int) -> Counter[tuple[str, ...]]:
    words = text.split()
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def bleu() -> float:
    """Papineni et al., 2002, of the corpus."""
    precisions = []
    for n in range(1, 5):
        hits = sum(
            min(count, max(grams(of, n)[gram] for of in references))
            for text, references in zip(TEXTS, REFERENCES, strict=True)
            for gram, count in grams(text, n).items()
        )
        precisions.append(hits / sum(sum(grams(text, n).values()) for text in TEXTS))
    length = sum(len(text.split()) for text in TEXTS)
    closest = 7 + 5  # of the references of each, in words
    brevity = min(1.0, math.exp(1 - closest / length))
    return 100 * brevity * math.exp(sum(map(math.log, precisions)) / 4)


def test_scores_are_those_of_their_definitions(paper: Any) -> None:
    result = paper.scores(TEXTS, REFERENCES)
    assert result["bleu"] == pytest.approx(bleu())
    # Longest common subsequences of 5 of 6 words, and of 4 of 4 and 5; marks are no words.
    assert result["rouge_l"] == pytest.approx(100 * (5 / 6 + 2 * 4 / 9) / 2)
    # Denkowski and Lavie: 10PR / (R + 9P), less a half of (chunks / matches)³.
    first = 6 / 7 * (1 - (2 / 6) ** 3 / 2)
    second = 10 * 4 / 5 / (4 / 5 + 9) * (1 - (2 / 4) ** 3 / 2)
    if not result["meteor_synonyms"]:
        assert result["meteor"] == pytest.approx(100 * (first + second) / 2)
    assert paper.scores([of[0] for of in REFERENCES], REFERENCES)["bleu"] == pytest.approx(100)


def test_texts_without_a_word_score_nothing(paper: Any) -> None:
    result = paper.scores(["", ""], REFERENCES)
    assert all(result[name] == 0 for name in ("bleu", "rouge_l", "meteor", "nist", "cider"))


def test_small_facts_are_those_of_the_page() -> None:
    facts = import_module("examples.paper.facts")
    told = re.findall(r"\d+\.\d{4}", " ".join(facts.facts()))
    assert told == ["8.8304", "50.2326", "9.1229", "57.8503"]
    assert all(number in PAGE for number in told)
    assert facts.wins(facts.SCORES_AT_50_STEPS) == (48, 1, 1)
    assert facts.wins("1 2 3 4 5 1 3 2 4 6\n") == (2, 2, 1)
