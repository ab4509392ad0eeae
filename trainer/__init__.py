"""The trainer: runs exactly the mechanism that a certificate names.

Begin with ``private_loop`` (in your own loop) or ``loop`` (the whole run). ``steps`` draws lots
and forms gradients, ``clipping`` bounds each record, ``noise`` draws noise, ``optimizers``
update, ``distributed`` shards, and ``run_folder`` keeps record and checkpoints. ``integrations``
serve other frameworks' loops, and ``search`` chooses between runs privately. Privacy parameters
come from the certificate alone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
