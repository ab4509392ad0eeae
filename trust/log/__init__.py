"""A tamper-evident log: its tree, its proofs, its signed checkpoints.

Nothing here uses a database or the network. ``tree`` has the hashes and proofs of RFC 9162,
``note`` the signed notes of C2SP, ``entry`` the logged bytes, ``inclusion_verification`` the steps
that verify the log part of a bundle, and ``monitoring`` the alarms.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
