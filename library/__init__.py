"""The functions of ``import affidavit``: questions about plans, with typed answers.

Every function takes a plan in any form that ``load`` reads. Each name is loaded when it is first
used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
