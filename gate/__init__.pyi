from . import guard as guard
from .checking.importers import imported_document as imported_document
from .checking.importers.base import Partial as Partial
from .cli import app as app
from .plan_io import read_bytes as read_bytes
