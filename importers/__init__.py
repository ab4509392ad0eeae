"""Read plans from other libraries' documents and training scripts, which are parsed and never run.

An importer returns the plan fields that a document contains, and lists its assumptions. It never
adds a sampler, an adjacency or a target: missing fields must be given in pyproject.toml::

    [tool.affidavit.given."train.py"]
    adjacency = "zero_out"
    sampling = {scheme = "poisson"}
    target = {epsilon = 8.0, delta = 1e-5}

A new importer of documents is a module with two functions, and an entry in ``JSON_IMPORTERS``.
A new training library is a section of ``libraries.toml``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
