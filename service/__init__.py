"""The HTTP service: plans come in, signed certificates go out and stay.

::

    route  ->  use case  ->  accounting pool   (a killable process that runs ``certify``)
                         ->  signer            (the organisation's key, or a development key)
                         ->  store             (one transaction: certificate, request, audit)

A route parses, calls one use case and maps errors to problem documents. What an ε means
is decided below this room; here it is only kept, and never changed once it is kept.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
