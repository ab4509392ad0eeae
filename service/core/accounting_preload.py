"""Importing this module loads every accountant.

Otherwise the first plan of each new process would wait a second for the imports. The fork server
imports this module once, before it forks workers.
"""

from __future__ import annotations

from affidavit.accountants import ENGINE_NAMES, accountant

ENGINES = tuple(accountant(name) for name in ENGINE_NAMES)
