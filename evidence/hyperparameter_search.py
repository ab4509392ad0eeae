"""The opening of a search, which determines the number of trials and their settings in advance.

A plan with ``repeat_and_select`` is certified for a random number K of runs of which only the best
is released. K, the settings of every trial and the score follow from an opening that is written
before the first trial begins. Its digest is published then (``SearchOpening.digest``) and is part
of the record of the released run. The opening stays secret: K reveals more than the certificate
covers.

>>> opening = SearchOpening(certificate="sha256:" + 64 * "0", at="2026-01-01T00:00:00Z",
...     choices={"learning_rate": (0.1, 0.3)}, score="digits:part=test", draw=64 * "0")
>>> opening.trial(0), opening.trial(1), SearchOpening.read(opening.as_document()) == opening
({'learning_rate': 0.3}, {'learning_rate': 0.1}, True)

Reference: Papernot and Steinke, arXiv:2110.03620.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hmac import digest as hmac_digest
from typing import Any, Self

from affidavit.mechanisms import draw_repetitions
from affidavit.plan import Plan, Selection, digest_of
from affidavit.trust import format_instant

CHOICES: Mapping[str, tuple[type, ...]] = {
    "model": (str,),
    "learning_rate": (int, float),
    "schedule": (str,),
    "warmup": (int,),
}
"""The settings in which trials may differ, and the types of their values."""
LIMITS = {"learning_rate": (1e-12, 1e6), "warmup": (0, 2**31)}
MAX_CHOICES = 1000
_TEXT = re.compile(r"[A-Za-z0-9][!-~]{0,499}")
_DRAW = re.compile(r"[0-9a-f]{64}")

Value = str | float


class BadSearch(ValueError):
    """The choices or the opening are malformed; the message says how to fix them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOpening:
    """The opening of a search.

    ``draw`` is 32 random bytes; ``score`` names public data, whose mean loss ranks the trials.
    ``at`` is when the search began: the records of all trials have this time, because their own
    would reveal how many trials came before.
    """

    certificate: str
    at: str
    choices: Mapping[str, tuple[Value, ...]]
    score: str
    draw: str

    @classmethod
    def create(cls, certificate: str, choices: Any, score: str) -> Self:
        """Return a new opening at the current time; raises ``BadSearch``."""
        at, draw = format_instant(datetime.now(UTC)), secrets.token_hex(32)
        return cls.read(
            {"certificate": certificate, "at": at, "choices": choices, "score": score, "draw": draw}
        )

    @classmethod
    def read(cls, document: Any) -> Self:
        """Parse an opening; raises ``BadSearch``."""
        fields = set(cls.__dataclass_fields__)
        if not isinstance(document, Mapping) or set(document) != fields:
            raise BadSearch(f"an opening has the fields {', '.join(sorted(fields))}.")
        texts = {name: document[name] for name in fields - {"choices"}}
        if not all(isinstance(value, str) for value in texts.values()):
            raise BadSearch("the fields of an opening but choices are texts.")
        if _DRAW.fullmatch(texts["draw"]) is None or _TEXT.fullmatch(texts["score"]) is None:
            raise BadSearch("draw is 64 hexadecimal digits, and score the name of public data.")
        return cls(choices=read_choices(document["choices"]), **texts)

    def as_document(self) -> dict[str, Any]:
        """Return the opening as JSON data."""
        choices = {name: list(values) for name, values in self.choices.items()}
        return {**asdict(self), "choices": choices}

    @property
    def digest(self) -> str:
        """The digest to publish before the first trial; it reveals nothing about the draw."""
        return digest_of(self.as_document())

    def trials(self, selection: Selection) -> int:
        """Return K, the number of trials; a Poisson number may be 0."""
        return draw_repetitions(selection, self._uniform("repetitions"))

    def trial(self, number: int) -> dict[str, Value]:
        """Return the settings of a trial, each drawn uniformly and independently."""
        return {
            name: values[self._uniform(f"{number}/{name}") % len(values)]
            for name, values in self.choices.items()
        }

    def _uniform(self, purpose: str) -> int:
        """Return a uniform number of 512 bits for one purpose."""
        return int.from_bytes(hmac_digest(bytes.fromhex(self.draw), purpose.encode(), "sha512"))


def read_choices(document: Any) -> dict[str, tuple[Value, ...]]:
    """Parse the values to try, such as ``{"learning_rate": [0.1, 0.3]}``; raises ``BadSearch``."""
    if not isinstance(document, Mapping) or not set(document) <= CHOICES.keys():
        raise BadSearch(f"give a list of values for each of {', '.join(CHOICES)} that varies.")
    for name, values in document.items():
        if not isinstance(values, list | tuple) or not 0 < len(values) <= MAX_CHOICES:
            raise BadSearch(f"{name}: give a list of 1 to {MAX_CHOICES} values.")
        for value in values:
            if type(value) not in CHOICES[name] or not _is_usable(name, value):
                raise BadSearch(f"{name}: {value!r} is no value of it.")
    return {name: tuple(values) for name, values in sorted(document.items())}


def _is_usable(name: str, value: Any) -> bool:
    if name == "model":
        return _TEXT.fullmatch(value) is not None
    if name == "schedule":
        return value in ("constant", "linear", "cosine")
    least, most = LIMITS[name]
    return bool(least <= value <= most)


def selection_of(plan: Plan) -> Selection | None:
    """Return how the plan repeats and selects, or None."""
    return next((event for event in plan.extra if isinstance(event, Selection)), None)
