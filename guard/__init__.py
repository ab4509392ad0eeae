"""The runtime guard: enforce a certificate in a training loop of another framework.

``opacus`` guards a run of Opacus, ``Guard`` any other loop that declares its releases. Both verify
the certificate, compare each release with the certified plan before it happens, stop the run with
``GuardStop`` at a difference, and write the record for ``affidavit conformance``. Neither imports
PyTorch.

    from affidavit import guard

    run = guard.opacus(privacy_engine, optimizer, data_loader, "bundle.json")

>>> from affidavit import guard
>>> sorted(guard.__all__)
['Guard', 'GuardStop', 'opacus']
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
