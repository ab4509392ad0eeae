"""Tests of the trainer use one thread, like each rank of a run."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
