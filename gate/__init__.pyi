from . import guard as guard
from .cli import app as app
