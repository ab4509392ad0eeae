"""Reports: what was judged, written for a terminal, a code host, a test runner or a program.

Each is a function from all that was judged to a text; a new format is a file and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from affidavit.gate.checking.formats.github import github
from affidavit.gate.checking.formats.gitlab import gitlab
from affidavit.gate.checking.formats.json_document import json_document
from affidavit.gate.checking.formats.junit import junit
from affidavit.gate.checking.formats.sarif import sarif
from affidavit.gate.checking.verdict import Judged

Writer = Callable[[Sequence[Judged]], str]

WRITERS: dict[str, Writer] = {
    "github": github,
    "gitlab": gitlab,
    "json": json_document,
    "junit": junit,
    "sarif": sarif,
}
