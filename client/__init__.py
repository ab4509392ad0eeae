"""A client of the HTTP service, blocking and asynchronous.

Begin with ``clients``: one method for each route. ``calls`` sends a request and repeats it where
that is safe, and ``models`` has the answers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
