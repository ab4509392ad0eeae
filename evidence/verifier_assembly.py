"""The verifier in one HTML file, which needs neither a server nor the network.

``browser_verifier`` has the steps of ``verify`` and ``verify_evidence`` again, as ES modules that
share nothing with the Python code. Here they become one page whose content security policy allows
its own script and style, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

_HOME = files("affidavit.evidence") / "browser_verifier"
_MODULES = (
    *("bytes", "json", "dates", "keys", "envelope", "merkle_tree", "signed_note", "trust"),
    *("status_list", "bundle_verification", "evidence_file", "evidence_verification"),
    *("verify_files", "page"),
)
"""The modules, each after those that it imports."""
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


@cache
def verifier_page() -> bytes:
    """Return the page; it is the same for every file of a release."""
    style, script = _read("page.css"), "\n".join(map(_as_function, _MODULES))
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    parts = {"policy": policy, "style": style, "script": script}
    page = re.sub(r"\{(policy|style|script)\}", lambda part: parts[part[1]], _read("page.html"))
    return page.encode()


def _read(name: str) -> str:
    return (_HOME / name).read_text(encoding="utf-8")


def _as_function(name: str) -> str:
    """Return a module as a function, whose names are its own, that returns what it exports."""
    source = _IMPORT.sub(r"const \1 = \2_module;", _read(f"{name}.js"))
    exported = ", ".join(match[2] for match in _EXPORT.finditer(source))
    body = _EXPORT.sub(r"\1", source)
    return f"const {name}_module = (() => {{\n{body}return {{ {exported} }};\n}})();"


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
