from .__main__ import app as app
from .clipping.kernels import KernelRefused as KernelRefused
from .clipping.kernels import register_kernel as register_kernel
from .data.numbers import Labelled as Labelled
from .data.numbers import digits as digits
from .models.mlp import mlp as mlp
