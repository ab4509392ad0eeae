"""The README as package indexes show it, where links to files of the repository lead nowhere.

They are made absolute below ``project.urls.Source``, and plain text while that is not set.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = PROJECT.get("urls", {}).get("Source")
LINK = re.compile(r"\[([^]]+)\]\((?!https?:)([^)]+)\)")

setup(
    long_description=LINK.sub(
        rf"[\1]({SOURCE}/blob/v{PROJECT['version']}/\2)" if SOURCE else r"\1",
        (ROOT / "README.md").read_text(encoding="utf-8"),
    ),
    long_description_content_type="text/markdown",
)
