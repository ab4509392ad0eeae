"""The plan: the document that says what is run, and what it means as data.

Begin with ``document`` (the fields, as models) and ``parse`` (from JSON or YAML to a plan, or to
all reasons against it). ``validators`` has the rules between fields, ``strict_parsing`` the
loader that knows positions, and ``serialization`` the canonical bytes and the digest. ``events``
is the closed union of what accountants count, ``schedule`` says which lots a run draws, and
``diagnostics`` what a reason is. Nothing here computes a number.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
