"""Diagnostics: why a plan is refused, and how to correct it.

There are two kinds of refusal, because their remedies differ:

::

    PlanError
    ├── MalformedPlan    the document is not a plan (HTTP 4xx, exit code 2)
    └── RefusedPlan      a plan that no theorem or accountant covers, or that is known
                         to be unsound (a signed refusal, exit code 1)

A ``code`` never changes its meaning once published. ``explain`` looks it up in ``codes.json``,
which ``make docs`` generates from the source. ``DocumentSchema`` turns pydantic's errors about a
document into reasons.

>>> explain("yaml_alias")[0].remedy
'Write the value out where it is used.'
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from affidavit.plan.limits import SMALLEST_POSITIVE

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One diagnostic: a stable code, a place, what is wrong, and how to correct it.

    ``pointer`` is an RFC 6901 JSON pointer into the plan, by default to the whole plan. ``line``
    and ``column`` count from 1 and are set if the plan was read from text.
    """

    code: str
    pointer: str = ""
    message: str
    remedy: str
    line: int | None = None
    column: int | None = None

    def as_dict(self) -> dict[str, str | int]:
        """Return the reason as JSON data."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        where = f" at {self.pointer}" if self.pointer else ""
        return f"{self.code}{where}: {self.message} {self.remedy}".rstrip()


class CodedError(Exception):
    """The base of errors with a stable ``code`` and a ``remedy``."""

    def __init__(self, code: str, message: str, remedy: str) -> None:
        super().__init__(f"{message} {remedy}".rstrip())
        self.code = code
        self.message = message
        self.remedy = remedy


class PlanError(Exception):
    """The base of both refusals, with at least one reason."""

    def __init__(self, *reasons: Reason) -> None:
        if not reasons:
            raise ValueError("a refusal needs a reason")
        super().__init__("; ".join(str(reason) for reason in reasons))
        self.reasons = reasons

    @classmethod
    def with_reason(cls, *, code: str, pointer: str = "", message: str, remedy: str) -> Self:
        """Return the error with one reason."""
        return cls(Reason(code=code, pointer=pointer, message=message, remedy=remedy))


class MalformedPlan(PlanError):
    """The document cannot be read as a plan of schema version 1."""


class RefusedPlan(PlanError):
    """The plan is well-formed, but no privacy guarantee can be certified for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeMeaning:
    """The meaning of a code in one room; ``…`` stands for what a message fills in."""

    part: str
    message: str
    remedy: str


@cache
def code_meanings() -> dict[str, tuple[CodeMeaning, ...]]:
    """Return every code with its meaning in each room that uses it."""
    text = files("affidavit.plan").joinpath("codes.json").read_text(encoding="utf-8")
    return {
        code: tuple(CodeMeaning(**entry) for entry in entries)
        for code, entries in json.loads(text).items()
    }


def explain(code: str) -> tuple[CodeMeaning, ...]:
    """Return the meanings of ``code``; empty for an unknown code."""
    return code_meanings().get(code, ())


def pointer_to(*tokens: str | int) -> str:
    """Return an RFC 6901 pointer.

    >>> pointer_to("releases", 0, "a/b")
    '/releases/0/a~1b'
    """
    return "".join("/" + str(token).replace("~", "~0").replace("/", "~1") for token in tokens)


def conflict(pointer: str, message: str, remedy: str) -> Reason:
    """Return the reason for two fields that contradict each other."""
    return Reason(code="conflict", pointer=pointer, message=message, remedy=remedy)


def missing_field(pointer: str, message: str, remedy: str) -> Reason:
    """Return the reason for a missing field that other fields require."""
    return Reason(code="missing_field", pointer=pointer, message=message, remedy=remedy)


def invalid_value(pointer: str, message: str, remedy: str) -> Reason:
    """Return the reason for a value that is never valid in its field."""
    return Reason(code="invalid_value", pointer=pointer, message=message, remedy=remedy)


FIELD_SYNONYMS = {
    "lr": "learning_rate",
    "eps": "epsilon",
    "batch_size": "lot_size",
    "expected_batch_size": "lot_size",
    "sample_rate": "probability",
    "sampling_probability": "probability",
    "q": "probability",
    "sigma": "noise_multiplier",
    "noise_scale": "noise_multiplier",
    "max_grad_norm": "clip_norm",
    "l2_clip_norm": "clip_norm",
    "l2_norm_clip": "clip_norm",
    "iterations": "steps",
    "num_steps": "steps",
    "num_epochs": "epochs",
    "neighboring_relation": "adjacency",
    "add_or_remove_one": "add_remove",
    "replace_special": "zero_out",
    "add_or_remove": "add_remove",
    "replace": "replace_one",
    "replacement": "replace_one",
    "substitute": "replace_one",
    "substitution": "replace_one",
    "without_replacement": "fixed_size",
    "uniform": "fixed_size",
    "shuffle": "shuffled",
    "full": "full_batch",
    "adam": "dp_adam",
    "sgd": "dp_sgd",
    "muon": "dp_muon",
}
"""The field or value of a plan by its name in other libraries."""
EXAMPLES: Mapping[str | int, str] = {
    "version": "version: 1",
    "dataset": "dataset: {name: mnist, size: 60000}",
    "adjacency": "adjacency: add_remove, or replace_one, or zero_out",
    "sampling": "sampling: {scheme: poisson, lot_size: 600}",
    "releases": "releases: [{name: all, clip_norm: 1}]",
    "target": "target: {epsilon: 2, delta: 1e-5}",
}
"""How the parts of a plan are written."""
MAX_REASONS = 20
MAX_SHOWN_CHARACTERS = 80
"""Characters of a name or value in a message."""


