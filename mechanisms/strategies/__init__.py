"""Noise that is correlated across steps: its strategies, their sensitivity and their error."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
