"""Replay: run a training loop on neighbouring data sets, and compare all that it does.

``affidavit replay -- python train.py`` runs the loop as it is, for a few steps on a processor. Each
run has equal randomness, and a data set that differs in one record: the record is masked in the
lots (removed), zeroed, replaced by another, or made an outlier. Two laws are tested:

* Sensitivity. With equal state and lot, a release before its noise moves by at most its clip norm.
* Non-interference. With the first run's noisy releases put in place of the second's, all else is
  equal, bit for bit: parameters, buffers, optimiser and scheduler state, steps, files.

A replay can only refute a loop. What it does not refute is stated with its steps, neighbours and
lines, and says nothing of other lines, devices and data.

Begin with ``driver``, which starts the runs. ``child`` runs in the loop's interpreter, and the
modules that it calls record what the loop does; ``comparison`` reads the records of two runs.

Reference: arXiv:2602.17454, which found faults of twelve libraries by replaying equal randomness.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
