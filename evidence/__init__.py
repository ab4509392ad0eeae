"""Evidence: what ran, and whether it was what the certificate says.

Begin with ``run_record`` (the lines that a trainer writes) and ``conformance`` (how they are
compared with the certificate). ``provenance`` signs them, ``hyperparameter_search`` joins the
runs of a search, ``replay_record`` is what a replay of a loop shows, and ``model`` has the claim
that travels with weights.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
