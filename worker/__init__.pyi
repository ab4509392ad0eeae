from .__main__ import app as app
from .queue import TEXTS as TEXTS
from .queue import Renewal as Renewal
from .queue import Wanting as Wanting
