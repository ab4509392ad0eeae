from .operation.database_admin import metadata as metadata
