"""Importing this module loads every accountant.

An engine is otherwise imported by the first plan that needs it, which takes a second in
each new process. The fork server imports this once, and its workers have it from birth.
"""

from __future__ import annotations

from affidavit.accountants import ENGINE_NAMES, accountant

ENGINES = tuple(accountant(name) for name in ENGINE_NAMES)
