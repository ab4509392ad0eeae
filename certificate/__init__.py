"""Certificates: sign an assessment under a policy, and verify it in numbered steps.

Begin with ``issuance`` (what is signed) and ``verification`` (each step, and what it needs).
``policy`` says what an organisation requires of a certificate and which waivers relax it,
``requirements`` adds what a policy needs to an assessment, ``certificate_proof`` the checker's
proof, and ``checks`` says in words what the checks of a certificate cover.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
