from .migrate import metadata as metadata
