"""Every code that a person or a program can meet, found in the source.

A code is the argument ``code`` of a call, of whatever class or function has a parameter of that
name: reasons, problems, verification errors, stops of the guard, findings. Its message
and remedy are those of the same call, with what is filled in shown as ``…``.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEXTS = Path(__file__).with_name("code_texts.toml")
ROOMS = (
    "plan",
    "mechanisms",
    "accountants",
    "checker",
    "assessment",
    "trust",
    "certificate",
    "evidence",
    "service",
    "gate",
    "guard",
    "replay",
    "trainer",
    "worker",
    "client",
    "importers",
    "library",
)
CODE = re.compile(
    r"[a-z][a-z0-9]*(_[a-z0-9]+)+|refused|unproved|conflict|unsigned"
    "|revoked|superseded|diverged|blocks|unreadable|unsupported|accumulation|expired"
)
MESSAGES = ("message", "detail", "text", "what", "wrong", "title")
REMEDIES = ("remedy", "to_do", "do")
SHOWN = 240
KINDS = (ast.Call, ast.FunctionDef, ast.ClassDef)
HEAD = """# Codes

Generated from the source by `make docs`; change the source, not this file.

A published code keeps its meaning permanently; a new meaning is a new code. Messages may
change. `…` stands for a value. A code is listed once, under the first part that gives it, with its
first message, and a long one is cut: `affidavit explain CODE` shows every message in full, and what
to do. Codes that another page describes are there alone: [known mistakes](mistakes.md),
[mechanisms](mechanisms.md), [the gate](../how-to/gate.md), [the guard](../how-to/guard.md),
[replay](../how-to/replay.md), [workers](../how-to/run-a-worker.md), [probes](../how-to/operate.md),
[the status list](../how-to/approvals-and-revocation.md) and [the log](log.md).

| part | where you see its codes |
|---|---|
| plan, mechanisms, accountants, assessment | `reasons[].code` of a result, by command or HTTP |
| checker | why a bound has no proof |
| trust, certificate | `reasons[].code`, and the code of the step at which `verify` stops |
| evidence | findings of `conformance`, of `runs verify` and of `verify-model` |
| service | `code` of a problem document |
| gate | findings of `check`, refusals of commands |
| guard | stops of the guard |
| replay | findings of `replay`, and why a loop was not replayed |
| trainer, worker | why a run was not begun, or ended |

"""
"""How the page begins."""
DESCRIBED = {
    "assessment": ("mistakes.md",),
    "importers": ("../how-to/gate.md",),
    "mechanisms": ("mechanisms.md",),
    "certificate": ("../how-to/approvals-and-revocation.md",),
    "guard": ("../how-to/guard.md",),
    "replay": ("../how-to/replay.md",),
    "service": ("log.md", "../how-to/operate.md", "../how-to/run-a-worker.md"),
}
"""Pages that describe codes of a part; the head of the page links them."""
ENTRY = r"(?m)^(### {0}$|\|(?! \d).*`{0}`.*\||\* .*\(`{0}`\))"
"""A heading, a row of a table or an item about a code; rows of numbered steps only list codes."""
SHORT, BEGINNING = 64, 48
"""Characters of a message that the page shows whole, and of the beginning of a longer one."""
CLAUSES = re.compile(r".{20,}(?=[,;:.] | \()")
"""The whole clauses of a text that is cut."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The parameters of a class or function that takes a code, without ``self``."""

    parameters: tuple[str, ...]

    def arguments(self, call: ast.Call) -> dict[str, ast.expr]:
        named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        return {**dict(zip(self.parameters, call.args, strict=False)), **named}


@dataclass(frozen=True, kw_only=True)
class Use:
    """One place where a code is given out."""

    code: str
    part: str
    message: str
    remedy: str
    named: bool = False
    """Whether the message was written above, under a name."""


