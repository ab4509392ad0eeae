"""The HTTP API, from ``docs/openapi.json``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docs.generate.tables import table, words

DOCUMENT = Path(__file__).resolve().parents[1] / "openapi.json"
HEAD = """# The HTTP API

Generated from [openapi.json](../openapi.json) by `make docs`; change `service/web/routes/`, not
this file. The service answers the same document at `/openapi.json`, with the schema of every body.

Every error is a problem document (`application/problem+json`, RFC 9457) with a stable `code`; the
reasons inside it have codes too ([codes](codes.md)). A route that needs a token names the scope
that the token must have ([tokens](../how-to/tokens.md)).

Any route can return 401, 403, 413, 429, 500 and 503; one with a body also 400, 408 and 415, and one
with parameters 422. A route says which it returns besides. They mean:

"""
"""How the page begins."""
ANYWHERE = ("401", "403", "413", "429", "500", "503")
"""Answers that any route has."""
WITH_BODY = ("400", "408", "415")
WITH_PARAMETERS = ("422",)
"""Further answers of any route that has one."""
JSON_ALONE = ["application/json"]
EVERY_SCOPE = {"submit", "approve", "audit", "work", "admin"}
USUAL = ("200", "Successful Response")
"""The answer that is not listed."""
BRIEF = 30
"""The longest text, in characters, of an answer that is not listed where it is the only one."""


def page() -> str:
    """Every operation: what it is, who may, what goes in, what comes out."""
    document = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    usual = _usual(entry for _, entry in operations)
    scopes = re.compile(r"has no scope .*")
    shared = [(code, scopes.sub("lacks the scope.", usual[code])) for code in sorted(usual)]
    uses = Counter(item for _, entry in operations for item in _parameters(entry))
    several = {item for item, times in uses.items() if times > 2 and item[1]}
    parameters = sorted((f"`{name}`", about) for name, about in several)
    head = HEAD + table(("answer", "meaning"), shared)
    head += f"\nParameters of several routes:\n\n{table(('name', 'value'), parameters)}\n"
    return head + "\n".join(_operation(*item, usual, several) for item in operations)


def _usual(operations: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What each answer means on most routes that have it."""
    meanings: dict[str, Counter[str]] = {}
    for code, text in (answer for entry in operations for answer in _answers(entry)):
        meanings.setdefault(code, Counter())[text] += 1
    return {
        code: counter.most_common(1)[0][0]
        for code, counter in meanings.items()
        if code == "202" or int(code) >= 400
    }


def _answers(operation: dict[str, Any]) -> list[tuple[str, str]]:
    return [(code, item["description"]) for code, item in operation["responses"].items()]


def _operation(
    name: str, operation: dict[str, Any], usual: dict[str, str], several: set[Parameter]
) -> str:
    """The section of a route; raises ``ValueError`` if it lacks an answer that the head states."""
    about = f"{operation['summary']}. {operation.get('description', '')}".strip()
    told = [f"## {name}\n", about.replace("``", "`") + f" {_who(operation)}{_body(operation)}"]
    parameters = [*_parameters(operation)]
    in_path = {item for item in parameters if f"{{{item[0]}}}" in name}
    known = {item for item in in_path if item in several or not item[1]}
    others = [item[0:1] if item in several else item for item in parameters if item not in known]
    if others:
        told.append(f"\nParameters: {'; '.join(_shown(*item) for item in others)}.")
    stated = {*ANYWHERE}
    stated |= {*WITH_BODY} if "requestBody" in operation else set()
    stated |= {*WITH_PARAMETERS} if parameters else set()
    answers = _answers(operation)
    if missing := stated - {code for code, _ in answers} - {*ANYWHERE}:
        raise ValueError(f"{name} does not return {sorted(missing)}")
    besides = [item for item in answers if item[0] not in ANYWHERE and item != USUAL]
    if sum(code < "400" for code, _ in besides) == 1:  # "The curves." repeats the summary
        besides = [(code, text) for code, text in besides if code != "200" or len(text) > BRIEF]
    if own := [f"**{code}** {text}" for code, text in besides if usual.get(code) != text]:
        told.append("\n" + " ".join(own))
    also = [code for code, text in besides if usual.get(code) == text and code not in stated]
    if also:
        told.append(f"\nAlso {', '.join(also)}.")
    return "\n".join(told) + "\n"


def _who(operation: dict[str, Any]) -> str:
    requested = operation.get("security", [])
    scopes = [scope for item in requested for scope in item.get("bearer", ())]
    if scopes and set(scopes) != EVERY_SCOPE:
        *first, last = (f"`{scope}`" for scope in scopes)
        return f"Scope {' or '.join(filter(None, (', '.join(first), last)))}."
    return "Any scope." if scopes else "Any token." if requested else "Open to everybody."


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    names = {item["schema"].get("$ref", "").rsplit("/", 1)[-1] for item in content.values()}
    named = " or ".join(f"`{name}`" for name in sorted(names) if name)
    form = "" if list(content) == JSON_ALONE else ", in JSON or YAML"
    return f" Body: {named}{form}." if content else ""


Parameter = tuple[str, str]
"""A parameter's name, and what it takes and means."""


def _parameters(operation: dict[str, Any]) -> Iterator[Parameter]:
    """Each with what it takes, where that is not any text, and its meaning."""
    for item in operation.get("parameters", ()):
        takes = "" if "$ref" in str(item["schema"]) else words(item["schema"])
        takes = takes.removesuffix(" or null").replace("text", "")
        where = "" if item["in"] in {"path", "query"} else f"in the {item['in']}"
        about = item.get("description", "").rstrip(".").replace("``", "`")
        yield item["name"], ", ".join(part for part in (where, takes, about) if part)


def _shown(name: str, about: str = "") -> str:
    return f"`{name}`" + (f" ({about})" if about else "")
