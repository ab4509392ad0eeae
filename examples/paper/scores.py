"""Scores of generated texts by the libraries that published them.

BLEU by sacrebleu with effective order and ROUGE-L by rouge_score with stemming, the best of the
references, as in the paper; METEOR and NIST by NLTK, CIDEr by pycocoevalcap, in words of
lower-case text between spaces and punctuation. METEOR matches words and stems, and synonyms where
WordNet's data is installed (``nltk.download("wordnet")``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from nltk.corpus import wordnet
from nltk.translate.meteor_score import meteor_score
from nltk.translate.nist_score import corpus_nist
from pycocoevalcap.cider.cider import Cider
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU


class _NoSynonyms:
    """WordNet without its data."""

    def synsets(self, word: str) -> list[Any]:
        """None of ``word``."""
        del word
        return []


def scores(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float | bool]:
    """Of texts with at least one reference each: BLEU, ROUGE-L and METEOR up to 100."""
    most = max(map(len, references))
    columns = [[of[i] if i < len(of) else None for of in references] for i in range(most)]
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    words = [_words(text) for text in texts]
    of_references = [[_words(text) for text in of] for of in references]
    synonyms = _has_wordnet()
    meteor = [
        meteor_score(of, text, wordnet=wordnet if synonyms else _NoSynonyms())
        for of, text in zip(of_references, words, strict=True)
    ]
    cider, _ = Cider().compute_score(
        {i: [" ".join(text) for text in of] for i, of in enumerate(of_references)},
        {i: [" ".join(text)] for i, text in enumerate(words)},
    )
    return {
        "bleu": BLEU(effective_order=True).corpus_score(texts, columns).score,
        "rouge_l": 100
        * fmean(
            scorer.score_multi(of, text)["rougeL"].fmeasure
            for of, text in zip(references, texts, strict=True)
        ),
        "meteor": 100 * fmean(meteor),
        "meteor_synonyms": synonyms,
        "nist": corpus_nist(of_references, words) if any(map(len, words)) else 0.0,
        "cider": float(cider),
    }


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _has_wordnet() -> bool:
    try:
        wordnet.ensure_loaded()
    except LookupError:
        return False
    return True
