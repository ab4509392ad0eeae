"""No file here holds tests: they are programs, and need what only `make mutation` installs."""

from __future__ import annotations

collect_ignore_glob = ["*.py"]
