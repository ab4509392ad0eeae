from .__main__ import app as app
from .data.numbers import Labelled as Labelled
from .data.numbers import digits as digits
from .models.mlp import mlp as mlp
