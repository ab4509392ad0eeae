"""A log that cannot be rewritten unseen: its tree, its proofs, its signed checkpoints.

Pure: no database and no network. ``tree`` has the hashes and the proofs of RFC 9162,
``note`` what C2SP puts them in, ``entry`` the bytes that are logged, and ``verification`` checks
what a certificate's bundle says of its place.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
