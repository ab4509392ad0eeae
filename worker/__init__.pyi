from .__main__ import app as app
from .lease import TEXTS as TEXTS
from .lease import ClaimRequest as ClaimRequest
from .lease import Renewal as Renewal
