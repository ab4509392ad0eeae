"""Policies: which plans an organisation lets through, and who may make an exception."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
