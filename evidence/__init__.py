"""Evidence: what ran, and whether it was what the certificate says.

Begin with ``run_record`` and ``conformance``; ``model`` has the claim that travels with weights.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
