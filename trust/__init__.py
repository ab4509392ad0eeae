"""Trust: keys, signed envelopes, the log's trees and notes, and a verifier's trust policy.

Nothing here knows plans or numbers. Begin with ``dsse`` (the envelope) and ``key`` (what signs,
and for what). ``key_store`` and ``signers`` hold private keys, ``keyset`` and ``trust_root`` say
which keys count, ``trust_policy`` what a verifier requires. ``log`` has the hashes of the Merkle
tree, its notes and cosignatures.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