def data() -> str:
    """Every code with its message and remedy in each part, as ``affidavit explain`` reads them."""
    entries: dict[str, list[dict[str, str]]] = {}
    for room in ROOMS:
        for code, use in sorted(_stored(room).items()):
            entry = {"part": use.part, "message": use.message, "remedy": use.remedy}
            entries.setdefault(code, []).append(entry)
    return json.dumps(entries, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def _stored(room: str) -> dict[str, Use]:
    stored: dict[str, Use] = {}
    for use in sorted(uses(room), key=lambda use: (not use.message, use.named)):
        stored.setdefault(use.code, use)
    for code, (message, remedy) in _texts().get(room, {}).items():
        if says_something(stored[code].message):
            raise ValueError(f"{code} of {room} has a message in the source: {TEXTS.name}")
        stored[code] = replace(stored[code], message=message, remedy=remedy)
    for item in _texts()["remedies"]:
        for code in item["codes"] if item["part"] == room else ():
            if code not in stored or stored[code].remedy:
                raise ValueError(f"{code} of {room} is gone, or has a remedy: {TEXTS.name}")
            stored[code] = replace(stored[code], remedy=item["text"])
    return stored


def says_something(message: str) -> bool:
    """Whether a message has words besides what is filled in."""
    return re.search(r"\w", message) is not None


@cache
def _texts() -> dict[str, Any]:
    """The texts of codes whose messages are put together, by room, and shared remedies."""
    return tomllib.loads(TEXTS.read_text(encoding="utf-8"))


def page() -> str:
    """A list for each part of the codes that no part above it and no other page describes."""
    told: set[str] = set()
    sections = []
    for room in ROOMS:
        stored = _stored(room)
        new = [code for code in sorted(stored) if code not in told and not _elsewhere(code, room)]
        told |= stored.keys()
        if new:
            lines = [f"- `{code}`: {_shown(stored[code].message)}\n" for code in new]
            sections.append(f"## {room}\n\n{''.join(lines)}")
    return HEAD + "\n".join(sections)


def _elsewhere(code: str, room: str) -> bool:
    """Whether another page has an entry of its own for a code."""
    pages = (ROOT / "docs/reference" / path for path in DESCRIBED.get(room, ()))
    return any(re.search(ENTRY.format(code), _text_of(page)) for page in pages)


@cache
def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def uses(room: str) -> tuple[Use, ...]:
    """Every use of a code in a room, in the order of its files."""
    return tuple(_uses(room))


def _uses(room: str) -> Iterator[Use]:
    shared = _shared()
    for nodes in _files(room):
        signatures = {**shared, **dict(_signatures(nodes))}
        for node in nodes:
            if isinstance(node, ast.Call):
                yield from _use(node, signatures, room)
            elif isinstance(node, ast.ClassDef):
                yield from _class(node, room)
            else:
                yield from _mistake(node, room)
    for path in sorted((ROOT / room).rglob("*.toml")):
        yield from _in_table(tomllib.loads(path.read_text(encoding="utf-8")), room)


@cache
def _files(room: str) -> tuple[list[ast.AST], ...]:
    """Of every file its calls, functions and classes."""
    files = sorted((ROOT / room).rglob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    found = tuple([item for item in ast.walk(tree) if isinstance(item, KINDS)] for tree in trees)
    for function in (item for items in found for item in items):
        if isinstance(function, ast.FunctionDef):
            _write_out(function)
    return found


def _write_out(function: ast.FunctionDef) -> None:
    """Replace arguments that are names by the text that ``function`` last gave them above."""
    texts: list[tuple[int, str, str]] = []
    calls = []
    for item in ast.walk(function):
        match item:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                texts.append((item.lineno, name, _text(value)))
            case ast.Call():
                calls.append(item)
    texts.sort()
    for call in calls:
        above = {name: text for line, name, text in texts if line < call.lineno}
        call.args = [_named(item, above) for item in call.args]
        for keyword in call.keywords:
            keyword.value = _named(keyword.value, above)


class NamedText(ast.Constant):
    """The text that a name stands for."""


def _named(value: ast.expr, texts: dict[str, str]) -> ast.expr:
    text = texts.get(value.id) if isinstance(value, ast.Name) else None
    return NamedText(text) if text else value


@cache
def _shared() -> dict[str, Signature]:
    """Public classes and functions of all rooms, which are called from other files."""
    result: dict[str, Signature] = {}
    for nodes in (nodes for room in ROOMS for nodes in _files(room)):
        for name, signature in _signatures(nodes):
            if not name.startswith("_"):
                result.setdefault(name, signature)
    for nodes in (nodes for room in ROOMS for nodes in _files(room)):
        for node in nodes:
            if isinstance(node, ast.ClassDef) and not _fields(node):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                if bases and (inherited := result.get(bases[0])) is not None:
                    result.setdefault(node.name, inherited)
    return result


def _signatures(nodes: list[ast.AST]) -> Iterator[tuple[str, Signature]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            worded = isinstance(node.returns, ast.Name) and node.returns.id == "str"
            names = () if worded else _parameters(node)  # text about a code gives none out
        elif isinstance(node, ast.ClassDef):
            names = _fields(node)
        else:
            continue
        if "code" in names:
            yield node.name, Signature(parameters=names)


def _parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    names = [posonlyarg.arg for posonlyarg in (*node.args.posonlyargs, *node.args.args)]
    names += [kwonlyarg.arg for kwonlyarg in node.args.kwonlyargs]
    return tuple(name for name in names if name not in {"self", "cls"})


def _fields(node: ast.ClassDef) -> tuple[str, ...]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _parameters(item)
    annotated = [entry.target for entry in node.body if isinstance(entry, ast.AnnAssign)]
    return tuple(element.id for element in annotated if isinstance(element, ast.Name))


def _use(call: ast.Call, signatures: dict[str, Signature], room: str) -> Iterator[Use]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    signature = signatures.get(name)
    if signature is None and not any(keyword.arg == "code" for keyword in call.keywords):
        return
    provided = (signature or Signature(parameters=())).arguments(call)
    for code in _constants(provided.get("code")):
        if CODE.fullmatch(code):
            yield Use(
                code=code,
                part=room,
                message=_first(provided, MESSAGES),
                remedy=_first(provided, REMEDIES),
                named=any(isinstance(provided.get(name), NamedText) for name in MESSAGES),
            )


def _class(node: ast.ClassDef, room: str) -> Iterator[Use]:
    """An error whose code is its class's says what it is in the class's docstring."""
    for item in node.body:
        match item:
            case ast.Assign(targets=[ast.Name(id="code")], value=value):
                about = (ast.get_docstring(node) or "").split("\n\n")[0]
                for code in _constants(value):
                    yield Use(code=code, part=room, message=about.replace("``", "`"), remedy="")


def _mistake(node: ast.AST, room: str) -> Iterator[Use]:
    """A known mistake, whose code is the name of the decorated function."""
    for decorator in getattr(node, "decorator_list", ()):
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "mistake":
            provided = {item.arg: item.value for item in decorator.keywords if item.arg}
            message = _first(provided, MESSAGES)
            remedy = _first(provided, ("fix",))
            yield Use(code=getattr(node, "name", ""), part=room, message=message, remedy=remedy)


def _in_table(part: object, room: str, name: str = "") -> Iterator[Use]:
    """The codes of a table of data, each stated in its entry or the entry's name."""
    if isinstance(part, dict):
        if {"message", "remedy"} <= part.keys():
            code = part.get("code", name)
            yield Use(code=code, part=room, message=part["message"], remedy=part["remedy"])
        for key, item in part.items():
            yield from _in_table(item, room, key)
    for item in part if isinstance(part, list) else ():
        yield from _in_table(item, room)


def _constants(value: ast.expr | None) -> Iterator[str]:
    """The text of a constant, or of both branches of a choice."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from _constants(value.body)
        yield from _constants(value.orelse)


def _first(given: dict[str, ast.expr], names: tuple[str, ...]) -> str:
    for name in names:
        if told := _text(given.get(name)):
            return _cut(told, SHOWN)
    return ""


def _shown(message: str) -> str:
    """A short message; of a longer one, the whole clauses or else words at its beginning."""
    if len(message) <= SHORT:
        return message
    clauses = CLAUSES.match(message[:SHORT])
    return f"{clauses[0].rstrip(' …')} …" if clauses else _cut(message, BEGINNING)


def _cut(text: str, most: int) -> str:
    """A text, or the whole words of its first ``most`` characters."""
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " …"


def _text(value: ast.expr | None) -> str:
    """A literal, with ``…`` for what is filled in; nothing for what is only a name."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + (_text(right) or "…")
        case ast.IfExp(body=body, orelse=orelse):
            return _text(body) or _text(orelse)
        case _:
            return ""
