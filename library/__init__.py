"""What ``import affidavit`` offers: questions about plans, and typed answers.

Every question takes a plan in any form that ``load`` knows. Importing is quick, because each
name is loaded when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
