"""The models that a command line may name; a new adapter is a file and a line here."""

from __future__ import annotations

from affidavit.trainer.models.language import gpt2
from affidavit.trainer.models.mlp import mlp
from affidavit.trainer.sources import ModelSource

MODELS: dict[str, ModelSource] = {"gpt2": gpt2, "mlp": mlp}
