"""Trust: keys, signed envelopes, the log's trees and notes, and a verifier's trust policy.

Nothing here knows plans or numbers. Begin with ``dsse`` (the envelope) and ``key``; ``log`` has
the hashes, notes and cosignatures, and ``trust_policy`` what a verifier requires.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
