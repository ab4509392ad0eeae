"""The worker: claims certified runs, supervises the trainer, signs and reports what it did.

Begin with ``claiming``, and ``job`` (one run). ``lease`` and ``heartbeat`` keep the right to run,
``service_client`` asks the service, and ``trainer_process`` starts the trainer, which the worker
does not import.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
