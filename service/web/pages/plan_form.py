"""The form of a new plan, and its conversion to YAML.

Entries become YAML without validation, and the plan parser validates them: an invalid number is
passed on as text and refused with the name of its field. The form, the command line and the API
therefore report the same errors. Empty fields are omitted.

The form has the fields that most plans use. For other fields, users continue in YAML.

>>> form = PlanForm.of({"dataset.size": "1000", "releases.0.name": "all", "notes": ""})
>>> print(form.yaml, end="")
version: 1
dataset:
  size: 1000
releases:
- name: all
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Self, get_args

from affidavit.plan import (
    MalformedPlan,
    OptimizerName,
    Plan,
    PrivacyUnit,
    Reason,
    Scheme,
    load_yaml,
    parse_plan,
)
from affidavit.service.web.pages.text import ADJACENCIES, escaped

MAX_RELEASES = 12
MAX_FIELD_LENGTH = 10_000
SOLVE = "null"
"""The value of a field to solve for: the most steps or the largest lot that fit."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_NOT_BARE = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})

Kind = Literal["text", "number", "choice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A field of the form; ``name`` is its dotted path in the plan.

    It applies only if the field ``of`` has one of the values ``when``. ``folded`` fields are shown
    on request.
    """

    name: str
    label: str
    kind: Kind = "number"
    hint: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    of: str = ""
    when: tuple[str, ...] = ()
    folded: bool = False

    def applies(self, values: Mapping[str, str]) -> bool:
        """Return whether the field applies to a plan with these values."""
        return not self.of or values.get(self.of, "") in ("", *self.when)


@dataclass(frozen=True, slots=True)
class Section:
    """Fields under one heading."""

    title: str
    fields: tuple[Field, ...]
    about: str = ""


def _choice(name: str, label: str, words: Mapping[Any, str], **more: Any) -> Field:
    return Field(name=name, label=label, kind="choice", choices=tuple(words.items()), **more)


SCHEMES: dict[Scheme, str] = {
    "poisson": "Poisson",
    "truncated_poisson": "Poisson, truncated",
    "fixed_size": "fixed size",
    "balls_in_bins": "balls in bins",
    "random_allocation": "k of T steps",
    "shuffled": "shuffled each epoch",
    "cyclic": "fixed order",
    "cyclic_poisson": "cyclic Poisson",
    "b_min_sep": "b-min-sep",
    "full_batch": "full batch",
}
UNITS: dict[PrivacyUnit, str] = {"example": "one example", "user": "one user"}
NOISES = {"independent": "independent", "bidiagonal": "bidiagonal"}
OPTIMIZERS = {name: name for name in get_args(OptimizerName)}

LOTS = tuple(scheme for scheme in SCHEMES if scheme not in ("full_batch", "random_allocation"))
SECTIONS = (
    Section(
        "Data set",
        (
            Field(name="name", label="Plan name", kind="text", hint="Letters, digits, . _ -"),
            Field(name="dataset.name", label="Data set", kind="text", hint="As in its budget"),
            Field(name="dataset.size", label="Records N"),
            _choice("dataset.unit", "Privacy unit", UNITS),
            Field(
                name="dataset.contributions_per_user",
                label="Records per user",
                of="dataset.unit",
                when=("user",),
            ),
            _choice("adjacency", "Adjacency", ADJACENCIES),
        ),
    ),
    Section(
        "Lots and steps",
        (
            _choice("sampling.scheme", "Sampling", SCHEMES),
            Field(name="sampling.lot_size", label="Lot size B", of="sampling.scheme", when=LOTS),
            Field(
                name="sampling.max_lot_size",
                label="Largest lot",
                of="sampling.scheme",
                when=("truncated_poisson",),
            ),
            Field(
                name="sampling.groups",
                label="Groups",
                of="sampling.scheme",
                when=("cyclic_poisson",),
            ),
            Field(
                name="sampling.separation",
                label="Separation b",
                of="sampling.scheme",
                when=("b_min_sep",),
            ),
            Field(
                name="sampling.participations",
                label="Steps of a record k",
                of="sampling.scheme",
                when=("random_allocation",),
            ),
            Field(name="steps", label="Steps T", hint="null: the most that fit"),
            Field(name="epochs", label="Epochs", hint="Instead of steps", folded=True),
        ),
    ),
    Section(
        "Noise and optimizer",
        (
            _choice("optimizer.name", "Optimizer", OPTIMIZERS),
            _choice("noise.kind", "Noise over steps", NOISES, folded=True),
            Field(
                name="noise.lambda",
                label="λ",
                hint="Empty: the best, computed",
                of="noise.kind",
                when=("bidiagonal",),
                folded=True,
            ),
        ),
    ),
    Section(
        "Target",
        (
            Field(name="target.epsilon", label="ε", hint="In nats; empty: computed"),
            Field(name="target.delta", label="δ", hint="Below 1/N; empty: computed"),
        ),
    ),
)
RELEASE = (
    Field(name="name", label="Release", kind="text"),
    Field(name="count", label="Blocks"),
    Field(name="clip_norm", label="Clip norm C"),
    Field(name="noise_multiplier", label="Noise multiplier σ", hint="Empty: computed"),
)
_LABELS = {
    **{field.name: field.label for section in SECTIONS for field in section.fields},
    **{f"releases.{field.name}": field.label for field in RELEASE},
    "name": "Plan name",
    "dataset.name": "Data set",
    "target.epsilon": "Target ε",
    "target.delta": "Target δ",
}
START = {
    "dataset.unit": "example",
    "adjacency": "add_remove",
    "sampling.scheme": "poisson",
    "noise.kind": "independent",
    "optimizer.name": "dp_sgd",
    "releases.0.name": "all",
    "releases.0.clip_norm": "1",
}
"""The initial values of the form."""
EXAMPLES: dict[str, tuple[str, dict[str, str]]] = {
    "lora": (
        "Fine-tune an LLM with LoRA",
        {
            **{"name": "e2e-lora-dp-adam", "dataset.name": "e2e-nlg", "dataset.size": "42061"},
            **{"sampling.lot_size": "512", "steps": "150", "optimizer.name": "dp_adam"},
            **{"releases.0.name": "adapters", "releases.0.clip_norm": "0.1"},
            **{"target.epsilon": "3", "target.delta": "1e-5"},
        },
    ),
    "scratch": (
        "CIFAR-10 from scratch",
        {
            **{"name": "cifar10-dp-sgd", "dataset.name": "cifar10", "dataset.size": "50000"},
            **{"sampling.lot_size": "4096", "steps": "875"},
            **{"target.epsilon": "8", "target.delta": "1e-5"},
        },
    ),
    "federated": (
        "Federated rounds",
        {
            **{"name": "keyboard-rounds", "dataset.name": "keyboard", "dataset.size": "1000000"},
            **{"dataset.unit": "user", "dataset.contributions_per_user": "1"},
            **{"sampling.lot_size": "10000", "steps": "1000"},
            **{"releases.0.name": "update", "releases.0.clip_norm": "0.5"},
            **{"target.epsilon": "4", "target.delta": "1e-7"},
        },
    ),
}
"""Example plans: the label, and the values that differ from ``START``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanForm:
    """The entered values and their YAML; ``releases`` is the number of rows."""

    values: Mapping[str, str]
    releases: int
    yaml: str

    @classmethod
    def of(cls, fields: Mapping[str, str], *, more_releases: int = 0) -> Self:
        """Return the form with those ``fields`` that it has."""
        typed = {
            name: fields[name][:MAX_FIELD_LENGTH].strip() for name in _names() if name in fields
        }
        values, rows = _without_gaps(typed)
        visible_rows = min(MAX_RELEASES, max(1, rows) + more_releases)
        return cls(values=values, releases=visible_rows, yaml=_yaml(values, rows))

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Self | None:
        """Return the form of a plan, or None if the form lacks one of its fields."""
        values = dict(_leaves(document))
        defaults = {"version": "1", "allocation": "uniform", "clipping": "per_block"}
        defaults |= {"trajectory": "all_iterates", "noise.kind": "independent"}
        names = frozenset(_names())
        if any(defaults.get(name) != value for name, value in values.items() if name not in names):
            return None
        return cls.of({name: value for name, value in values.items() if name in names})

    @property
    def document(self) -> dict[str, Any]:
        """The entries as a plan document; raises ``MalformedPlan``."""
        entered = dict(load_yaml(self.yaml.encode("utf-8", "replace")).data)
        del entered["version"]
        return entered

    def value(self, name: str) -> str:
        """Return the value of a field."""
        return self.values.get(name, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedPlan:
    """A parsed plan, or the reasons why it is invalid.

    ``at_field`` has the reasons about fields of the form, by name, and ``elsewhere`` the others.
    """

    plan: Plan | None
    reasons: tuple[Reason, ...] = ()
    at_field: Mapping[str, tuple[Reason, ...]] = field(default_factory=dict)
    elsewhere: tuple[Reason, ...] = ()


def fields() -> Iterator[Field]:
    """Return all fields except those of the releases."""
    return (field for section in SECTIONS for field in section.fields)


def release_names(rows: int) -> Iterator[str]:
    """Return the names of the fields of ``rows`` releases."""
    return (f"releases.{row}.{field.name}" for row in range(rows) for field in RELEASE)


def label_of(pointer: str) -> str:
    """Return the label of a field from its JSON pointer.

    >>> label_of("/releases/*/noise_multiplier"), label_of("/sampling"), label_of("/phases/1/steps")
    ('Noise multiplier σ', 'Sampling', 'Steps T, phase 2')
    """
    tokens = [token for token in pointer.split("/") if token]
    numbers = [
        f", {before.removesuffix('s')} {int(token) + 1}"
        for before, token in pairwise(tokens)
        if token.isdecimal()
    ]
    path = [token for token in tokens if token != "*" and not token.isdecimal()]
    if path[:1] == ["phases"] and len(path) > 1:
        path = path[1:]
    label = _LABELS.get(".".join(path)) or " ".join(path).replace("_", " ").capitalize()
    return label + "".join(numbers)


def _names() -> Iterator[str]:
    yield from (field.name for field in fields())
    yield from release_names(MAX_RELEASES)


def parse(yaml: str) -> ParsedPlan:
    """Parse ``yaml`` as a plan, with reasons by field."""
    try:
        return ParsedPlan(plan=parse_plan(yaml.encode("utf-8", "replace"), "yaml"))
    except MalformedPlan as error:
        return refused(error.reasons)


def refused(reasons: Sequence[Reason]) -> ParsedPlan:
    """Return the reasons of an invalid plan by field."""
    names = frozenset(_names())
    at_field: dict[str, tuple[Reason, ...]] = {}
    elsewhere = []
    for reason in reasons:
        name = reason.pointer.removeprefix("/").replace("/", ".")
        if reason.code == "missing_field" and name not in names:  # such as a missing target
            name = next((field.name for field in fields() if field.name.startswith(f"{name}.")), "")
        if name in names:
            at_field[name] = (*at_field.get(name, ()), reason)
        else:
            elsewhere.append(reason)
    return ParsedPlan(
        plan=None, reasons=tuple(reasons), at_field=at_field, elsewhere=tuple(elsewhere)
    )


# ---- YAML ---------------------------------------------------------------------------


def yaml_of(document: Mapping[str, Any]) -> str:
    """Return a plan or policy as YAML for people to edit."""
    first = [name for name in _ORDER if name in document]
    empty = [name for name in _OMITTED_IF_EMPTY if not document.get(name)]
    rest = [name for name in document if name not in (*_ORDER, *empty)]
    return "".join(_block({name: document[name] for name in (*first, *rest)}, 0))


_ORDER = (
    *("version", "name", "notes", "dataset", "adjacency", "sampling", "steps", "epochs"),
    *("releases", "clipping", "noise", "participation", "phases", "allocation", "optimizer"),
    "target",
)


_OMITTED_IF_EMPTY = ("extra", "accountants", "caps")
"""Fields of plans and policies that are omitted if they are empty."""


@dataclass(frozen=True, slots=True)
class _Token:
    """A number as it was entered."""

    text: str


def _yaml(values: Mapping[str, str], rows: int) -> str:
    document: dict[str, Any] = {"version": 1}
    for entry in fields():
        *parents, last = entry.name.split(".")
        if (value := values.get(entry.name)) and entry.applies(values):
            part = document
            for parent in parents:
                part = part.setdefault(parent, {})
            part[last] = _typed(value, entry.kind)
    if document.get("noise") == {"kind": "independent"}:
        del document["noise"]
    releases = []
    for row in range(rows):
        release = {
            entry.name: _typed(value, entry.kind)
            for entry in RELEASE
            if (value := values.get(f"releases.{row}.{entry.name}"))
        }
        if release:
            releases.append(release)
    if releases:
        document["releases"] = releases
    return yaml_of(document)


def _leaves(part: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the scalars of a document by dotted path, as a user would enter them."""
    members = part.items() if isinstance(part, Mapping) else enumerate(part)
    for name, value in members:
        at = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping | list):
            yield from _leaves(value, at)
        elif value is None:
            yield at, SOLVE
        else:
            yield at, value if isinstance(value, str) else json.dumps(value)


def _typed(value: str, kind: Kind) -> str | _Token:
    plain = kind == "number" and (_NUMBER.fullmatch(value) or value == SOLVE)
    return _Token(value) if plain else value


def _without_gaps(values: Mapping[str, str]) -> tuple[dict[str, str], int]:
    """Return the values without empty rows, and the number of rows."""
    dense = {name: value for name, value in values.items() if not name.startswith("releases.")}
    rows = 0
    for row in range(MAX_RELEASES):
        release = {field.name: values.get(f"releases.{row}.{field.name}", "") for field in RELEASE}
        if any(release.values()):
            dense |= {f"releases.{rows}.{name}": value for name, value in release.items()}
            rows += 1
    return dense, rows


def _block(document: Mapping[str, Any], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield f"{pad}{_scalar(name)}:\n"
            yield from _block(value, depth + 1)
        elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            yield f"{pad}{_scalar(name)}:\n"
            for member in value:
                lines = "".join(_block(member, depth + 1))
                yield f"{pad}- {lines[2 * (depth + 1) :]}" if lines else f"{pad}- {{}}\n"
        else:
            yield f"{pad}{_scalar(name)}: {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    """Return a value in one line: a bare word, or else JSON, which is valid YAML."""
    if isinstance(value, _Token):
        return value.text
    if isinstance(value, str) and _BARE.fullmatch(value) and value.lower() not in _NOT_BARE:
        return value
    # YAML has escapes for all characters; JSON has only surrogate pairs.
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else escaped(char) for char in text)
