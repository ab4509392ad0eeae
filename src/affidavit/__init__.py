"""Affidavit certifies differentially private training.

>>> import affidavit
>>> plan = affidavit.Plan.dp_sgd(adjacency="add_remove", sampling="poisson", size=60000,
...     lot_size=600, epochs=10, noise_multiplier=1.1, delta=1e-5)
>>> f"{affidavit.epsilon(plan):.4f}"
'1.5154'

Questions (``certify``, ``epsilon``, ``noise_multiplier`` and the others) take a plan in any form
that ``load`` reads. Its sub-packages are ``plan`` (what is run),
``mechanisms`` (what is released), ``accountants`` (how much it costs), ``certificate`` (the signed
statement), ``service`` (HTTP), ``gate`` (the command line) and ``library`` (the questions).
"""

from typing import Any

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except AttributeError:
        if name in __all__:
            raise
        from difflib import get_close_matches

        similar = get_close_matches(name, __all__, n=1)
        hint = f" Did you mean {similar[0]}?" if similar else ""
        message = f"module 'affidavit' has no attribute {name!r}.{hint}"
        raise AttributeError(message, name=name, obj=None) from None  # we suggest, not Python


__version__ = "0.2.0"
