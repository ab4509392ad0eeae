"""The command line, and the checks that stop an under-noised config.

Begin with ``cli``: one line for each command, whose file has the same name. ``entry`` starts it
and turns every failure into an exit code (``exit_codes``). ``checking`` finds and judges the
plans and scripts of a repository, ``render`` prints results, ``console`` and ``options`` are what
commands share.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