@dataclass(frozen=True, slots=True)
class DocumentSchema:
    """A kind of document: its name, its fields, and the page that lists them.

    ``field_paths`` returns the path of each field in the document, by the name of the field.
    """

    name: str
    field_paths: Callable[[], Mapping[str, str]]
    page: str

    def reasons(self, error: ValidationError, data: Any) -> tuple[Reason, ...]:
        """Return reasons for the first errors of pydantic about ``data``."""
        errors = error.errors(include_url=False)
        causes = (details for details in errors if not _is_consequence(details, errors))
        return tuple(self.reason(details, data) for details in islice(causes, MAX_REASONS))

    def reason(self, details: ErrorDetails, data: Any) -> Reason:
        """Return the reason for one error of pydantic about ``data``."""
        details = _tag_error_as_field_error(details)
        path = _document_path(data, details["loc"])
        field = _field_name(path) if path else self.name.replace("a ", "the ", 1)
        kind = details["type"]
        if kind == "extra_forbidden":
            return Reason(
                code="unknown_field",
                pointer=pointer_to(*path),
                message=f"{field} is not a field of {self.name}.",
                remedy=self._suggest(path, field),
            )
        example = EXAMPLES.get(path[-1], "") if len(path) == 1 else ""
        if kind == "missing":
            return Reason(
                code="missing_field",
                pointer=pointer_to(*path),
                message=f"{field} is missing.",
                remedy=f"Add {example or 'it'}; {self._place(path)}",
            )
        if kind in ("literal_error", "enum"):
            return _not_allowed(path, field, details)
        wrong_type = kind.endswith("_type") or kind.endswith("_parsing")
        return Reason(
            code="wrong_type" if wrong_type else "invalid_value",
            pointer=pointer_to(*path),
            message=f"{field}{_rule(details)}, not {_format_value(details['input'])}.",
            remedy=_as_number(details)
            or (f"Write it like {example}." if wrong_type and example else "")
            or f"Correct the value; {self._place(path)}",
        )

    def _place(self, path: tuple[str | int, ...]) -> str:
        """Return where the values of a field are listed."""
        field = ".".join(part for part in path if isinstance(part, str)).removeprefix("phases.")
        if self.page.startswith("`") and field.rpartition(".")[2] in self.field_paths():
            return f"{self.page[:-1]} {field}` shows what it may be."
        return f"{self.page} lists the values of each field."

    def _suggest(self, path: tuple[str | int, ...], field: str) -> str:
        paths = self.field_paths()
        synonym = FIELD_SYNONYMS.get(field.lower(), "")
        if field in paths and synonym not in paths:
            where = f"as {paths[field]}"
            if paths[field] == field:
                owners = [part for part in path[:-1] if isinstance(part, str)]
                where = f"beside {owners[-1]}, not in it" if owners else where
            return f"Write it {where}; {self.page} lists the fields."
        near = [synonym] if synonym in paths else difflib.get_close_matches(field, paths, n=1)
        if near:
            owners = [part for part in path[:-1] if isinstance(part, str)]
            is_sibling = ".".join([*owners, near[0]]) == paths[near[0]]
            return f"Did you mean {near[0] if is_sibling else paths[near[0]]}?"
        return f"Remove it; {self.page} lists the fields."


RULES = {
    "bool": "true or false",
    "dataclass": "a mapping of fields",
    "datetime": "a date and time, such as 2026-01-31T12:00:00Z",
    "decimal": "a positive decimal, like 7.9852",
    "dict": "a mapping of fields",
    "finite": "a finite number",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "a mapping of fields",
    "string": "a text",
    "tuple": "a list",
}
"""The rule for a field, by the first word of pydantic's error type."""
FORMS = {
    r"^[A-Za-z0-9._-]{1,64}$": "1 to 64 letters, digits, dots, hyphens or underscores",
    r"^[0-9a-f]{64}$": "64 digits of 0-9 and a-f",
    r"^sha256:[0-9a-f]{64}$": "sha256: and 64 digits of 0-9 and a-f",
}
"""The rule for a text, by its pattern."""
NUMBERS = {"int": r"-?\d{1,16}", "float": r"-?\d{1,16}(\.\d{1,16})?([eE][+-]?\d{1,3})?"}
"""How numbers are written, by the first word of pydantic's error type."""
BOUNDS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}


