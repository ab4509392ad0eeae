"""The trainer: runs exactly the mechanism that a certificate names.

Begin with ``private_loop`` (in your own loop) or ``loop`` (the whole run). ``steps`` draws lots
and forms gradients, ``clipping`` bounds each record, ``noise`` draws noise, ``optimizers``
update, ``distributed`` shards, and ``run_folder`` keeps record and checkpoints. ``integrations``
serve other frameworks' loops, and ``search`` chooses between runs privately. Privacy parameters
come from the certificate alone.
"""

from typing import Any

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "affidavit.trainer needs PyTorch; run: pip install 'affidavit[trainer]'"
        raise ModuleNotFoundError(message, name="torch") from None
