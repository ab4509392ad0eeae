from .schema import metadata as metadata
