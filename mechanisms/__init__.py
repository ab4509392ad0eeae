"""What each mechanism releases: from a plan to events, or a refusal with its reason."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
