from .cli import app as app
from .plan_io import read_bytes as read_bytes
