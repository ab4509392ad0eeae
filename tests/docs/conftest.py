"""Makes ``docs.generate`` importable: it is run by ``make docs`` and is no part of the package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

if "docs" not in sys.modules:
    folder = ModuleType("docs")
    folder.__path__ = [str(Path(__file__).resolve().parents[2] / "docs")]
    sys.modules["docs"] = folder
