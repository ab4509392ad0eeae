"""A small checker: proofs of a certificate's ε and δ in ball arithmetic.

It shares nothing with the engines. They, or anybody, provide a witness, which need not be honest.
Statement and proof of every bound: docs/theorems/checker.md.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
