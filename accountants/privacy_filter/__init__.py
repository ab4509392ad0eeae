"""The privacy filter: which adaptively chosen runs a budget admits.

Throughout, ε and Rényi divergences are in nats, and μ is sensitivity over noise.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
