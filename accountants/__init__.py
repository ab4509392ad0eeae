"""Accountants: from events to privacy curves with a lower and an upper bound."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
