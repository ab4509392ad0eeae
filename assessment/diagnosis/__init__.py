"""Diagnosis: the known mistakes that explain a claim that cannot be certified."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