def _as_number(details: ErrorDetails) -> str:
    """Return how to write a number that is given as a text, such as 60_000, or ""."""
    value, kind = details["input"], details["type"].partition("_")[0]
    digits = re.sub(r"(?<=\d)[_, ](?=\d)", "", value) if isinstance(value, str) else ""
    if kind not in NUMBERS or re.fullmatch(NUMBERS[kind], digits) is None:
        return ""
    return f"Write {digits}, without quotes or separators."


def _tag_error_as_field_error(details: ErrorDetails) -> ErrorDetails:
    """Return an error about the tag of a union as an error about the field with the tag."""
    context = details.get("ctx", {})
    field = context.get("discriminator", "").strip("'")
    if details["type"] == "union_tag_not_found":
        return {**details, "type": "missing", "loc": (*details["loc"], field)}
    if details["type"] == "union_tag_invalid" and isinstance(details["input"], dict):
        return {
            **details,
            "type": "literal_error",
            "loc": (*details["loc"], field),
            "input": details["input"][field],
            "ctx": {"expected": context["expected_tags"]},
        }
    return details


def _field_name(path: tuple[str | int, ...]) -> str:
    """Return the name of the last token of ``path``: a field, or an item of one."""
    if isinstance(path[-1], int) and len(path) > 1:
        return f"{str(path[-2])[:MAX_SHOWN_CHARACTERS]}[{path[-1]}]"
    return str(path[-1])[:MAX_SHOWN_CHARACTERS]


def _rule(details: ErrorDetails) -> str:
    """Return the rule that the field violates, in the vocabulary of a plan."""
    kind, context = details["type"], details.get("ctx", {})
    if context.get("ge") == SMALLEST_POSITIVE:
        return " must be above 0"
    for bound, words in BOUNDS.items():
        if bound in context:
            return f" must be {words} {str(context[bound]).removesuffix('.0')}"
    if "pattern" in context:
        form = FORMS.get(context["pattern"])
        return f" must be {form}" if form else f" must match the pattern {context['pattern']}"
    for limit, words in (("min_length", "at least"), ("max_length", "at most")):
        if limit in context:
            return f" must have {words} {_count_parts(kind, context[limit])}"
    rule = RULES.get(kind.partition("_")[0])
    message = details["msg"]
    return f": {message[0].lower()}{message[1:]}" if rule is None else f" must be {rule}"


def _count_parts(kind: str, count: int) -> str:
    part = "character" if kind.startswith("string") else "item"
    return f"{count} {part}{'' if count == 1 else 's'}"


def _format_value(value: Any) -> str:
    """Return a refused value as in a document, truncated if it is long."""
    if isinstance(value, dict | list | tuple):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def _not_allowed(path: tuple[str | int, ...], field: str, details: ErrorDetails) -> Reason:
    """Return the reason for a value that is none of the choices."""
    choices = re.findall(r"'([^']+)'", details.get("ctx", {}).get("expected", ""))
    value = details["input"]
    text = value.lower() if isinstance(value, str) else ""
    synonym = FIELD_SYNONYMS.get(text, "")
    near = [synonym] if synonym in choices else difflib.get_close_matches(text, choices, n=1)
    remedy = f"Use one of {', '.join(choices)}." if len(choices) > 1 else f"Write {choices[0]}."
    return Reason(
        code="invalid_value",
        pointer=pointer_to(*path),
        message=f"{field} is {_format_value(value)}, which is not an allowed value.",
        remedy=f"Did you mean {near[0]}? {remedy}" if near else remedy,
    )


def _is_consequence(details: ErrorDetails, errors: list[ErrorDetails]) -> bool:
    """Whether a list is too short only because one of its items was refused."""
    loc = details["loc"]
    return details["type"] == "too_short" and any(
        len(other["loc"]) > len(loc) and other["loc"][: len(loc)] == loc for other in errors
    )


def _document_path(data: Any, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return pydantic's location as a path in the document.

    The location also names the variant of a union, and the phase that a plan of one phase omits.
    Neither is in the document, so tokens that do not exist are dropped, except for the last one
    (a missing field).
    """
    if loc[:2] == ("phases", 0) and isinstance(data, dict) and "phases" not in data:
        loc = loc[2:]
    path: list[str | int] = []
    node = data
    for position, token in enumerate(loc):
        exists = (isinstance(node, dict) and token in node) or (
            isinstance(node, list) and isinstance(token, int) and token < len(node)
        )
        if exists:
            node = node[token]
            path.append(token)
        elif position == len(loc) - 1 and isinstance(node, dict) and token != "[key]":
            path.append(token)
    return tuple(path)
