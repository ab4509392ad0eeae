"""Where private halves are kept: in files, the environment, a PKCS#11 token, behind a command.

The key directory says which keys there are and when they may sign; its public records are
no secret. A module here answers one question, ``find(public)``: whoever can sign for that
key, or None if its private half is not kept there. Files are the ordinary way and live in
``certificate.keys``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
