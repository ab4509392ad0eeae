"""The Dockerfile holds to what the image promises, as far as reading it can tell.

``make try-image`` carries its steps out.
"""

from __future__ import annotations

import re

from tests.release.image import instructions
from tests.support.building import ROOT


def test_all_that_is_installed_is_pinned_by_hash() -> None:
    installs = [rest for word, rest in instructions(0) if word == "RUN" and "pip install" in rest]
    for command in re.split("&&", " && ".join(installs)):
        if "pip install" in command:
            assert "--require-hashes" in command or "--no-index" in command, command


def test_it_runs_as_nobody_special_and_is_watched() -> None:
    words = dict(instructions(1))
    assert words["USER"].isdigit()
    assert int(words["USER"]) > 0
    assert "/livez" in words["HEALTHCHECK"]
    assert not any(word == "RUN" and "pip" in rest for word, rest in instructions(1))


def test_every_copied_name_is_let_through_and_nothing_more() -> None:
    copied = {
        name.rstrip("/")
        for word, rest in instructions(0)
        if word == "COPY"
        for name in rest.split()[:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    assert {line[1:].rstrip("/") for line in lines if line.startswith("!")} == copied
    rooms = {path.name for path in (ROOT / "src" / "affidavit").iterdir() if path.is_symlink()}
    assert rooms <= copied
