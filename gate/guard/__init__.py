"""The runtime guard: a training loop that is not ours, held to a certificate while it runs.

``opacus`` watches a run of Opacus, ``Guard`` any other loop that tells it what it does. Both
verify the certificate, compare what the loop is about to do with the certified plan, stop it
with ``GuardStop`` before anything is released that does not fit, and write the record that
``affidavit conformance`` reads. Neither imports PyTorch: a loop that uses it has done so.

    from affidavit.gate import guard

    run = guard.opacus(privacy_engine, optimizer, data_loader, "bundle.json")

>>> from affidavit.gate import guard
>>> sorted(guard.__all__)
['Guard', 'GuardStop', 'opacus']
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
