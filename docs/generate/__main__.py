"""``python -m docs.generate``."""

from docs.generate import write

write()
