"""Affidavit certifies differentially private training.

>>> import affidavit
>>> plan = affidavit.Plan.dp_sgd(adjacency="add_remove", sampling="poisson", size=60000,
...     lot_size=600, epochs=10, noise_multiplier=1.1, delta=1e-5)
>>> f"{affidavit.epsilon(plan):.4f}"
'1.5154'

Questions (``certify``, ``epsilon``, ``noise_multiplier`` and the others) take a plan in any form
that ``load`` reads. The rooms of the product are the sub-packages: ``plan`` (what is run),
``mechanisms`` (what is released), ``accountants`` (how much it costs), ``certificate`` (the signed
statement), ``service`` (HTTP), ``gate`` (the command line) and ``library`` (the questions).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.2.0"
